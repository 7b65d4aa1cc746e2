"""What a step keeps, measures and moves."""

import gc
import itertools
import weakref
from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from boltmesh.schedule_sim import RECEIVES, SENDS, Action
from boltmesh.strategies.pipeline.expected_traffic import expected_traffic
from boltmesh.strategies.pipeline.runtime.runtime import PipelineRuntime
from boltmesh.strategies.pipeline.runtime.stage import ValueSpec
from boltmesh.strategies.pipeline.runtime.timing import DeviceChunkTimer
from boltmesh.strategies.pipeline.schedules.actions import RankProgram
from boltmesh.strategies.torch_compat.communication import host_backend
from tests.support.programs import NAMES, programs
from tests.support.ranks import run_ranks
from tests.support.stages import Piece, PieceStage, boundary

SIZES = (3, 1, 4, 2, 2, 3, 1, 2)


class Counting(PieceStage):
    """Counts what autograd has saved and not let go of, by microbatch."""

    def __init__(self, piece: Piece, sizes: tuple[int, ...]) -> None:
        super().__init__(piece, sizes)
        self.saved: dict[int, list[weakref.ref[Tensor]]] = {}
        self.peak = 0

    def forward(self, microbatch: int, received: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        def pack(tensor: Tensor) -> Tensor:
            copy = tensor.detach().clone()
            self.saved.setdefault(microbatch, []).append(weakref.ref(copy))
            return copy

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda packed: packed):
            outputs = super().forward(microbatch, received)
        self.peak = max(self.peak, self.num_alive())
        return outputs

    def num_alive(self) -> int:
        return sum(any(each() is not None for each in refs) for refs in self.saved.values())


def count_live(rank: int, world_size: int) -> dict[str, tuple[dict[int, int], dict[int, int]]]:
    executor = PipelineRuntime(dist.new_group(list(range(world_size))), torch.device("cpu"))
    found = {}
    gc.collect()
    gc.disable()  # what a cycle holds is held
    for name in NAMES:
        program = programs(name, world_size, len(SIZES))[rank]
        num_stages = len(program.rank_of_stage)
        stages = [Counting(Piece(index, num_stages), SIZES) for index in program.stages]
        outcome = executor.run(program, stages)
        assert not any(each.num_alive() for each in stages)
        found[name] = (outcome.peak_live, {each.index: each.peak for each in stages})
    executor.close()
    return found


def peaks(program: RankProgram) -> dict[int, int]:
    """How many microbatches have come into a stage and not left it, by the list of actions."""
    found = {}
    for stage in program.stages:
        kinds = [each.kind for each in program.actions if each.stage == stage]
        changes = [(kind == "F") - (kind in "BW") for kind in kinds]
        found[stage] = max(itertools.accumulate(changes))
    return found


@pytest.mark.ranks
def test_microbatches_are_kept_as_long_as_the_schedule_needs_them() -> None:
    world_size = 4
    for rank, found in enumerate(run_ranks(count_live, world_size)):
        for name, (told, counted) in found.items():
            assert told == counted == peaks(programs(name, world_size, len(SIZES))[rank]), name
        assert found["gpipe"][0] == {rank: len(SIZES)}
        assert found["1f1b"][0] == {rank: world_size - rank}


def take_spans(rank: int, world_size: int, name: str) -> list[tuple[int, int, str, int, int]]:
    spans: list[tuple[int, int, str, int, int]] = []
    executor = PipelineRuntime(
        dist.new_group(list(range(world_size))),
        torch.device("cpu"),
        on_chunk=lambda *chunk: spans.append(chunk),
    )
    program = programs(name, world_size, len(SIZES))[rank]
    pieces = [Piece(index, len(program.rank_of_stage)) for index in program.stages]
    executor.run(program, [PieceStage(piece, SIZES) for piece in pieces])
    computed = [each for each in program.actions if each.kind not in SENDS | RECEIVES]
    assert [(stage, kind, microbatch) for stage, microbatch, kind, *_ in spans] == computed
    executor.close()
    return spans


@pytest.mark.sample("1f1b")
@pytest.mark.ranks
@pytest.mark.parametrize("name", ["1f1b", "zbv"])
def test_spans_are_in_order_on_each_rank_and_across_boundaries(name: str) -> None:
    rows = run_ranks(take_spans, 2, name)
    times: dict[tuple[int, str, int], tuple[int, int]] = {}
    for row in rows:
        for before, after in itertools.pairwise(row):
            assert before[3] <= before[4] <= after[3] <= after[4]
        times |= {
            (stage, kind, microbatch): (start, end) for stage, microbatch, kind, start, end in row
        }
    num_stages = 1 + max(stage for stage, *_ in times)
    for (stage, kind, microbatch), (start, _) in times.items():
        if kind == "F" and stage:
            assert times[stage - 1, "F", microbatch][1] <= start
        if kind in "BI" and stage < num_stages - 1:
            behind = times.get((stage + 1, "B", microbatch)) or times[stage + 1, "I", microbatch]
            assert behind[1] <= start


