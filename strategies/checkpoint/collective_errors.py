"""Actions that fail on all ranks or on none, so that no rank waits for one that has failed."""

from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist

from boltmesh.errors import BoltMeshError, CheckpointError

T = TypeVar("T")


def all_or_none(action: Callable[[], T], group: dist.ProcessGroup | None = None) -> T:
    """Run ``action``, and raise on every rank when it raises on one. Collective over all ranks.

    Args:
        action: May fail.
        group: Of all ranks, if the default group is in use by another thread.

    Raises:
        CheckpointError: With the error of the first rank that failed; of its class if that is a
            subclass.
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
            rank, (kind, report) = next(
                (rank, found) for rank, found in enumerate(reports) if found
            )
            raise kind(f"{report} (rank {rank})") from failure
    elif failure is not None:
        raise failure
    return result  # type: ignore[return-value]


def run_on_rank0_and_broadcast(
    action: Callable[[], T], group: dist.ProcessGroup | None = None
) -> T:
    """Run ``action`` on rank 0 and return its result on all ranks. Collective over all ranks.

    Args:
        action: May fail; returns an object that can be pickled.
        group: See ``all_or_none``.

    Raises:
        CheckpointError: The action failed; on every rank.
    """
    is_first = not dist.is_initialized() or dist.get_rank() == 0
    result = all_or_none(action if is_first else _noop, group)
    if dist.is_initialized() and dist.get_world_size() > 1:
        results = [result]
        dist.broadcast_object_list(results, 0, group)
        (result,) = results
    return result  # type: ignore[return-value]


def run_on_rank0(action: Callable[[], object], group: dist.ProcessGroup | None = None) -> None:
    """Run ``action`` on rank 0, and raise on all ranks when it fails. Collective."""
    is_first = not dist.is_initialized() or dist.get_rank() == 0
    all_or_none(action if is_first else _noop, group)


def _noop() -> None:
    """The action of the other ranks."""


def _describe(error: Exception) -> tuple[type[CheckpointError], str]:
    kind = type(error) if isinstance(error, CheckpointError) else CheckpointError
    if isinstance(error, BoltMeshError):
        return kind, str(error)
    return kind, f"{type(error).__name__}: {error}"
