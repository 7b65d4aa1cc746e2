"""What crosses the borders between stages in an optimizer step, measured beside expected."""

from collections.abc import Mapping

import msgspec

from boltmesh.telemetry.snapshot import JobSnapshot, PipelinePlan
from boltmesh.tui.figures.memo import remember_last
from boltmesh.tui.figures.peers import rank_pairs
from boltmesh.tui.figures.pipelines import slowest_whole_step
from boltmesh.tui.figures.verdict import STEPS_BEFORE_A_VERDICT, TOLERANCE


class Flow(msgspec.Struct, frozen=True):
    """Bytes from one rank to another in an optimizer step."""

    measured: float | None
    expected: float

    @property
    def is_equal(self) -> bool | None:
        """Whether what is measured is what was expected; None where nothing is measured."""
        if self.measured is None:
            return None
        return abs(self.measured - self.expected) <= TOLERANCE * self.expected


class Border(msgspec.Struct, frozen=True):
    """Two ranks whose stages follow each other."""

    ranks: tuple[int, int]
    """The first is the one that stands earlier in the pipeline."""
    stages: tuple[int, ...]
    """Those behind which there is a border between the two."""
    there: Flow
    """From the first rank to the second."""
    back: Flow


@remember_last
def borders(job: JobSnapshot) -> tuple[Border, ...]:
    """Return the borders of the pipeline that ``bubble`` shows; none where nobody told of them."""
    plan, step = job.pipeline, slowest_whole_step(job)
    if plan is None or step is None or not _is_told(plan, len(step.ranks)):
        return ()
    expected, between = _expected(plan)
    pairs = rank_pairs(job)
    is_early = job.global_step < STEPS_BEFORE_A_VERDICT

    def flow(first: int, second: int) -> Flow:
        measured = pairs.get((step.ranks[first], step.ranks[second]))
        return Flow(None if is_early else measured, expected.get((first, second), 0.0))

    return tuple(
        Border(
            ranks=(step.ranks[first], step.ranks[second]),
            stages=stages,
            there=flow(first, second),
            back=flow(second, first),
        )
        for (first, second), stages in sorted(between.items())
    )


def _is_told(plan: PipelinePlan, num_ranks: int) -> bool:
    """Files of a job may hold anything."""
    count = len(plan.rank_of_stage)
    return count == len(plan.border_bytes) + 1 and all(
        0 <= rank < num_ranks for rank in plan.rank_of_stage
    )


def _expected(
    plan: PipelinePlan,
) -> tuple[Mapping[tuple[int, int], float], Mapping[tuple[int, int], tuple[int, ...]]]:
    """Return the bytes from rank to rank, and the stages at whose end there is a border."""
    expected: dict[tuple[int, int], float] = {}
    between: dict[tuple[int, int], tuple[int, ...]] = {}
    for stage, (forward, back) in enumerate(plan.border_bytes):
        sender, receiver = plan.rank_of_stage[stage], plan.rank_of_stage[stage + 1]
        if sender == receiver:
            continue
        for pair, num_bytes in (((sender, receiver), forward), ((receiver, sender), back)):
            expected[pair] = expected.get(pair, 0.0) + num_bytes
        ranks = (min(sender, receiver), max(sender, receiver))
        between[ranks] = (*between.get(ranks, ()), stage)
    return expected, between
