"""The split of a step with its bubble, and what the devices compute."""

import msgspec
import pytest

from boltmesh.telemetry.snapshot import Chunk, JobSnapshot, PipelinePlan
from boltmesh.tui.demo import Scenario
from boltmesh.tui.metrics.figures import job_flops, rank_flops
from boltmesh.tui.metrics.findings.diagnose import diagnose
from boltmesh.tui.metrics.findings.finding import Finding
from boltmesh.tui.metrics.findings.waits import BUBBLE_SHARE, PART_SHARE
from boltmesh.tui.metrics.pipelines import bubble
from boltmesh.tui.metrics.step_time import SPLIT_PHASES, phase_split
from boltmesh.tui.panels.throughput import draw_phases, draw_throughput
from boltmesh.tui.render.bars import phase_role
from boltmesh.tui.render.style import ASCII, UNICODE, Style
from boltmesh.tui.state import State, fold
from tests.tui.loads import HEALTHY, Load, steady, team, worker
from tests.tui.samples import NOW, demo, job, state

LOOK = Style(UNICODE)
STEP = 24
FORWARD_S, BACKWARD_S = 0.010, 0.020


def _pipeline(
    *, stages: int = 2, microbatches: int = 4, slow: float = 1.0, pause_s: float = 0.0
) -> JobSnapshot:
    """GPipe: all forwards, then all backwards; the last stage ``slow`` times as long.

    ``pause_s`` passes before each chunk on every stage.
    """
    starts: dict[tuple[str, int, int], float] = {}
    free = [0.0] * stages
    chunks: list[list[Chunk]] = [[] for _ in range(stages)]

    def run(kind: str, stage: int, batch: int, after: float, seconds: float) -> None:
        seconds *= slow if stage == stages - 1 else 1.0
        start = max(free[stage], after) + pause_s
        free[stage] = starts[kind, stage, batch] = start + seconds
        chunks[stage].append(Chunk(STEP, stage, batch, kind, NOW + start, NOW + start + seconds))  # type: ignore[arg-type]

    for batch in range(microbatches):
        for stage in range(stages):
            run("F", stage, batch, starts.get(("F", stage - 1, batch), 0.0), FORWARD_S)
    for batch in range(microbatches):
        for stage in reversed(range(stages)):
            run("B", stage, batch, starts.get(("B", stage + 1, batch), 0.0), BACKWARD_S)
    window_s = max(free)
    order = tuple(
        tuple(f"{stage}{kind}{batch}" for kind in "FB" for batch in range(microbatches))
        for stage in range(stages)
    )
    ranks = []
    for stage in range(stages):
        busy = {"forward": 0.0, "backward": 0.0}
        for chunk in chunks[stage]:
            name = "forward" if chunk.kind == "F" else "backward"
            busy[name] += chunk.end - chunk.start
        idle_s = window_s - sum(busy.values())
        ranks.append(
            worker(
                stage,
                _always({**busy, "communication": idle_s}),
                coordinates={"pipeline": stage, "data": 0, "tensor": 0},
                chunks=tuple(chunks[stage]),
            )
        )
    return job(
        ranks=tuple(ranks),
        mesh={"pipeline": stages, "data": 1, "tensor": 1},
        pipeline=PipelinePlan("gpipe", stages, microbatches, order),
        global_step=STEP,
    )


def _always(phases: dict[str, float]) -> Load:
    return lambda _: phases


def _bubble_of(snapshot: JobSnapshot) -> Finding | None:
    found = diagnose(state(snapshot))
    assert {finding.kind for finding in found} <= {"bubble"}
    return next(iter(found), None)


def test_idle_time_of_a_pipeline_is_a_part_of_its_own() -> None:
    shown = state(_pipeline(stages=2, microbatches=4))
    split = phase_split(shown.job)
    assert split is not None
    seconds = {phase.name: phase.seconds for phase in split.phases}
    # (p - 1) / (m + p - 1) of the step.
    assert seconds["bubble"] / split.seconds == pytest.approx(1 / 5, rel=1e-4)
    assert "communication" not in seconds
    assert sum(seconds.values()) == pytest.approx(split.seconds)
    assert seconds["forward"] == pytest.approx(4 * FORWARD_S, rel=1e-4)
    names = [phase.name for phase in split.phases]
    assert names == [name for name in SPLIT_PHASES if name in names]