def count_traffic(rank: int, world_size: int, name: str) -> tuple[Counter, list[Any]]:
    moved: Counter = Counter()
    axis = dist.new_group(list(range(world_size)))

    def counted(way: str, post: Any) -> Any:
        def count(carrier: Any, tensors: list[torch.Tensor], *options: Any) -> Any:
            if carrier is of_axis:  # not what ranks agree on
                moved[way, "bytes"] += tensors[0].nbytes
                moved[way, "calls"] += 1
            return post(carrier, tensors, *options)

        return count

    of_axis = host_backend(axis)
    kind: Any = type(of_axis).__base__
    kind.send, kind.recv = counted("send", kind.send), counted("recv", kind.recv)
    executor = PipelineRuntime(axis, torch.device("cpu"))
    program = programs(name, world_size, len(SIZES))[rank]
    pieces = [Piece(index, len(program.rank_of_stage)) for index in program.stages]
    for _ in range(2):
        executor.run(program, [PieceStage(piece, SIZES) for piece in pieces])
    executor.close()
    stages = range(len(program.rank_of_stage))
    crossing = [[boundary(size, index) for index in stages] for size in SIZES]
    return moved, expected_traffic(program, crossing, accumulated=2)


@pytest.mark.sample("1f1b")
@pytest.mark.ranks
@pytest.mark.parametrize("name", ["1f1b", "zbv"])
def test_what_is_moved_is_what_was_expected(name: str) -> None:
    for moved, expected in run_ranks(count_traffic, 2, name):
        assert {each.operator for each in expected} == {"send", "recv"}
        for each in expected:
            assert each.axis == "pipeline"
            assert moved[each.operator, "bytes"] == each.payload_bytes > 0
            assert moved[each.operator, "calls"] == each.calls


class Clock:
    """The host's, which stands still until it is moved."""

    def __init__(self) -> None:
        self.now_ns = 7_000_000_000

    def monotonic_ns(self) -> int:
        return self.now_ns


class FakeDevice:
    """A device that runs its queue behind the host, with a clock of its own."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.born_ns = clock.now_ns
        self.lag_ns = 0
        self.is_passed = False

    def make_event(self) -> "FakeEvent":
        return FakeEvent(self)


class FakeEvent:
    made = 0

    def __init__(self, device: FakeDevice) -> None:
        FakeEvent.made += 1
        self.device = device
        self.at_ns = 0

    def record(self) -> None:
        device = self.device
        self.at_ns = device.clock.now_ns - device.born_ns + device.lag_ns

    def query(self) -> bool:
        return self.device.is_passed

    def elapsed_time(self, other: "FakeEvent") -> float:
        return (other.at_ns - self.at_ns) / 1e6


def test_spans_of_a_device_come_two_steps_late_and_on_the_clock_of_the_host(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Clock()
    monkeypatch.setattr("boltmesh.strategies.pipeline.runtime.timing.time", clock)
    device = FakeDevice(clock)
    told: list[tuple[int, int, str, int, int]] = []
    steps: list[tuple[int, int, int, int]] = []
    spans = DeviceChunkTimer(
        lambda *chunk: told.append(chunk), lambda *step: steps.append(step), device.make_event
    )
    truth = []
    FakeEvent.made = 0
    for step in range(8):
        device.is_passed = step != 3
        # Only the second step finds the device idle: there the clocks can be compared.
        device.lag_ns = 0 if step == 1 else 50_000_000
        for action in (Action(0, kind, step) for kind in "FB"):
            start_ns = clock.now_ns
            mark = spans.begin()
            clock.now_ns += 2_000_000
            spans.end(action, mark)
            truth.append((start_ns + device.lag_ns, clock.now_ns + device.lag_ns))
            clock.now_ns += 300_000
        spans.end_step(step)
        assert len(told) == 2 * max(0, step - 1 - (step == 3))
    assert FakeEvent.made <= 22  # they are used again
    assert steps == [
        (number, first[3], last[4], sum(each[4] - each[3] for each in (first, last)))
        for number, (first, last) in enumerate(zip(told[::2], told[1::2], strict=True))
    ]
    for number, (stage, microbatch, kind, start, end) in enumerate(told):
        assert (stage, microbatch, kind) == (0, number // 2, "FB"[number % 2])
        if number >= 2:  # until it was idle once, a device seems to be less far behind
            # A device tells milliseconds in floating point.
            assert start == pytest.approx(truth[number][0], abs=10)
            assert end == pytest.approx(truth[number][1], abs=10)


def test_programs_are_read_as_torch_writes_them() -> None:
    texts = ["0F0", "(0F1;0B0)OVERLAP_F_B", "0RECV_B12", "0SEND_B3", "0I2", "0W2"]
    program = RankProgram.parse(texts, rank=0, rank_of_stage=(0, 1))
    assert " ".join(map(str, program.actions)) == "0F0 0F1 0B0 0RECV_B12 0SEND_B3 0I2 0W2"
    with pytest.raises(ValueError, match="cannot run the action"):
        RankProgram.parse(["0UNSHARD"], rank=0, rank_of_stage=(0, 1))
    with pytest.raises(ValueError, match=r"1F0 on rank 0 .* its stages are 0"):
        RankProgram.parse(["0F0", "1F0"], rank=0, rank_of_stage=(0, 1))


@pytest.mark.parametrize("accumulated", [1, 3])
def test_expected_traffic_counts_gradients_of_trained_values_only(accumulated: int) -> None:
    specs = (
        ValueSpec((2, 3), torch.float32, True, "a"),
        ValueSpec((4,), torch.bool, False, "b"),
        ValueSpec((0,), torch.float32, True, "c"),
    )
    program = RankProgram.parse(
        ["0F0", "0SEND_F0", "0RECV_B0", "0B0"], rank=0, rank_of_stage=(0, 1)
    )
    sent, received = expected_traffic(program, [[(), specs]], accumulated=accumulated)
    assert (sent.payload_bytes, sent.calls) == (28 * accumulated, 2 * accumulated)
    assert (received.payload_bytes, received.calls) == (24 * accumulated, accumulated)
