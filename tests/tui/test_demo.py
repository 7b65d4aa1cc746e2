"""The simulated job: the same for everybody, true to itself, and cheap."""

import math

import pytest

from boltmesh.schedule_sim import actions
from boltmesh.telemetry.snapshot import PHASES, JobSnapshot, RankSnapshot
from boltmesh.tui.demo import HEAD_START, STEP_S, DemoSource, Scenario, mesh_of, observe
from boltmesh.tui.demo.job import MAX_STEPS, SimulatedJob
from boltmesh.tui.demo.model import CHOICES
from boltmesh.tui.demo.setup import DEFAULT_MESH, EXPERTS_MESH, Blocks, Setup, normal, uniform
from boltmesh.tui.metrics.experts import layer_loads
from boltmesh.tui.metrics.figures import figures
from boltmesh.tui.metrics.traffic import traffic_rows
from boltmesh.tui.panels.context import context_rows
from boltmesh.tui.state import fold
from tests.support.cpu_time import least_cpu_s
from tests.tui.samples import NOW, demo

SCENARIOS: tuple[Scenario, ...] = ("healthy", "straggler", "input_bound", "hang", "crashed")
MESHES: tuple[dict[str, int], ...] = (
    DEFAULT_MESH,
    {"pipeline": 1, "data": 1, "tensor": 1},
    {"data": 3},
    {"tensor": 4},
    {"pipeline": 3},
    {"pipeline": 4, "data": 6, "tensor": 2},
)


def phases(rank: RankSnapshot, *, last: int = 50) -> dict[str, float]:
    found = dict.fromkeys(PHASES, 0.0)
    for step in rank.steps[-last:]:
        for phase in step.phases:
            found[phase.name] += phase.seconds / min(last, len(rank.steps))
    return found


def groups(job: JobSnapshot, axis: str) -> dict[str, dict[int, int]]:
    """By the group's name: each member's sequence number."""
    found: dict[str, dict[int, int]] = {}
    for rank in job.ranks:
        for group in rank.groups:
            if group.axis == axis:
                found.setdefault(group.group, {})[rank.rank] = group.sequence
    return found


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_it_is_a_function_of_the_seed_and_the_time(scenario: Scenario) -> None:
    started = NOW - HEAD_START * STEP_S
    setup = Setup.create(0, scenario, DEFAULT_MESH)
    kept, fresh = SimulatedJob(setup, started), SimulatedJob(setup, started)
    for later_s in (0.0, 1.0, 7.5, 3.0):
        kept.observe(NOW + later_s)
    assert kept.observe(NOW + 2.5) == fresh.observe(NOW + 2.5)
    other = observe(1, started=started, now=NOW + 2.5, scenario=scenario)
    assert other.job.history != fresh.observe(NOW + 2.5).job.history


def test_the_head_start_ends_with_a_step() -> None:
    assert demo().job.global_step == HEAD_START
    assert demo(later_s=-0.05).job.global_step == HEAD_START - 1
    assert DemoSource(clock=lambda: NOW).read().job.global_step == HEAD_START


@pytest.mark.each_choice
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_every_mesh_and_scenario_holds_together(mesh: dict[str, int], scenario: Scenario) -> None:
    job = demo(mesh=mesh, scenario=scenario, later_s=30).job
    assert job.world_size == math.prod(mesh.values()) == len(job.ranks)
    for rank in job.ranks:
        assert job.mesh.keys() == rank.coordinates.keys()
        for step in rank.steps:
            assert sum(phase.seconds for phase in step.phases) == pytest.approx(step.seconds)
            assert all(phase.seconds >= 0 for phase in step.phases)
        ends = [step.end_time for step in rank.steps]
        for step, end, before in zip(rank.steps[1:], ends[1:], ends, strict=False):
            assert end - before == pytest.approx(step.seconds, abs=1e-5)
        for group in rank.groups:
            assert rank.rank in group.ranks
            assert (group.axis in job.mesh and job.mesh[group.axis] == len(group.ranks)) or (
                group.axis == "world" and len(group.ranks) == job.world_size
            )


