"""Load of the experts of each layer, summed over the ranks."""

from collections.abc import Iterable
from typing import NamedTuple

from boltmesh.telemetry.snapshot import JobSnapshot


class LayerLoad(NamedTuple):
    """Rows of the experts of one module, of all ranks."""

    module: str
    rows: tuple[int, ...]
    """Rows of each expert, since the run began."""
    recent: tuple[int, ...]
    """Rows of each expert in the last seconds; in the whole run if there were none."""
    dropped: int = 0
    """Rows that an expert had no place for, since the run began."""

    @property
    def mean(self) -> float:
        """Rows of an expert if all had the same."""
        return sum(self.recent) / len(self.recent)

    @property
    def imbalance(self) -> float | None:
        """Rows of the expert with most over the mean: its rank is waited for."""
        return max(self.recent) / self.mean if self.mean else None

    @property
    def least(self) -> float | None:
        """Rows of the expert with fewest over the mean."""
        return min(self.recent) / self.mean if self.mean else None

    def by_rank(self, size: int) -> list[int]:
        """Return the rows of each of ``size`` ranks that have all experts together, in order."""
        each = -(-len(self.recent) // size)
        return [sum(self.recent[start : start + each]) for start in range(0, each * size, each)]

    @property
    def dropped_share(self) -> float | None:
        """Rows that an expert had no place for over all that were to be sent."""
        rows = sum(self.rows)
        return self.dropped / rows if rows else None

    @property
    def num_idle(self) -> int:
        """Experts without a row."""
        return self.recent.count(0)


def num_sharing(job: JobSnapshot) -> int:
    """Return how many ranks have all experts together; 1 where that is not known."""
    groups = (group for rank in job.ranks for group in rank.groups if group.axis == "expert")
    return max((1, *(len(group.ranks) for group in groups)))


def excess_work(loads: Iterable[LayerLoad], size: int) -> float | None:
    """Return the rows of the fullest ranks over those of a mean rank; layers wait one by one.

    Args:
        loads: The load of each layer.
        size: Ranks that have all experts together.
    """
    ranks = [load.by_rank(size) for load in loads]
    total = sum(map(sum, ranks))
    return size * sum(map(max, ranks)) / total if total > 0 else None


def layer_loads(job: JobSnapshot) -> list[LayerLoad]:
    """Return the load of each module with divided experts, in the order of the model."""
    sums: dict[str, tuple[list[int], list[int]]] = {}
    dropped: dict[str, int] = {}
    for rank in job.ranks:
        for load in rank.experts:
            dropped[load.module] = dropped.get(load.module, 0) + load.dropped
            size = len(load.rows)
            rows, recent = sums.setdefault(load.module, ([0] * size, [0] * size))
            if len(rows) == size == len(load.recent):
                rows[:] = map(sum, zip(rows, load.rows, strict=True))
                recent[:] = map(sum, zip(recent, load.recent, strict=True))
    return [
        LayerLoad(
            module, tuple(rows), tuple(recent if any(recent) else rows), dropped.get(module, 0)
        )
        for module, (rows, recent) in sums.items()
        if rows
    ]
