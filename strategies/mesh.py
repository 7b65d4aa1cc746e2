"""Which rank holds which coordinate: the arithmetic of the device mesh, without torch.

Ranks are laid out row by row over the axes ``pipeline``, ``data``, ``tensor``, outermost to
innermost. Global ranks are node-major, so the innermost axis stays inside a node.

Which layouts fit a job: the sizes of the axes that were asked for, or the nearest that exist.

Plain Python, so that a layout is refused, with one to write instead, before anything is started.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from typing_extensions import override

from boltmesh.errors import LayoutError

AXES = ("pipeline", "data", "tensor")
"""Outermost to innermost."""


@dataclass(frozen=True)
class MeshLayout:
    """The sizes of the axes, and where each rank stands on them."""

    pipeline: int = 1
    data: int = 1
    tensor: int = 1

    def __post_init__(self) -> None:
        for axis, size in self.sizes.items():
            if size < 1:
                raise LayoutError(
                    f"The {axis} axis has size {size}, but an axis holds at least one rank. "
                    f"Set {axis}=1 to switch it off."
                )

    @classmethod
    def fill_data(cls, *, world_size: int, pipeline: int = 1, tensor: int = 1) -> "MeshLayout":
        """Give the data axis all ranks that the other axes leave.

        Raises:
            LayoutError: When ``pipeline * tensor`` does not divide ``world_size``.
        """
        inner = pipeline * tensor
        if world_size % inner:
            fewer = world_size - world_size % inner
            start = f"start {fewer} or {fewer + inner}" if fewer else f"start {inner}"
            raise LayoutError(
                f"pipeline={pipeline} x tensor={tensor} needs a multiple of {inner} ranks, "
                f"but the job has {world_size}; {start}."
            )
        return cls(pipeline=pipeline, data=world_size // inner, tensor=tensor)

    @property
    def sizes(self) -> dict[str, int]:
        """Axis name to size, outermost first."""
        return {"pipeline": self.pipeline, "data": self.data, "tensor": self.tensor}

    @property
    def world_size(self) -> int:
        """The number of ranks that the layout needs."""
        return self.pipeline * self.data * self.tensor

    def coordinates(self, rank: int) -> dict[str, int]:
        """Axis name to this rank's place on it."""
        if not 0 <= rank < self.world_size:
            raise LayoutError(f"Rank {rank} is not one of the {self.world_size} ranks of {self}.")
        outer, tensor = divmod(rank, self.tensor)
        pipeline, data = divmod(outer, self.data)
        return {"pipeline": pipeline, "data": data, "tensor": tensor}

    def rank_at(self, *, pipeline: int = 0, data: int = 0, tensor: int = 0) -> int:
        """The rank that stands at these coordinates."""
        return (pipeline * self.data + data) * self.tensor + tensor

    def groups(self, axis: str) -> list[list[int]]:
        """Every group of ranks that differ along ``axis`` alone; each rank is in exactly one."""
        groups: dict[tuple[int, ...], list[int]] = {}
        for rank in range(self.world_size):
            place = self.coordinates(rank)
            key = tuple(at for name, at in place.items() if name != axis)
            groups.setdefault(key, []).append(rank)
        return list(groups.values())

    @override
    def __str__(self) -> str:
        return " x ".join(f"{axis}={size}" for axis, size in self.sizes.items())


NUM_NAMED = 2
"""How many layouts an error names."""


def fit_layout(
    *,
    world_size: int,
    ranks_per_host: int,
    data: int | None = None,
    pipeline: int = 1,
    tensor: int = 1,
) -> MeshLayout:
    """Return the layout that was asked for.

    Args:
        world_size: Ranks of the job.
        ranks_per_host: How many of them each host has.
        data: Size of the data axis; None takes the ranks that the other axes leave.
        pipeline: Size of the pipeline axis.
        tensor: Size of the tensor axis, whose groups have to be on one host.

    Raises:
        LayoutError: When there is none, with the nearest that there are.
    """
    asked = {"pipeline": pipeline, "data": data, "tensor": tensor}
    for axis, size in asked.items():
        if size is not None and size < 1:
            raise LayoutError(
                f"{axis}={size} holds no rank. Use 1, which switches the {axis} axis off, or more."
            )
    inner = pipeline * tensor
    wanted = " x ".join(f"{axis}={size}" for axis, size in asked.items() if size not in {None, 1})
    near = nearest_layouts(
        world_size=world_size,
        ranks_per_host=ranks_per_host,
        data=data,
        pipeline=pipeline,
        tensor=tensor,
    )
    instead = " or ".join(str(each) for each in near)
    if ranks_per_host % tensor:
        raise LayoutError(
            f"{wanted} was asked of hosts with {ranks_per_host} ranks each, and the ranks of a "
            f"tensor group have to be on one host, {tensor} by {tensor}. Set {instead}, or start "
            f"a multiple of {tensor} ranks on each host."
        )
    if data is None and world_size % inner:
        raise LayoutError(
            f"{wanted} needs a multiple of {inner} ranks, but the job has {world_size}. "
            f"Set {instead}, or start {math.ceil(world_size / inner) * inner} ranks."
        )
    if data is not None and data * inner != world_size:
        raise LayoutError(
            f"{wanted} needs {data * inner} ranks, but the job has {world_size}. "
            f"Set {instead}, or start {data * inner} ranks."
        )
    return MeshLayout(pipeline=pipeline, data=world_size // inner, tensor=tensor)


def nearest_layouts(
    *, world_size: int, ranks_per_host: int, data: int | None, pipeline: int, tensor: int
) -> list[MeshLayout]:
    """Return the layouts of so many ranks that are nearest to what was asked for, at most two.

    Near is a small factor between sizes. Where the pipeline can stay as it was asked for it does:
    its length changes what a microbatch is.
    """

    def distance(layout: MeshLayout) -> tuple[float, int, int]:
        factors = [layout.pipeline / pipeline, layout.tensor / tensor]
        if data is not None:
            factors.append(layout.data / data)
        return sum(abs(math.log2(each)) for each in factors), -layout.tensor, layout.pipeline

    fitting = sorted(_layouts(world_size, ranks_per_host), key=distance)
    alike = [each for each in fitting if each.pipeline == pipeline]
    return (alike or fitting)[:NUM_NAMED]


def _layouts(world_size: int, ranks_per_host: int) -> Iterator[MeshLayout]:
    for tensor in _divisors(math.gcd(world_size, ranks_per_host)):
        for pipeline in _divisors(world_size // tensor):
            rest = world_size // tensor // pipeline
            yield MeshLayout(pipeline=pipeline, data=rest, tensor=tensor)


def _divisors(number: int) -> list[int]:
    return [each for each in range(1, number + 1) if number % each == 0]
