"""Which rank holds which coordinate: the arithmetic of the device mesh, without torch.

Ranks are laid out row by row over the axes ``pipeline``, ``data``, ``tensor``, outermost to
innermost. Global ranks are node-major, so the innermost axis stays inside a node.
"""

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
