"""Several pieces of work in the same ranks, for starting ranks takes longer than small work."""

from collections.abc import Callable, Sequence
from typing import Any


def in_turn(
    rank: int, world_size: int, worker: Callable[..., Any], calls: Sequence[tuple[Any, ...]]
) -> list[Any]:
    """Call ``worker(rank, world_size, *call)`` for each call and return the results."""
    return [worker(rank, world_size, *call) for call in calls]