@pytest.mark.each_choice
@pytest.mark.parametrize("mesh", [*MESHES, {"pipeline": 8}])
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_its_figures_are_possible_and_those_of_its_history(
    mesh: dict[str, int], scenario: Scenario
) -> None:
    state = fold(None, demo(mesh=mesh, scenario=scenario, later_s=30))
    found = figures(state)
    assert found.mfu.latest is not None
    assert 0.15 < found.mfu.latest < 0.8
    for rank in state.job.ranks:
        for way in rank.offload:
            assert (way.seconds_per_step or 0.0) < (found.step_s.value or 0.0)
    recorded = {point.name: point.value for point in state.job.trends}
    for figure in ("step_s", "tokens_per_s", "bubble_ratio"):
        shown = getattr(found, figure).latest or 0.0
        assert recorded.get(figure, 0.0) == pytest.approx(shown, rel=0.1)


@pytest.mark.parametrize("mesh", MESHES)
def test_a_group_has_one_name_and_its_members_agree_on_it(mesh: dict[str, int]) -> None:
    members: dict[str, set[tuple[int, ...]]] = {}
    for rank in demo(mesh=mesh).job.ranks:
        for group in rank.groups:
            members.setdefault(group.group, set()).add(group.ranks)
    assert all(len(each) == 1 for each in members.values())
    # A rank is in one group of an axis only.
    for axis in mesh:
        of_axis = [ranks for name, (ranks,) in members.items() if name.split(" ")[0] == axis]
        assert len({rank for ranks in of_axis for rank in ranks}) == sum(map(len, of_axis))


@pytest.mark.parametrize("mesh", MESHES)
def test_what_is_measured_is_what_is_expected(mesh: dict[str, int]) -> None:
    rows = traffic_rows(demo(mesh=mesh).job)
    stated = [row for row in rows if row.expected_bytes is not None]
    assert {row.axis for row in stated} == {axis for axis, size in mesh.items() if size > 1}
    assert all(row.verdict == "equal" for row in stated)


def test_the_bytes_are_those_of_the_formulas() -> None:
    """Worked out here once more, for pipeline 2 x data 2 x tensor 2 and bfloat16 activations."""
    job = demo().job
    width, vocabulary, tokens, microbatches = 3072, 50_304, 4 * 1024, 8
    activation = 2 * tokens * width
    first, last = job.ranks[0], job.ranks[4]

    def moved(rank: RankSnapshot, axis: str, operator: str) -> float | None:
        (total,) = [
            each for each in rank.collectives if (each.axis, each.operator) == (axis, operator)
        ]
        return total.bytes_per_step

    for rank in (first, last):
        assert moved(rank, "pipeline", "send") == microbatches * activation
        assert moved(rank, "pipeline", "recv") == microbatches * activation
    layer = (12 * width**2 + 7 * width) // 2 + 6 * width
    embedding, positions = vocabulary * width // 2, 1024 * width
    assert moved(first, "data", "allreduce") == 4 * (13 * layer + embedding + positions)
    assert moved(last, "data", "allreduce") == 4 * (11 * layer + embedding + 2 * width)
    norm = 4
    assert moved(first, "tensor", "allreduce") == microbatches * (4 * 13 + 1) * activation + norm
    loss = activation + 3 * 4 * tokens
    assert moved(last, "tensor", "allreduce") == (
        microbatches * (4 * 11 * activation + loss) + norm
    )


@pytest.mark.parametrize("mesh", MESHES)
def test_the_plan_of_the_layers_keeps_what_the_ranks_have(mesh: dict[str, int]) -> None:
    job = demo(mesh=mesh).job
    plan = job.tensor_plan
    if mesh.get("tensor", 1) == 1:
        assert plan is None
        return
    assert plan is not None
    assert plan.size == mesh["tensor"]
    first_of_stages = [
        rank for rank in job.ranks if rank.coordinates["data"] == rank.coordinates["tensor"] == 0
    ]
    kept = sum(
        kind.measured_bytes or 0
        for rank in first_of_stages
        for kind in rank.memory_kinds
        if kind.kind == "parameters"
    )
    assert plan.rank_bytes == kept
    assert plan.rank_bytes < plan.whole_bytes <= plan.size * plan.rank_bytes


@pytest.mark.parametrize("mesh", MESHES)
def test_totals_and_peers_agree(mesh: dict[str, int]) -> None:
    job = demo(mesh=mesh).job
    for rank in job.ranks:
        for operator in ("send", "recv"):
            totals = sum(
                each.payload_bytes for each in rank.collectives if each.operator == operator
            )
            by_peer = sum(each.payload_bytes for each in rank.peers if each.operator == operator)
            assert totals == by_peer
        for peer in rank.peers:
            other = job.ranks[peer.peer]
            mirror = {"send": "recv", "recv": "send"}[peer.operator]
            assert any(
                (each.peer, each.operator, each.payload_bytes)
                == (rank.rank, mirror, peer.payload_bytes)
                for each in other.peers
            )


