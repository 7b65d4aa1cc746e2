"""Forward, backward and compute time of a pipeline's stages, from the chunks that they record."""

import msgspec
import pytest

from boltmesh.schedule_sim import Order, one_forward_one_backward, simulate, window_of
from boltmesh.telemetry.snapshot import Chunk, JobSnapshot, PipelinePlan
from boltmesh.tui import units
from boltmesh.tui.metrics.findings.diagnose import diagnose
from boltmesh.tui.metrics.step_time import phase_split, rank_profiles
from boltmesh.tui.metrics.stragglers import stragglers
from boltmesh.tui.panels.bubble import draw_bubble
from boltmesh.tui.panels.context import context_rows
from boltmesh.tui.panels.rank_table import draw_rank_table
from boltmesh.tui.render.style import UNICODE, Style
from tests.tui.loads import worker
from tests.tui.samples import NOW, job, state

STEPS, STAGES, MICROBATCHES = 24, 2, 4
SECONDS = {"F": 0.010, "B": 0.020, "I": 0.012, "W": 0.008}
OPTIMIZER_S, REDUCE_S = 0.006, 0.002
LOOK = Style(UNICODE)
F1B1 = one_forward_one_backward(STAGES, MICROBATCHES)


def _split_backward(order: Order) -> Order:
    """Return the order with each backward pass in two: for the input, then for the weights."""

    def parts(text: str) -> tuple[str, ...]:
        return (text.replace("B", "I"), text.replace("B", "W")) if "B" in text else (text,)

    return tuple(tuple(part for text in row if text for part in parts(text)) for row in order)


def _live(order: Order = F1B1, *, slow: float = 1.0, accumulate: int = 1) -> JobSnapshot:
    """A job as it records itself: the schedule runs in ``forward``, waits included.

    Stage 1 takes ``slow`` times as long. Every third step takes half as long again.
    """
    chunks: list[list[Chunk]] = [[] for _ in range(STAGES)]
    windows = []
    start = NOW - 60.0
    for index in range(STEPS):
        scale = 1.5 if index % 3 == 0 else 1.0
        table = simulate(
            order,
            lambda action, scale=scale: (  # type: ignore[misc]
                scale * SECONDS[action.kind] * (slow if action.stage == STAGES - 1 else 1.0)
            ),
        )
        windows.append(window_of(table))
        for at, row in enumerate(table):
            chunks[at] += [
                Chunk(
                    index // accumulate + 1,
                    slot.action.stage,
                    slot.action.microbatch,
                    slot.action.kind,  # type: ignore[arg-type]
                    start + slot.start,
                    start + slot.end,
                )
                for slot in row
            ]
        start += 1.0

    def load(index: int) -> dict[str, float]:
        return {
            "forward": windows[index],
            "optimizer": OPTIMIZER_S,
            "communication": REDUCE_S,
        }

    ranks = []
    for at in range(STAGES):
        made = worker(at, load, coordinates={"pipeline": at, "data": 0, "tensor": 0})
        steps = tuple(
            msgspec.structs.replace(each, global_step=(each.index + 1) // accumulate)
            for each in made.steps
        )
        ranks.append(msgspec.structs.replace(made, steps=steps, chunks=tuple(chunks[at])))
    return job(
        ranks=tuple(ranks),
        mesh={"pipeline": STAGES, "data": 1, "tensor": 1},
        pipeline=PipelinePlan("1f1b", STAGES, MICROBATCHES, order),
        global_step=STEPS // accumulate,
    )


def _truth(snapshot: JobSnapshot, rank: int, kinds: str, newest: int = 20) -> float:
    """Mean seconds of these kinds in one of the newest batches."""
    size = len(snapshot.ranks[rank].chunks) // STEPS
    chunks = snapshot.ranks[rank].chunks[-newest * size :]
    return sum(chunk.end - chunk.start for chunk in chunks if chunk.kind in kinds) / newest


@pytest.mark.parametrize("accumulate", [1, 2, 4])
@pytest.mark.parametrize("order", [F1B1, _split_backward(F1B1)], ids=["1f1b", "split backward"])
def test_the_phases_of_each_rank_are_those_of_its_chunks(order: Order, accumulate: int) -> None:
    snapshot = _live(order, slow=1.3, accumulate=accumulate)
    split = phase_split(snapshot)
    assert split is not None
    seconds = {phase.name: phase.seconds for phase in split.phases}
    for name, kinds in (("forward", "F"), ("backward", "BIW")):
        truth = sum(_truth(snapshot, rank, kinds) for rank in range(STAGES)) / STAGES
        assert seconds[name] == pytest.approx(truth, rel=1e-4)
    assert seconds["communication"] == pytest.approx(REDUCE_S)
    assert seconds["optimizer"] == pytest.approx(OPTIMIZER_S)
    assert sum(seconds.values()) == pytest.approx(split.seconds)


def test_compute_time_leaves_out_the_wait_for_neighbours() -> None:
    snapshot = _live(slow=1.5)
    profiles = rank_profiles(snapshot)
    for rank in range(STAGES):
        # The median step is one of the ordinary ones.
        busy = MICROBATCHES * (SECONDS["F"] + SECONDS["B"]) * (1.5 if rank == 1 else 1.0)
        assert profiles[rank].own_s == pytest.approx(busy + OPTIMIZER_S, rel=1e-3)
    assert profiles[0].step_s == pytest.approx(profiles[1].step_s)
    # Nor is it communication, where the context screen has both.
    assert [row.exposed_s for row in context_rows(snapshot)] == pytest.approx([REDUCE_S] * STAGES)


@pytest.mark.parametrize(("slow", "is_named"), [(1.05, False), (1.5, True), (0.5, True)])
def test_a_slow_stage_is_named_as_the_straggler(slow: float, *, is_named: bool) -> None:
    snapshot = _live(slow=slow)
    late = stragglers(snapshot)
    assert bool(late) == is_named
    if is_named:
        stage = 1 if slow > 1 else 0
        assert (late[0].rank, late[0].stage) == (stage, stage)
        assert late[0].peers_wait_s > late[0].wait_s
        found = next(each for each in diagnose(state(snapshot)) if each.kind == "straggler")
        assert found.ranks == (stage,)
        assert f"move a block from stage {stage}" in found.advice


def test_the_pipeline_page_has_the_times_of_each_stage() -> None:
    snapshot = _live(_split_backward(F1B1), slow=1.5)
    text = "\n".join(line.plain for line in draw_bubble(state(snapshot), 160, 12, LOOK))
    for title in ("forward", "backward", "weight grad", "compute"):
        assert title in text
    row = next(line for line in text.splitlines() if "rank 1" in line)
    # A third of the steps takes half as long again.
    for kind in ("F", "I", "W", "FIW"):
        truth = _truth(snapshot, 1, kind, newest=STEPS)
        assert units.seconds(truth) in row


def test_without_chunks_the_phases_are_as_recorded() -> None:
    snapshot = _live()
    bare = tuple(msgspec.structs.replace(rank, chunks=()) for rank in snapshot.ranks)
    split = phase_split(msgspec.structs.replace(snapshot, ranks=bare))
    assert split is not None
    assert {phase.name for phase in split.phases} == {"forward", "optimizer", "communication"}
    assert stragglers(msgspec.structs.replace(snapshot, ranks=bare)) == []


def test_the_rank_table_shows_the_bubble_as_a_part_of_its_own() -> None:
    drawn = draw_rank_table(state(_live()), 200, 6, LOOK)
    roles = {role for line in drawn[2:] for _, role in line.spans}
    assert "bubble" in roles