def test_what_was_not_recorded_as_waiting_comes_out_of_the_rest() -> None:
    snapshot = _pipeline()
    measured = bubble(state(snapshot))
    assert measured is not None
    idle_s = measured.mean.measured * measured.window_s
    load = steady(communication=idle_s / 2, other=idle_s / 4, backward=idle_s)
    ranks = tuple(
        worker(rank.rank, load, coordinates=rank.coordinates, chunks=rank.chunks)
        for rank in snapshot.ranks
    )
    split = phase_split(msgspec.structs.replace(snapshot, ranks=ranks))
    assert split is not None
    seconds = {phase.name: phase.seconds for phase in split.phases}
    assert seconds["bubble"] == pytest.approx(idle_s)
    assert "other" not in seconds
    # The chunks take a third for forward passes.
    passes_s = HEALTHY["forward"] + idle_s * 3 / 4
    assert seconds["forward"] == pytest.approx(passes_s / 3)
    assert seconds["backward"] == pytest.approx(passes_s * 2 / 3)


def test_without_a_pipeline_there_is_no_bubble() -> None:
    shown = state(team(steady(), steady()))
    split = phase_split(shown.job)
    assert split is not None
    assert "bubble" not in {phase.name for phase in split.phases}
    assert phase_split(job(ranks=())) is None


@pytest.mark.parametrize("look", [LOOK, Style(ASCII)], ids=["unicode", "ascii"])
def test_the_parts_of_a_step_have_signs_names_and_colours(look: Style) -> None:
    text = "\n".join(line.plain for line in draw_phases(fold(None, demo()), 60, 12, look))
    for name in ("data", "host to device", "forward", "backward", "exposed comm", "optimizer",
                 "pipeline idle", "other"):  # fmt: skip
        assert name in text
    assert len({look.glyphs.phases[name] for name in SPLIT_PHASES}) == len(SPLIT_PHASES)
    assert len({phase_role(name) for name in SPLIT_PHASES}) == len(SPLIT_PHASES)


@pytest.mark.parametrize(("microbatches", "is_found"), [(16, False), (4, True)])
def test_a_bubble_is_told_where_microbatches_are_few(microbatches: int, *, is_found: bool) -> None:
    ideal = 3 / (microbatches + 3)
    assert (ideal > BUBBLE_SHARE) == is_found
    found = _bubble_of(_pipeline(stages=4, microbatches=microbatches))
    assert (found is not None) == is_found
    if found is not None:
        assert found.headline == "pipeline bubble: ranks are idle for 43% of the pipeline's time"
        assert "more microbatches than 4" in found.advice
        assert "gpipe, 4 microbatches" in found.evidence


@pytest.mark.parametrize(("slow", "is_found"), [(1.1, False), (1.5, True)])
def test_a_slow_stage_is_named(slow: float, *, is_found: bool) -> None:
    findings = diagnose(state(_pipeline(stages=3, microbatches=24, slow=slow)))
    assert {each.kind for each in findings} == ({"bubble", "straggler"} if is_found else set())
    for late in (each for each in findings if each.kind == "straggler"):
        assert late.ranks == (2,)
        assert late.headline.startswith("straggler rank 2, stage 2: ")
        assert "move a block from stage 2" in late.advice
    for found in (each for each in findings if each.kind == "bubble"):
        assert found.ranks == (2,)
        assert "stage 2 on rank 2 works 50% longer than the others" in found.evidence
        assert "move a block from stage 2 to stage" in found.advice


def test_one_of_two_stages_is_compared_with_the_other() -> None:
    (found,) = (
        each
        for each in diagnose(state(_pipeline(stages=2, microbatches=24, slow=3.0)))
        if each.kind == "bubble"
    )
    assert "stage 1 on rank 1 works 200% longer than the others" in found.evidence


@pytest.mark.parametrize(("pause", "is_found"), [(0.3, False), (3.0, True)])
def test_time_between_the_chunks_is_told(pause: float, *, is_found: bool) -> None:
    # ``pause`` times what makes the excess a tenth: two chunks take 30 ms.
    pause_s = pause * PART_SHARE * (FORWARD_S + BACKWARD_S) / 2
    found = _bubble_of(_pipeline(stages=2, microbatches=16, pause_s=pause_s))
    assert (found is not None) == is_found
    if found is not None:
        assert "between the chunks" in found.advice


