"""Collectives on Python objects, and actions that fail on all ranks or on none.

``gather_objects`` and ``broadcast_object`` take any small object that can be pickled; a group None
stands for all ranks of the job. After ``all_or_none`` no rank waits for one that has failed.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from boltmesh.errors import BoltMeshError, CheckpointError

T = TypeVar("T")


def gather_objects(item: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """Return the item of each rank, in the order of the group. Collective over the group."""
    items = [item] * dist.get_world_size(group)
    dist.all_gather_object(items, item, group)
    return items


def broadcast_from_rank0(value: T, group: dist.ProcessGroup | None = None) -> T:
    """Return the first rank's value on every rank. Collective over the group."""
    return broadcast_object(value, 0 if group is None else dist.get_global_rank(group, 0), group)


def broadcast_object(value: T, source: int, group: dist.ProcessGroup | None = None) -> T:
    """Return the value of rank ``source`` of the job on every rank. Collective over the group."""
    holder = [value]
    dist.broadcast_object_list(holder, source, group=group)
    return holder[0]


def all_or_none(action: Callable[[], T], group: dist.ProcessGroup | None = None) -> T:
    """Run ``action``, and raise on every rank when it raises on one. Collective over all ranks.

    Args:
        action: May raise.
        group: A group of all ranks, if the default group is in use by another thread.

    Raises:
        CheckpointError: The error of the first rank that failed, or its subclass.
    """
    result: T | None = None
    failure: Exception | None = None
    try:
        result = action()
    except Exception as error:  # noqa: BLE001 - it is raised below, on every rank
        failure = error
    if dist.is_initialized() and dist.get_world_size() > 1:
        reports = gather_objects(None if failure is None else _describe(failure), group)
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

    Raises:
        CheckpointError: The action failed; raised on every rank.
    """
    is_first = not dist.is_initialized() or dist.get_rank() == 0
    result = all_or_none(action if is_first else noop, group)
    if dist.is_initialized() and dist.get_world_size() > 1:
        result = broadcast_object(result, 0, group)
    return result  # type: ignore[return-value]


def run_on_rank0(action: Callable[[], object], group: dist.ProcessGroup | None = None) -> None:
    """Run ``action`` on rank 0, and raise on all ranks if it fails. Collective."""
    is_first = not dist.is_initialized() or dist.get_rank() == 0
    all_or_none(action if is_first else noop, group)


def noop(*_: Any, **__: Any) -> None:
    """Do nothing: for ranks that only take part in an action, and for unset hooks."""


def _describe(error: Exception) -> tuple[type[CheckpointError], str]:
    kind = type(error) if isinstance(error, CheckpointError) else CheckpointError
    if isinstance(error, BoltMeshError):
        return kind, str(error)
    return kind, f"{type(error).__name__}: {error}"
