"""What ranks do together fails on all of them or on none, so that nobody waits for the others."""

from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist

from boltmesh.errors import BoltMeshError, CheckpointError

T = TypeVar("T")


def all_or_none(action: Callable[[], T], group: dist.ProcessGroup | None = None) -> T:
    """Run ``action``, and raise on every rank when it raises on one. Collective over all ranks.

    Args:
        action: What may fail.
        group: Of all ranks, where the default group is somebody else's at this time.

    Raises:
        CheckpointError: With the words of the first rank that failed; a subclass where that is
            what it raised.
    """
    result: T | None = None
    failure: Exception | None = None
    try:
        result = action()
    except Exception as error:  # noqa: BLE001 - it is raised below, on every rank
        failure = error
    if dist.is_initialized() and dist.get_world_size() > 1:
        reports: list[tuple[type[CheckpointError], str] | None] = [None] * dist.get_world_size()
        dist.all_gather_object(reports, None if failure is None else _describe(failure), group)
        if any(reports):
            rank, (kind, report) = next((at, each) for at, each in enumerate(reports) if each)
            raise kind(f"{report} (rank {rank})") from failure
    elif failure is not None:
        raise failure
    return result  # type: ignore[return-value]


def run_on_rank0_and_broadcast(
    action: Callable[[], T], group: dist.ProcessGroup | None = None
) -> T:
    """Run ``action`` on the first rank and give all of them its result. Collective over all ranks.

    Args:
        action: What may fail; gives what can be pickled.
        group: See ``together``.

    Raises:
        CheckpointError: On every rank, when it failed.
    """
    is_first = not dist.is_initialized() or dist.get_rank() == 0
    result = all_or_none(action if is_first else _nothing, group)
    if dist.is_initialized() and dist.get_world_size() > 1:
        told = [result]
        dist.broadcast_object_list(told, 0, group)
        (result,) = told
    return result  # type: ignore[return-value]


def run_on_rank0(action: Callable[[], object], group: dist.ProcessGroup | None = None) -> None:
    """Run ``action`` on the first rank, and raise on all of them when it fails. Collective."""
    is_first = not dist.is_initialized() or dist.get_rank() == 0
    all_or_none(action if is_first else _nothing, group)


def _nothing() -> None:
    """What other ranks do while the first one works."""


def _describe(error: Exception) -> tuple[type[CheckpointError], str]:
    kind = type(error) if isinstance(error, CheckpointError) else CheckpointError
    if isinstance(error, BoltMeshError):
        return kind, str(error)
    return kind, f"{type(error).__name__}: {error}"
