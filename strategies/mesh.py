"""Sizes of a mesh: the coordinates of each rank, and layouts that fit a job.

Plain Python, so that a layout is refused, with one that fits, before anything is started.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from typing_extensions import override

from boltmesh import axes
from boltmesh.axes import AXES as AXES
from boltmesh.errors import LayoutError


@dataclass(frozen=True, init=False)
class MeshLayout:
    """The sizes of the axes, and the coordinates of each rank.

    Args:
        **sizes: Ranks along an axis, by its name in ``AXES``; 1 for omitted axes.

    Raises:
        LayoutError: For an unknown axis, or a size below 1.
    """

    _sizes: tuple[int, ...]

    def __init__(self, **sizes: int) -> None:
        for axis, size in sizes.items():
            if axis not in AXES:
                raise LayoutError(f"There is no axis {axis!r}. Use {', '.join(AXES)}.")
            if size < 1:
                raise LayoutError(
                    f"The {axis} axis has size {size}, but an axis holds at least one rank. "
                    f"Set {axis}=1 to switch it off."
                )
        object.__setattr__(self, "_sizes", tuple(axes.full_sizes(sizes).values()))

    @classmethod
    def fill_data(cls, *, world_size: int, **sizes: int) -> "MeshLayout":
        """Give the data axis all ranks that the other axes leave.

        Raises:
            LayoutError: When their product does not divide ``world_size``.
        """
        inner = math.prod(sizes.values())
        if world_size % inner:
            fewer = world_size - world_size % inner
            start = f"start {fewer} or {fewer + inner}" if fewer else f"start {inner}"
            given = axes.named_sizes(sizes)
            named = " x ".join(f"{axis}={size}" for axis, size in given.items() if axis != "data")
            raise LayoutError(
                f"{named} needs a multiple of {inner} ranks, but the job has {world_size}; {start}."
            )
        return cls(**sizes, data=world_size // inner)

    @property
    def sizes(self) -> dict[str, int]:
        """Size by axis name, outermost first; without optional axes of size 1."""
        return axes.named_sizes(dict(zip(AXES, self._sizes, strict=True)))

    def size(self, axis: str) -> int:
        """Return the number of ranks along an axis; 1 for axes that the layout does not have."""
        return self.sizes.get(axis, 1)

    @property
    def pipeline(self) -> int:
        """Ranks of a pipeline."""
        return self.sizes["pipeline"]

    @property
    def data(self) -> int:
        """Ranks with batches of their own."""
        return self.sizes["data"]

    @property
    def tensor(self) -> int:
        """Ranks that share each layer."""
        return self.sizes["tensor"]

    @property
    def world_size(self) -> int:
        """Number of ranks of the layout."""
        return math.prod(self._sizes)

    def coordinates(self, rank: int) -> dict[str, int]:
        """Return the coordinates of a rank by axis name."""
        if not 0 <= rank < self.world_size:
            raise LayoutError(f"Rank {rank} is not one of the {self.world_size} ranks of {self}.")
        return axes.coordinates(rank, self.sizes)

    def rank_at(self, **place: int) -> int:
        """Return the rank with these coordinates by axis; 0 if omitted."""
        return axes.rank_at(place, self.sizes)

    def groups(self, *along: str) -> list[list[int]]:
        """Return all groups of ranks that differ only along these axes; they are disjoint."""
        by_others: dict[tuple[int, ...], list[int]] = {}
        for rank in range(self.world_size):
            place = self.coordinates(rank)
            others = tuple(at for axis, at in place.items() if axis not in along)
            by_others.setdefault(others, []).append(rank)
        return list(by_others.values())

    @override
    def __str__(self) -> str:
        return _spell(self.sizes)

    @override
    def __repr__(self) -> str:
        return f"MeshLayout({', '.join(f'{axis}={size}' for axis, size in self.sizes.items())})"


def _spell(sizes: Mapping[str, int]) -> str:
    return " x ".join(f"{axis}={size}" for axis, size in sizes.items())


NUM_NAMED = 2
"""Number of layouts that an error suggests."""


def fit_layout(
    *, world_size: int, ranks_per_host: int, data: int | None = None, **sizes: int
) -> MeshLayout:
    """Return the requested layout.

    Args:
        world_size: Ranks of the job.
        ranks_per_host: Ranks of each host.
        data: Size of the data axis; None takes the ranks that the other axes leave.
        **sizes: Sizes of the other axes. The groups of the tensor axis must be on one host.

    Raises:
        LayoutError: If it does not fit, with the nearest that do.
    """
    given = sizes if data is None else {**sizes, "data": data}
    asked = {axis: given[axis] for axis in AXES if axis in given}
    for axis, size in asked.items():
        if size < 1:
            raise LayoutError(
                f"{axis}={size} holds no rank. Use 1, which switches the {axis} axis off, or more."
            )
    inner, tensor = math.prod(sizes.values()), sizes.get("tensor", 1)
    is_on_hosts = ranks_per_host % tensor == 0
    if is_on_hosts and (world_size % inner == 0 if data is None else data * inner == world_size):
        return MeshLayout(**sizes, data=world_size // inner)
    wanted = _spell({axis: size for axis, size in asked.items() if size != 1})
    near = nearest_layouts(world_size=world_size, ranks_per_host=ranks_per_host, data=data, **sizes)
    named = ("data", *sizes) if axes.OPTIONAL & set(sizes) else AXES
    instead = " or ".join(
        _spell({axis: size for axis, size in layout.sizes.items() if axis in named})
        for layout in near
    )
    if not is_on_hosts:
        raise LayoutError(
            f"{wanted} was asked of hosts with {ranks_per_host} ranks each, and the ranks of a "
            f"tensor group have to be on one host, {tensor} by {tensor}. Set {instead}, or start "
            f"a multiple of {tensor} ranks on each host."
        )
    if data is None:
        raise LayoutError(
            f"{wanted} needs a multiple of {inner} ranks, but the job has {world_size}. "
            f"Set {instead}, or start {math.ceil(world_size / inner) * inner} ranks."
        )
    raise LayoutError(
        f"{wanted} needs {data * inner} ranks, but the job has {world_size}. "
        f"Set {instead}, or start {data * inner} ranks."
    )


def nearest_layouts(
    *, world_size: int, ranks_per_host: int, data: int | None, **sizes: int
) -> list[MeshLayout]:
    """Return the layouts of this number of ranks nearest to the requested one, at most two.

    Distance is by factors between sizes. The pipeline keeps its requested size if possible, since
    that determines the microbatches.
    """
    # Strategies with an optional axis have no other axis to change.
    may_change = set(sizes) if axes.OPTIONAL & set(sizes) else set(AXES) - axes.OPTIONAL
    others = [axis for axis in AXES if axis != "data" and axis in may_change]
    asked = {axis: sizes.get(axis, 1) for axis in others}
    if data is not None:
        asked["data"] = data

    def distance(layout: MeshLayout) -> tuple[float, int, int]:
        factors = [layout.size(axis) / size for axis, size in asked.items()]
        return sum(abs(math.log2(each)) for each in factors), -layout.tensor, layout.pipeline

    fitting = sorted(_layouts(world_size, ranks_per_host, others), key=distance)
    alike = [each for each in fitting if each.pipeline == asked.get("pipeline", 1)]
    return (alike or fitting)[:NUM_NAMED]


def _layouts(world_size: int, ranks_per_host: int, others: Sequence[str]) -> Iterator[MeshLayout]:
    """Yield all layouts of a job."""

    def divide(left: int, names: Sequence[str]) -> Iterator[dict[str, int]]:
        if not names:
            yield {"data": left}
            return
        most = math.gcd(left, ranks_per_host) if names[-1] == "tensor" else left
        for size in axes.divisors(most):
            for rest in divide(left // size, names[:-1]):
                yield {**rest, names[-1]: size}

    for sizes in divide(world_size, others):
        yield MeshLayout(**sizes)
