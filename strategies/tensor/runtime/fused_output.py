"""Output of a fused or head-row column module, which looks whole to the code that uses it.

No DTensor can represent it: a rank's part of a fused q, k and v is not one contiguous range of the
whole. This class reports the sizes of the whole, and runs the usual operations on a fused
projection (split, chunk, slice, a view into heads) without communication. Any other raises, and
verification of the plan tries another way of running the block.
"""

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from boltmesh.strategies.tensor.plan import Section
from boltmesh.strategies.tensor.runtime.collectives import TensorGroup


class FusedOutput:
    """A tensor whose last dim consists of divided sections.

    Args:
        local: This rank's part, sections in order, ``(..., n)``.
        sections: Sections of the whole, ``(..., N)``.
        group: Ranks that hold the parts.
    """

    def __init__(self, local: Tensor, sections: Sequence[Section], group: TensorGroup) -> None:
        self._local = local
        self._sections = tuple(sections)
        self._group = group

    @property
    def shape(self) -> torch.Size:
        """Shape of the whole, ``(..., N)``."""
        return torch.Size((*self._local.shape[:-1], sum(each.length for each in self._sections)))

    @property
    def ndim(self) -> int:
        """Number of dims."""
        return self._local.ndim

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the elements."""
        return self._local.dtype

    @property
    def device(self) -> torch.device:
        """Device of this rank's part."""
        return self._local.device

    @property
    def requires_grad(self) -> bool:
        """Whether autograd tracks it."""
        return self._local.requires_grad

    def size(self, dim: int | None = None) -> Any:
        """Return the shape of the whole, or its size along ``dim``."""
        return self.shape if dim is None else self.shape[dim]

    def dim(self) -> int:
        """Return the number of dims."""
        return self._local.dim()

    def split(self, split_size: int | Sequence[int], dim: int = 0) -> tuple[Any, ...]:
        """Split the last dim at boundaries of sections."""
        self._check_last(dim, "split")
        width = self.shape[-1]
        if isinstance(split_size, int):
            lengths = [
                min(split_size, width - start) for start in range(0, width, max(split_size, 1))
            ]
        else:
            lengths = list(split_size)
        starts = [0, *accumulate(lengths)]
        return tuple(self._slice(start, stop) for start, stop in pairwise(starts))

    def chunk(self, chunks: int, dim: int = 0) -> tuple[Any, ...]:
        """Split the last dim into pieces of equal size, at boundaries of sections."""
        return self.split(-(-self.shape[-1] // chunks), dim)

    def narrow(self, dim: int, start: int, length: int) -> Any:
        """Return a range of the last dim between boundaries of sections."""
        self._check_last(dim, "narrow")
        return self._slice(start, start + length)

    def __getitem__(self, index: Any) -> Any:
        places = index if isinstance(index, tuple) else (index,)
        *earlier, last = places
        is_last = len(places) == self.ndim or (len(places) > 1 and earlier[0] is Ellipsis)
        if (
            not is_last
            or not isinstance(last, slice)
            or any(each is not Ellipsis and each != slice(None) for each in earlier)
            or last.step not in {None, 1}
        ):
            raise self._refusal(f"the index {index}")
        start, stop, _ = last.indices(self.shape[-1])
        return self._slice(start, stop)

    def view(self, *shape: Any) -> Any:
        """View the last dim of one section as rows, heads and channels; sizes are the whole's."""
        sizes = list(shape[0] if len(shape) == 1 and not isinstance(shape[0], int) else shape)
        if sizes.count(-1) == 1:
            sizes[sizes.index(-1)] = prod(self.shape) // -prod(sizes)
        leading = self._leading_dims(sizes)
        tail = sizes[leading:]
        if len(self._sections) != 1 or prod(tail) != self.shape[-1]:
            raise self._refusal(f"a view as {tuple(sizes)}")
        (section,) = self._sections
        for place, size in enumerate(tail):
            if prod(tail[:place]) == section.outer and size % self._group.size == 0:
                local = [*sizes[: leading + place], size // self._group.size, *tail[place + 1 :]]
                return self._whole_sizes(self._local.reshape(local), leading + place)
        raise self._refusal(f"a view as {tuple(sizes)}")

    reshape = view

    def unflatten(self, dim: int, sizes: Sequence[int]) -> Any:
        """View the last dim of one section as rows, heads and channels."""
        self._check_last(dim, "unflatten")
        return self.view(*self.shape[:-1], *sizes)

    def contiguous(self) -> "FusedOutput":
        """Return a contiguous copy or itself."""
        return self._map(Tensor.contiguous)

    def to(self, *args: Any, **kwargs: Any) -> "FusedOutput":
        """Convert dtype or device."""
        return self._map(lambda local: local.to(*args, **kwargs))

    def float(self) -> "FusedOutput":
        """Convert to fp32."""
        return self._map(Tensor.float)

    def clamp(self, *args: Any, **kwargs: Any) -> "FusedOutput":
        """Clamp each element."""
        return self._map(lambda local: local.clamp(*args, **kwargs))

    def clamp_(self, *args: Any, **kwargs: Any) -> "FusedOutput":
        """Clamp each element in place."""
        self._local.clamp_(*args, **kwargs)
        return self

    @classmethod
    def __torch_function__(
        cls,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        method = _FUNCTIONS.get(func)
        if method is not None and isinstance(args[0], cls):
            return getattr(args[0], method)(*args[1:], **(kwargs or {}))
        name = getattr(func, "__name__", str(func))
        first = next(each for each in args if isinstance(each, cls))
        raise first._refusal(f"'{name}'")  # noqa: SLF001 - of its own class

    def _slice(self, start: int, stop: int) -> Any:
        """Return the sections between two positions, as a DTensor if they are one range."""
        place = local_place = 0
        local_start: int | None = 0 if start == 0 else None
        taken: list[Section] = []
        for section in self._sections:
            if place == start:
                local_start = local_place
            if start <= place < stop:
                taken.append(section)
            place += section.length
            local_place += section.divided(self._group.size, self._group.rank).length
        if local_start is None or sum(each.length for each in taken) != stop - start:
            raise self._refusal(f"a piece from {start} to {stop}")
        local_length = sum(
            each.divided(self._group.size, self._group.rank).length for each in taken
        )
        local = self._local.narrow(-1, local_start, local_length)
        return as_whole(local, taken, self._group)

    def _leading_dims(self, sizes: Sequence[int]) -> int:
        """Return how many of ``sizes`` are the dims before the last."""
        outside = prod(self.shape[:-1])
        for count in range(len(sizes) + 1):
            if prod(sizes[:count]) == outside and prod(sizes[count:]) == self.shape[-1]:
                return count
        raise self._refusal(f"a view as {tuple(sizes)}")

    def _whole_sizes(self, local: Tensor, dim: int) -> DTensor:
        return DTensor.from_local(local, self._group.mesh, [Shard(dim)])

    def _map(self, function: Callable[[Tensor], Tensor]) -> "FusedOutput":
        return FusedOutput(function(self._local), self._sections, self._group)

    def _check_last(self, dim: int, what: str) -> None:
        if dim % self.ndim != self.ndim - 1:
            raise self._refusal(f"'{what}' along dimension {dim}")

    def _refusal(self, what: str) -> NotImplementedError:
        lengths = [each.length for each in self._sections]
        return NotImplementedError(
            f"{what} of a fused projection whose sections {lengths} are divided over "
            f"{self._group.size} ranks would need it whole"
        )


_FUNCTIONS = {
    torch.split: "split",
    torch.chunk: "chunk",
    torch.narrow: "narrow",
    torch.reshape: "reshape",
    torch.unflatten: "unflatten",
    torch.clamp: "clamp",
}


def as_whole(
    local: Tensor, sections: Sequence[Section], group: TensorGroup, dim: int = -1
) -> DTensor | FusedOutput:
    """Return a rank's part of an output as a tensor with the sizes of the whole. Local.

    Args:
        local: The part, ``(..., n, ...)``.
        sections: Sections of the whole along ``dim``.
        group: Ranks that hold the parts.
        dim: The divided dim; must be the last if there are several sections.
    """
    if len(sections) == 1 and sections[0].outer == 1:
        return DTensor.from_local(local, group.mesh, [Shard(dim % local.dim())])
    return FusedOutput(local, sections, group)
