"""The demo's model, its ranks, its random numbers, and the timeline of its steps.

A GPT of 13 layers a stage, two fewer in the last one, whose output head costs as much as two
layers. Its stages take equal times so, as those of a well split model do.

Numbers that look random are a function of their key: the same demo for each viewer.

In a ``Timeline`` steps follow each other at a pace that swings. The parts of a step are data,
transfer, the pipeline's window, the all-reduce of the gradients, the optimizer and the rest. The
window is that of a simulated 1F1B, so the bubble on the screen is the schedule's own.
"""

import functools
import math
from collections.abc import Callable, Mapping
from itertools import chain
from typing import Generic, Literal, NamedTuple, TypeVar

import msgspec

from boltmesh import axes
from boltmesh.axes import AXES
from boltmesh.schedule_sim import (
    Action,
    Order,
    Timetable,
    one_forward_one_backward,
    simulate,
)
from boltmesh.telemetry.snapshot import Chunk, PhaseTime

Scenario = Literal["healthy", "straggler", "input_bound", "hang", "crashed", "experts"]
"""The fault that is simulated: none; rank 5 is too hot and computes slowly; the loader cannot keep
up; rank 5 never enters a collective; the kernel kills rank 5. In a smaller job it is the last rank.
``experts`` has no fault: all ranks share the experts of each layer."""

DEFAULT_MESH = {"pipeline": 2, "data": 2, "tensor": 2}
EXPERTS_MESH = {"data": 4, "context": 2}
GPUS_PER_HOST = 8

WIDTH = 3072
HEAD_WIDTH = 128
VOCABULARY = 50_304
TOKENS_PER_SAMPLE = 1024
LAYERS_PER_STAGE = 13
HEAD_IN_LAYERS = 2


class Membership(NamedTuple):
    """One process group, as its members know it."""

    group: str
    ranks: tuple[int, ...]


