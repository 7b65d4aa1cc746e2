"""What is trained, and on how many ranks: everything about the demo that the time does not change.

A GPT of 13 layers a stage, two fewer in the last one, whose output head costs as much as two
layers. Its stages take equal times so, as those of a well split model do.
"""

import functools
import math
from collections.abc import Mapping
from typing import Literal, NamedTuple

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