def test_memory_by_kind_adds_up_to_what_the_driver_sees() -> None:
    seen = demo()
    used = {device.ranks[0]: device.memory_used_bytes for device in seen.devices[:8]}
    for rank in seen.job.ranks:
        on_device = [kind for kind in rank.memory_kinds if kind.place == "device"]
        assert sum(kind.measured_bytes or 0 for kind in on_device) == used[rank.rank]
        memory = rank.memory
        assert memory.device_peak_bytes is not None
        assert (memory.device_allocated_bytes or 0) < memory.device_peak_bytes
        assert memory.device_peak_bytes < (memory.device_reserved_bytes or 0)


def test_the_chunks_are_the_schedule_in_order_and_fill_the_phases() -> None:
    job = demo().job
    assert job.pipeline is not None
    planned = actions(job.pipeline.order)
    for rank in job.ranks:
        newest = [chunk for chunk in rank.chunks if chunk.step == job.global_step]
        order = planned[rank.coordinates["pipeline"]]
        assert [(each.stage, each.kind, each.microbatch) for each in newest] == list(order)
        assert all(
            before.end <= after.start + 1e-6
            for before, after in zip(rank.chunks, rank.chunks[1:], strict=False)
        )
        found = phases(rank, last=1)
        for kind, name in (("F", "forward"), ("B", "backward")):
            seconds = sum(each.end - each.start for each in newest if each.kind == kind)
            assert seconds == pytest.approx(found[name], rel=1e-4)
        step = rank.steps[-1]
        assert step.end_time - step.seconds < newest[0].start < newest[-1].end < step.end_time


def test_its_mfu_is_that_of_a_good_run() -> None:
    for rank in demo().job.ranks:
        assert rank.flops_per_batch is not None
        assert rank.peak_flops_per_second is not None
        mfu = rank.flops_per_batch / rank.steps[-1].seconds / rank.peak_flops_per_second
        assert 0.3 < mfu < 0.5


def test_the_straggler_computes_longer_and_all_others_wait() -> None:
    healthy, slow = demo().job, demo(scenario="straggler").job
    usual, late = phases(healthy.ranks[0]), [phases(rank) for rank in slow.ranks]
    assert late[5]["forward"] > 1.25 * usual["forward"]
    assert late[5]["communication"] < min(
        found["communication"] for rank, found in enumerate(late) if rank != 5
    )
    assert slow.ranks[0].steps[-1].seconds > 1.15 * healthy.ranks[0].steps[-1].seconds


def test_the_slow_loader_is_the_largest_wait() -> None:
    for rank in demo(scenario="input_bound").job.ranks:
        found = phases(rank)
        assert 0.25 < found["data"] / sum(found.values()) < 0.5


@pytest.mark.parametrize("later_s", [20, 3600])
def test_a_hang_stops_everything_and_one_rank_never_entered(later_s: float) -> None:
    job = demo(scenario="hang", later_s=later_s).job
    assert job.state == "running"
    assert {rank.global_step for rank in job.ranks} == {HEAD_START}
    assert NOW < max(rank.last_seen for rank in job.ranks) < NOW + 1
    (late,) = [group for group in groups(job, "data").values() if len(set(group.values())) > 1]
    assert min(late, key=late.__getitem__) == 5
    # It spreads: the tensor peers of the group of rank 5 wait for it, then all other stages do.
    assert groups(job, "tensor")["tensor (pipeline 0, data 0)"].keys() == {0, 1}
    waiting = groups(job, "tensor")["tensor (pipeline 1, data 0)"]
    assert waiting[4] == waiting[5] + 1
    for group in groups(job, "pipeline").values():
        assert group[min(group)] == group[max(group)] + 1
    assert [rank.phase for rank in job.ranks].count("communication") == 7
    assert job.ranks[5].phase == "backward"


def test_a_crash_says_who_went_first_and_leaves_the_last_step() -> None:
    seen = demo(scenario="crashed", later_s=30)
    job = seen.job
    assert job.state == "crashed"
    assert "rank 5 was killed by SIGKILL" in (job.cause or "")
    assert [rank.state for rank in job.ranks] == ["failed"] * 5 + ["dead"] + ["failed"] * 2
    assert job.updated < NOW + 1
    found = figures(fold(None, seen)).tokens_per_s
    assert found.value is None
    assert (found.last or 0.0) > 100_000
    assert seen.devices == ()
    assert demo(scenario="crashed", later_s=-5).job.state == "running"


