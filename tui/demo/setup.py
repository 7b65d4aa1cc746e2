"""What is trained, and on how many ranks: everything about the demo that the time does not change.

A GPT of 13 layers a stage, two fewer in the last one, whose output head costs as much as two
layers. Its stages take equal times so, as those of a well split model do.

Numbers that look random and are a function of their key: the same demo for each viewer.

Keeps what was made for the numbers in view, and forgets what they have left behind.
"""

import functools
import math
from collections.abc import Callable, Mapping
from itertools import chain
from typing import Generic, Literal, NamedTuple, TypeVar

import msgspec

from boltmesh import axes
from boltmesh.axes import AXES

Scenario = Literal["healthy", "straggler", "input_bound", "hang", "crashed"]
"""What goes wrong: nothing; rank 5 is too hot and computes slowly; the loader cannot keep up; rank
5 never enters a collective; the kernel kills rank 5. A smaller job has its last rank in trouble."""

DEFAULT_MESH = {"pipeline": 2, "data": 2, "tensor": 2}
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
    """Of the axes, in the order of ``AXES``."""

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
        return self.sizes[AXES.index("pipeline")]

    @property
    def data(self) -> int:
        """Ranks with batches of their own."""
        return self.sizes[AXES.index("data")]

    @property
    def tensor(self) -> int:
        """Ranks that share each layer."""
        return self.sizes[AXES.index("tensor")]

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
        """Of the whole model."""
        return LAYERS_PER_STAGE * self.pipeline - HEAD_IN_LAYERS

    @property
    def num_microbatches(self) -> int:
        """Four for each stage; without a pipeline a batch is not cut."""
        return 4 * self.pipeline if self.pipeline > 1 else 1

    @property
    def microbatch_size(self) -> int:
        """Samples."""
        return 4 if self.pipeline > 1 else 16

    @property
    def samples_per_step(self) -> int:
        """Of one rank of the data axis."""
        return self.microbatch_size * self.num_microbatches

    @property
    def tokens_per_step(self) -> int:
        """Of one rank of the data axis."""
        return self.samples_per_step * TOKENS_PER_SAMPLE

    def layers(self, stage: int) -> int:
        """How many layers a stage has."""
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