class Setup(msgspec.Struct, frozen=True):
    """One simulated job."""

    seed: int
    scenario: Scenario
    sizes: tuple[int, ...]
    """Sizes of the axes, in the order of ``AXES``."""

    @classmethod
    def create(cls, seed: int, scenario: Scenario, mesh: Mapping[str, int]) -> "Setup":
        """Take the sizes of the axes from a mesh; an axis that it leaves out has one rank."""
        return cls(seed, scenario, tuple(axes.full_sizes(mesh).values()))

    @property
    def mesh(self) -> dict[str, int]:
        """Axis to size, outermost first."""
        return axes.named_sizes(dict(zip(AXES, self.sizes, strict=True)))

    @property
    def pipeline(self) -> int:
        """Stages, one for each rank of a pipeline."""
        return self.mesh.get("pipeline", 1)

    @property
    def data(self) -> int:
        """Ranks with batches of their own."""
        return self.mesh.get("data", 1)

    @property
    def tensor(self) -> int:
        """Ranks that share each layer."""
        return self.mesh.get("tensor", 1)

    @property
    def context(self) -> int:
        """Ranks that divide a sequence."""
        return self.mesh.get("context", 1)

    @property
    def world_size(self) -> int:
        """All ranks."""
        return math.prod(self.sizes)

    @property
    def victim(self) -> int:
        """The rank that is in trouble where one is."""
        return min(5, self.world_size - 1)

    @property
    def num_layers(self) -> int:
        """Layers of the whole model."""
        return LAYERS_PER_STAGE * self.pipeline - HEAD_IN_LAYERS

    @property
    def num_microbatches(self) -> int:
        """Four for each stage; without a pipeline a batch is not cut."""
        return 4 * self.pipeline if self.pipeline > 1 else 1

    @property
    def microbatch_size(self) -> int:
        """Samples: about the same work for a GPU in every mesh, as their steps take equal times."""
        return max(1, 16 * self.tensor * self.context // self.num_microbatches)

    @property
    def samples_per_step(self) -> int:
        """Samples of one data rank in an optimizer step."""
        return self.microbatch_size * self.num_microbatches

    @property
    def tokens_per_step(self) -> int:
        """Tokens of one data rank in an optimizer step."""
        return self.samples_per_step * TOKENS_PER_SAMPLE

    def layers(self, stage: int) -> int:
        """Return the number of layers of a stage."""
        return LAYERS_PER_STAGE - (HEAD_IN_LAYERS if stage == self.pipeline - 1 else 0)

    def place(self, rank: int) -> Mapping[str, int]:
        """Return the coordinate of a rank on each axis."""
        return _places(self.sizes)[rank]

    def rank_at(self, place: Mapping[str, int]) -> int:
        """Return the rank with these coordinates."""
        return axes.rank_at(place, self.mesh)

    def group(self, axis: str, rank: int) -> tuple[int, ...]:
        """Return the ranks that differ from ``rank`` on one axis only, itself included."""
        return axes.group_of(rank, axis, self.mesh)

    def memberships(self, rank: int) -> dict[str, Membership]:
        """Return the groups that a rank is in, by axis; ``world`` has all ranks."""
        mesh, place = self.mesh, self.place(rank)
        found = {"world": Membership("world", _world(self.world_size))}
        for axis in mesh:
            others = [
                f"{other} {at}" for other, at in place.items() if other != axis and mesh[other] > 1
            ]
            name = f"{axis} ({', '.join(others)})" if others else axis
            found[axis] = Membership(name, self.group(axis, rank))
        if self.scenario == "experts":
            found["expert"] = Membership("expert", _world(self.world_size))
        return found

    def host(self, rank: int) -> str:
        """Return the host of a rank."""
        return "demo" if self.world_size <= GPUS_PER_HOST else f"demo-{rank // GPUS_PER_HOST}"


@functools.lru_cache(maxsize=8)
def _world(size: int) -> tuple[int, ...]:
    """Return all ranks; all of them share it."""
    return tuple(range(size))


@functools.lru_cache(maxsize=8)
def _places(sizes: tuple[int, ...]) -> tuple[dict[str, int], ...]:
    """Return the coordinates of all ranks."""
    mesh = axes.named_sizes(dict(zip(AXES, sizes, strict=True)))
    return tuple(axes.coordinates(rank, mesh) for rank in range(math.prod(sizes)))


def mesh_of(world_size: int) -> dict[str, int]:
    """Return a mesh for that many ranks: tensor inside a host, a short pipeline, the rest data."""
    tensor = next(size for size in (8, 4, 2, 1) if world_size % (size * 4) == 0 or size == 1)
    rest = world_size // tensor
    pipeline = next(size for size in (4, 2, 1) if rest % (2 * size) == 0 or size == 1)
    return {"pipeline": pipeline, "data": rest // pipeline, "tensor": tensor}


_MASK = 2**64 - 1


def uniform(*key: int) -> float:
    """Return a number from 0 up to 1."""
    return _mix(key) / 2**64


def normal(*key: int) -> float:
    """Return a number of mean 0 and deviation 1: the sum of four uniform ones, so never far off."""
    bits = _mix(key)
    total = (bits & 0xFFFF) + (bits >> 16 & 0xFFFF) + (bits >> 32 & 0xFFFF) + (bits >> 48)
    return (total / 2**16 - 2) * 3**0.5


def four(*key: int) -> tuple[float, float, float, float]:
    """Return four numbers from -1 up to 1, for the price of one."""
    bits = _mix(key)
    return (
        (bits & 0xFFFF) / 2**15 - 1,
        (bits >> 16 & 0xFFFF) / 2**15 - 1,
        (bits >> 32 & 0xFFFF) / 2**15 - 1,
        (bits >> 48) / 2**15 - 1,
    )


def _mix(key: tuple[int, ...]) -> int:
    """Hash integers to 64 bits, by the finalizer of SplitMix64 after each of them.

    Source: Steele, Lea and Flood, Fast splittable pseudorandom number generators, 2014, figure 17.
    """
    state = 0
    for part in key:
        state = (state + part + 0x9E3779B97F4A7C15) & _MASK
        state = ((state ^ state >> 30) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ state >> 27) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return state


Item = TypeVar("Item")


class Blocks(Generic[Item]):
    """A sequence that is computed in blocks, where it is looked at.

    Args:
        build: Makes the item of a number; always the same one.
        size: Items of a block.
    """

    def __init__(self, build: Callable[[int], Item], *, size: int = 8) -> None:
        self._build = build
        self._size = size
        self._blocks: dict[int, tuple[Item, ...]] = {}

    def between(self, first: int, last: int) -> tuple[Item, ...]:
        """Return the items from ``first`` to ``last``, both included, and keep no others."""
        if last < first:
            return ()
        numbers = range(first // self._size, last // self._size + 1)
        self._blocks = {number: self._block(number) for number in numbers}
        start = first - numbers[0] * self._size
        items = tuple(chain.from_iterable(self._blocks.values()))
        return items[start : start + last - first + 1]

    def _block(self, number: int) -> tuple[Item, ...]:
        known = self._blocks.get(number)
        if known is not None:
            return known
        return tuple(map(self._build, range(number * self._size, (number + 1) * self._size)))


STEP_S = 0.412
"""Mean time of a step while all is well."""
HEAD_START = 4_200
"""Steps done when the demo begins, so that every chart has something to show."""
_DATA_S = 0.0022
_TRANSFER_S = 0.0016
_WINDOW_S = 0.366
_REDUCE_S = 0.0155
_OPTIMIZER_S = 0.0175

_SLOW_LOADER_S = 0.251
"""Wait of each rank for its batch where the loader cannot keep up."""
_HOT = 1.35
"""Factor on the compute time of the hot rank."""
_EARLY = 0.1
"""How much less attention has to do for the first positions of a sequence, of all work."""
_HOP = 0.06
"""Time from one stage to the next, in forwards."""
_HEAD = 1.05 * HEAD_IN_LAYERS
"""The output head, in layers: not quite as much as was planned for it."""


class Timeline:
    """The times of one simulated job, in seconds from its start; steps count from 1."""

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        self._means = functools.lru_cache(maxsize=1024)(self._mean_chunk_s)
        self._ends = functools.lru_cache(maxsize=2048)(self._find_end)
        self._order = one_forward_one_backward(setup.pipeline, setup.num_microbatches)
        self._forward_s = _WINDOW_S / self._window(1.0, is_hot=False)
        is_slow = setup.scenario == "straggler"
        self._slow_s = _SLOW_LOADER_S if setup.scenario == "input_bound" else 0.0
        self._data_s = _DATA_S + self._slow_s
        self.window_s = self._window(self._forward_s, is_hot=is_slow)
        self.period_s = STEP_S + self.window_s - _WINDOW_S + self._data_s - _DATA_S
        calm, slow = (self._idle_share(is_hot=is_hot) for is_hot in (False, is_slow))
        self.bubble_ratio = calm + (slow - calm) / setup.data
        self._hot = setup.place(setup.victim) if is_slow else None

    @property
    def order(self) -> Order:
        """The schedule of the pipeline."""
        return self._order

    def end(self, step: int) -> float:
        """Return when a step ends; the pace swings a little, as on a shared file system."""
        return self._ends(step)

    def _find_end(self, step: int) -> float:
        if step <= 0:
            return 0.0
        # None at HEAD_START, so that who comes then sees exactly that step end.
        past = step - HEAD_START
        swing = 0.2 * math.sin(past / 17) + 0.08 * math.sin(past / 6.1)
        return self.period_s * (step + swing - 0.015 * uniform(self._setup.seed, 1, step))

    def step_at(self, moment: float) -> int:
        """Return how many steps are over."""
        step = max(0, math.floor(moment / self.period_s + 1e-6))
        while step > 0 and self.end(step) > moment + 1e-6:
            step -= 1
        while self.end(step + 1) <= moment + 1e-6:
            step += 1
        return step

    def phases(self, step: int, rank: int) -> tuple[PhaseTime, ...]:
        """Return the exclusive parts of a step; the rest is communication."""
        seconds = self.end(step) - self.end(step - 1)
        scale = seconds / self.period_s
        place = self._setup.place(rank)
        stage, data = place["pipeline"], place["data"]
        noise = four(self._setup.seed, 2, step, rank)
        count = self._setup.num_microbatches
        slow = _HOT if self._is_hot(rank) else 1.0
        if self._setup.context > 1:
            slow -= _EARLY * (1 - place["context"] / (self._setup.context - 1))
        parts = {
            "data": scale * (self._data_s + (0.2 * _DATA_S + 0.03 * self._slow_s) * noise[0]),
            "transfer": _TRANSFER_S * scale * (1 + 0.2 * noise[1]),
            "forward": count * slow * self._means(step, data, stage, "F"),
            "backward": count * slow * self._means(step, data, stage, "B"),
            "optimizer": _OPTIMIZER_S * scale * (1 + 0.04 * noise[2]),
            "other": 0.022 * STEP_S * scale * (1 + 0.2 * noise[3]),
        }
        rest = max(0.0, seconds - sum(parts.values()))
        # A rank alone waits for no other.
        is_alone = self._setup.world_size == 1
        parts["communication"] = 0.0 if is_alone else rest
        parts["other"] += rest if is_alone else 0.0
        order = ("data", "transfer", "forward", "backward", "communication", "optimizer", "other")
        return tuple(PhaseTime(name, parts[name]) for name in order)

    def chunks(self, step: int, data: int, *, started: float) -> tuple[tuple[Chunk, ...], ...]:
        """Return for each stage its chunks in a step of a job that began at ``started``."""
        start = started + self.window_start(step)
        return tuple(
            tuple(
                Chunk(
                    step=step,
                    stage=slot.action.stage,
                    microbatch=slot.action.microbatch,
                    kind="F" if slot.action.kind == "F" else "B",
                    start=start + slot.start,
                    end=start + slot.end,
                )
                for slot in row
            )
            for row in self._timetable(step, data)
        )

    def window_start(self, step: int) -> float:
        """Return when the first microbatch of a step begins."""
        began = self.end(step - 1)
        scale = (self.end(step) - began) / self.period_s
        return began + (self._data_s + _TRANSFER_S) * scale

    def window_end(self, step: int) -> float:
        """Return when the gradients are complete on all ranks, and their all-reduce is left."""
        scale = (self.end(step) - self.end(step - 1)) / self.period_s
        return self.window_start(step) + self.window_s * scale

    def reduce_end(self, step: int) -> float:
        """Return when the last all-reduce of a step is over."""
        scale = (self.end(step) - self.end(step - 1)) / self.period_s
        return self.window_end(step) + _REDUCE_S * scale

    def optimizer_end(self, step: int) -> float:
        """Return when the weights are new."""
        scale = (self.end(step) - self.end(step - 1)) / self.period_s
        return self.reduce_end(step) + _OPTIMIZER_S * scale

    def share_of_window(self, moment: float) -> float:
        """Return how much of its pipeline's window the step that runs at ``moment`` has behind."""
        step = self.step_at(moment) + 1
        start = self.window_start(step)
        return min(1.0, max(0.0, (moment - start) / (self.window_end(step) - start)))

    def share_of_reduce(self, moment: float) -> float:
        """Return the same of the all-reduces that follow."""
        step = self.step_at(moment) + 1
        start = self.window_end(step)
        return min(1.0, max(0.0, (moment - start) / (self.reduce_end(step) - start)))

    def _is_hot(self, rank: int) -> bool:
        return self._hot is not None and rank == self._setup.victim

    def _timetable(self, step: int, data: int) -> Timetable:
        hot = None if self._hot is None else (self._hot["pipeline"], self._hot["data"])
        means = {
            (stage, kind): self._means(step, data, stage, kind)
            # The tensor peers of a slow rank wait for it inside of each chunk.
            * (_HOT if hot == (stage, data) else 1.0)
            for stage in range(self._setup.pipeline)
            for kind in "FB"
        }
        turn = 2 * math.pi / self._setup.num_microbatches
        shift = normal(self._setup.seed, 3, step, data)

        def seconds(action: Action) -> float:
            # A whole turn of the sine adds up to nothing, so the means hold.
            wobble = 0.025 * math.sin(turn * action.microbatch + shift + action.stage)
            return means[action.stage, action.kind] * (1 + wobble)

        return simulate(self._order, seconds, transfer_s=_HOP * self._forward_s)

    def _mean_chunk_s(self, step: int, data: int, stage: int, kind: str) -> float:
        """Return the mean time of a stage's chunks in one step, without the heat of a rank."""
        scale = (self.end(step) - self.end(step - 1)) / self.period_s
        key = 2 * stage + (kind == "B")
        noise = 1 + 0.004 * normal(self._setup.seed, 4, step, data, key)
        return self._forward_s * self._weight(stage, kind) * scale * noise

    def _weight(self, stage: int, kind: str) -> float:
        """Return a chunk's cost in forwards of the first stage; a backward is two forwards."""
        cost = float(self._setup.layers(stage))
        if stage == self._setup.pipeline - 1:
            cost += _HEAD
        return cost / LAYERS_PER_STAGE * (1 if kind == "F" else 2)

    def _idle_share(self, *, is_hot: bool) -> float:
        """Return the bubble ratio of a pipeline, with the hot rank or without it."""
        stages = range(self._setup.pipeline)
        work = [sum(self._weight(stage, kind) for kind in "FB") for stage in stages]
        if is_hot:
            work[self._setup.place(self._setup.victim)["pipeline"]] *= _HOT
        busy = self._setup.num_microbatches * self._forward_s * sum(work) / len(work)
        return 1 - busy / self._window(self._forward_s, is_hot=is_hot)

    def _window(self, forward_s: float, *, is_hot: bool) -> float:
        hot_stage = self._setup.place(self._setup.victim)["pipeline"]

        def seconds(action: Action) -> float:
            slow = _HOT if is_hot and action.stage == hot_stage else 1.0
            return forward_s * slow * self._weight(action.stage, action.kind)

        timetable = simulate(self._order, seconds, transfer_s=_HOP * forward_s)
        return max(row[-1].end for row in timetable)