def test_it_ends_at_its_last_step() -> None:
    seen = demo(later_s=MAX_STEPS * STEP_S)
    assert seen.job.state == "finished"
    assert seen.job.global_step == MAX_STEPS
    assert {rank.state for rank in seen.job.ranks} == {"finished"}
    assert {rank.phase for rank in seen.job.ranks} == {None}


def test_its_first_moments_have_no_step() -> None:
    job = observe(0, started=NOW, now=NOW + 0.1).job
    assert job.global_step == 0
    assert all(not rank.steps and rank.samples_per_second is None for rank in job.ranks)
    assert job.history == ()
    assert all(total.calls_per_step is None for rank in job.ranks for total in rank.collectives)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 6, 8, 12, 64, 100, 1024])
def test_a_mesh_of_any_size_holds_as_many_ranks(world_size: int) -> None:
    assert math.prod(mesh_of(world_size).values()) == world_size


def test_a_mesh_of_a_thousand_ranks_uses_all_axes() -> None:
    assert mesh_of(8) == DEFAULT_MESH
    assert min(mesh_of(1024).values()) > 1


@pytest.mark.sample("8-0.04")
@pytest.mark.parametrize(("world_size", "limit_s"), [(8, 0.040), (1024, 0.800)])
def test_a_read_is_cheap(world_size: int, limit_s: float) -> None:
    """By CPU time, with room for a slow host: 2 ms and 40 ms where it was measured."""
    moments = iter(range(100))
    source = DemoSource(clock=lambda: NOW + next(moments), mesh=mesh_of(world_size))
    source.read()
    assert least_cpu_s(lambda: [source.read() for _ in range(10)]) / 10 < limit_s


def test_blocks_keep_what_is_in_view_and_nothing_else() -> None:
    built: list[int] = []

    def build(number: int) -> int:
        built.append(number)
        return number * number

    blocks: Blocks[int] = Blocks(build, size=4)
    assert blocks.between(3, 9) == tuple(number * number for number in range(3, 10))
    assert blocks.between(3, 9) == blocks.between(3, 9)
    assert len(built) == 12
    blocks.between(100, 101)
    assert len(vars(blocks)["_blocks"]) == 1
    assert blocks.between(5, 4) == ()


def test_noise_is_even_and_the_same_everywhere() -> None:
    even = [uniform(7, at) for at in range(4000)]
    assert 0 <= min(even) < 0.01 < 0.99 < max(even) < 1
    assert sum(even) / len(even) == pytest.approx(0.5, abs=0.02)
    bell = [normal(7, at) for at in range(4000)]
    assert sum(bell) / len(bell) == pytest.approx(0, abs=0.06)
    assert sum(value**2 for value in bell) / len(bell) == pytest.approx(1, abs=0.08)
    # A golden value: pictures made from the demo must not change by themselves.
    assert uniform(1, 2, 3) == 0.41755805950440283


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_every_scenario_can_be_watched_from_a_source(scenario: Scenario) -> None:
    moments = iter((NOW, NOW + 60))
    source = DemoSource(clock=lambda: next(moments), scenario=scenario)
    assert source.read().job.state == ("crashed" if scenario == "crashed" else "running")
    source.close()


def test_experts_and_a_context_axis_have_figures_on_their_screens() -> None:
    seen = demo(mesh=EXPERTS_MESH, scenario="experts")
    job = seen.job
    tokens = job.ranks[0].steps[-1].tokens or 0
    for load in layer_loads(job):
        expected = CHOICES * tokens * EXPERTS_MESH["data"] * job.global_step
        assert sum(load.rows) == pytest.approx(expected, rel=1e-4)
        assert 1 < (load.imbalance or 0) < 3
    assert any(load.dropped for load in layer_loads(job))
    first, last = context_rows(job)[:2]
    assert (first.part, last.part) == (0, 1)
    assert (first.compute_s or 0) < (last.compute_s or 0)
    assert {row.axis for row in traffic_rows(job)} == {"data", "context", "expert", "world"}
    assert all(row.verdict == "equal" for row in traffic_rows(job) if row.axis != "world")
    for rank in job.ranks:
        for step in rank.steps:
            assert sum(phase.seconds for phase in step.phases) == pytest.approx(step.seconds)
    healthy = figures(fold(None, demo())).mfu.value
    assert figures(fold(None, seen)).mfu.value == pytest.approx(healthy, abs=0.05)