def test_idle_stages_are_no_communication_and_no_uneven_steps() -> None:
    found = diagnose(state(_pipeline(stages=4, microbatches=4)))
    assert [finding.kind for finding in found] == ["bubble"]
    blind = msgspec.structs.replace(
        _pipeline(stages=4, microbatches=4),
        ranks=tuple(
            msgspec.structs.replace(rank, chunks=())
            for rank in _pipeline(stages=4, microbatches=4).ranks
        ),
    )
    assert diagnose(state(blind)) == ()


@pytest.mark.parametrize("scenario", ["healthy", "straggler", "input_bound"])
@pytest.mark.parametrize(
    "mesh", [{"pipeline": 2, "data": 2, "tensor": 2}, {"pipeline": 1, "data": 8, "tensor": 1}]
)
def test_the_demo_is_diagnosed_as_what_it_is(scenario: Scenario, mesh: dict[str, int]) -> None:
    kinds = {"healthy": [], "straggler": ["straggler"], "input_bound": ["input"]}
    seen = demo(scenario=scenario, mesh=mesh, later_s=30.0)
    assert [finding.kind for finding in diagnose(fold(None, seen))] == kinds[scenario]


def _with_flops(flops: float | None, peak: float | None, *, count: int = 2) -> JobSnapshot:
    ranks = tuple(
        worker(number, flops_per_batch=flops, peak_flops_per_second=peak) for number in range(count)
    )
    return job(ranks=ranks)


def test_the_share_of_the_peak_is_over_all_ranks() -> None:
    step_s = sum(HEALTHY.values())
    found = job_flops(state(_with_flops(40e12, 400e12)))
    assert found is not None
    assert found.per_second == pytest.approx(2 * 40e12 / step_s)
    assert found.utilization == pytest.approx(40e12 / step_s / 400e12)
    snapshot = _with_flops(40e12, 400e12)
    alone = rank_flops(snapshot, snapshot.ranks[0])
    assert alone is not None
    assert alone.utilization == pytest.approx(found.utilization)
    assert alone.per_second == pytest.approx(found.per_second / 2)


@pytest.mark.parametrize("peak", [None, 0.0])
def test_without_a_known_peak_only_the_rate_is_told(peak: float | None) -> None:
    found = job_flops(state(_with_flops(40e12, peak)))
    assert found is not None
    assert found.utilization is None
    text = _throughput(state(_with_flops(40e12, peak)))
    assert "compute  400 TFLOP/s  no peak known, so no MFU" in text
    assert "MFU" not in _throughput(state(_with_flops(40e12, peak)), 30)


@pytest.mark.parametrize("flops", [None, 0.0])
def test_without_known_flops_nothing_is_told(flops: float | None) -> None:
    snapshot = _with_flops(flops, 400e12)
    assert job_flops(state(snapshot)) is None
    assert rank_flops(snapshot, snapshot.ranks[0]) is None
    assert "FLOP" not in _throughput(state(snapshot))
    ended = msgspec.structs.replace(_with_flops(1e12, 1e14), state="finished")
    assert job_flops(state(ended)) is None


def test_ranks_whose_flops_are_not_known_are_left_out() -> None:
    mixed = job(ranks=(*_with_flops(40e12, 400e12).ranks, worker(2)))
    found = job_flops(state(mixed))
    assert found is not None
    assert found == job_flops(state(_with_flops(40e12, 400e12)))


def _throughput(shown: State, width: int = 80, height: int = 6) -> str:
    return "\n".join(line.plain for line in draw_throughput(shown, width, height, LOOK))


def test_utilization_stands_beside_the_rates() -> None:
    shown = state(_with_flops(40e12, 400e12))
    text = _throughput(shown)
    assert "MFU" in text
    assert "50.0%" in text
    assert "400 TFLOP/s" in text
    assert _throughput(shown, 60, 1).endswith("MFU 50.0%")
    for width in range(1, 90):
        for height in range(5):
            lines = draw_throughput(shown, width, height, LOOK)
            assert len(lines) <= height
            assert all(line.width <= width for line in lines)
