"""What crosses the borders of a pipeline's stages, a line for each pair of ranks.

What crosses the borders between stages in an optimizer step, measured beside expected.
"""

from collections.abc import Mapping

import msgspec

from boltmesh.telemetry.snapshot import JobSnapshot, PipelinePlan
from boltmesh.tui import units
from boltmesh.tui.metrics.memo import remember_last
from boltmesh.tui.metrics.pipelines import slowest_whole_step
from boltmesh.tui.metrics.traffic import STEPS_BEFORE_A_VERDICT, TOLERANCE
from boltmesh.tui.panels.peers import rank_pairs
from boltmesh.tui.render.line import Line
from boltmesh.tui.render.ranks import fit_rows
from boltmesh.tui.render.style import Style, heading
from boltmesh.tui.render.table import Cell, Column, draw_table
from boltmesh.tui.state import State


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


def draw_borders(state: State, width: int, height: int, look: Style) -> list[Line]:
    """A table; nothing where no job has told what to expect."""
    found = borders(state.job)
    if not found:
        return []
    lines: list[Line] = []
    if look.has_headings and height >= 2:
        lines.append(heading("stage boundaries, bytes per step", width, look))
    columns = [
        Column("ranks"),
        Column("stages", rank=2),
        Column("activations fwd", is_number=True),
        Column("expected", is_number=True, rank=1),
        Column("gradients bwd", is_number=True),
        Column("expected", is_number=True, rank=1),
        Column("difference"),
    ]
    cells = [_cells(border, look) for border in found]
    table = draw_table(columns, cells, width, ellipsis=look.glyphs.ellipsis)
    lines += [table[0], *fit_rows(table[1:], height - len(lines) - 1, width)]
    return lines[: max(0, height)]


def _cells(border: Border, look: Style) -> list[Cell]:
    first, second = border.ranks
    stages = ", ".join(f"{stage}-{stage + 1}" for stage in border.stages)
    return [
        Line(f"{first} - {second}", "muted"),
        Line(stages, "muted"),
        units.traffic(border.there.measured),
        Line(units.traffic(border.there.expected), "muted"),
        units.traffic(border.back.measured),
        Line(units.traffic(border.back.expected), "muted"),
        _verdict(border.there, border.back, look),
    ]


def _verdict(there: Flow, back: Flow, look: Style) -> Line:
    if there.is_equal is None or back.is_equal is None:
        return Line("counting", "muted")
    if there.is_equal and back.is_equal:
        return Line(look.sign(look.glyphs.equal) + "as expected", "good")
    return Line(look.sign(look.glyphs.differs) + "differs", "bad")
