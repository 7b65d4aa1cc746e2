"""Sequence parallelism: between its matrix products, each rank has a part of the sequence.

A stack of blocks is entered with one part per rank, and left with the whole. Inside, what several
column products take is gathered once, with gradients summed and scattered; row products give each
rank its part of their sum. So norms, dropout and the residual stream hold ``1 / size`` of the
activations, at the traffic of plain tensor parallelism.

A length that does not divide is filled up with copies of the last position. Only what works
position by position sees them: each gather cuts them off, so attention does not, and no gradient
reaches them. Copies, because a norm of zeros may have no finite gradient.

Source: Korthikanti et al. 2022, section 4.2, https://arxiv.org/abs/2205.05198
"""

from typing import Any, cast
from weakref import WeakSet

import torch
from torch import Tensor
from torch.autograd import Function
from typing_extensions import Self, override

from boltmesh.errors import LayoutError
from boltmesh.strategies.tensor.execution.changes import Around
from boltmesh.strategies.tensor.execution.collectives import (
    gather_parts,
    gather_sequence,
    scatter_sum,
    take_part,
)
from boltmesh.strategies.tensor.execution.group import TensorGroup
from boltmesh.strategies.tensor.plan import GatherPoint
from boltmesh.strategies.torch_compat import is_in_backward


class SequenceParts:
    """Divides and joins the activations of one stack of blocks.

    It knows the length of the whole from where the stack was entered. Blocks that are computed
    again in a backward pass may belong to an earlier entry: that of the same length of parts.
    """

    def __init__(self, group: TensorGroup, dim: int) -> None:
        self._group = group
        self.dim = dim
        """Of the sequence."""
        self._length = 0
        self._awaited: WeakSet[_Length] = WeakSet()
        """Of entries whose backward pass is not over."""

    def split(self, whole: Tensor) -> Tensor:
        """Keep this rank's part of what is alike on all ranks. Gathers in the backward pass."""
        entry = _Length(whole.shape[self.dim])
        self._length = entry.whole
        self._awaited.add(entry)
        filled = self._filled(whole, whole.narrow(self.dim, entry.whole - 1, 1).detach())
        part = take_part(filled, self._group, self.dim)
        return cast("Tensor", _Awaited.apply(part, entry))  # type: ignore[no-untyped-call]

    def join(self, part: Tensor) -> Tensor:
        """Return the whole, for computations that are alike on all ranks. Collective."""
        return self._cut(gather_parts(part, self._group, self.dim))

    def gather(self, part: Tensor) -> Tensor:
        """Return the whole, for computations that are divided. Collective."""
        return self._cut(gather_sequence(part, self._group, self.dim))

    def scatter(self, part: Tensor) -> Tensor:
        """Add up partial sums of all ranks and keep this rank's part. Collective."""
        length = part.shape[self.dim]
        filled = self._filled(part, torch.zeros_like(part.narrow(self.dim, length - 1, 1)))
        return scatter_sum(filled, self._group, self.dim)

    def _filled(self, whole: Tensor, last: Tensor) -> Tensor:
        missing = -whole.shape[self.dim] % self._group.size
        return torch.cat([whole, *[last] * missing], self.dim) if missing else whole

    def _cut(self, filled: Tensor) -> Tensor:
        length = self._length_of(filled.shape[self.dim])
        if length == filled.shape[self.dim]:
            return filled
        return filled.narrow(self.dim, 0, length).contiguous()

    def _length_of(self, filled: int) -> int:
        """What was entered with, of which ``filled`` positions were made."""
        lengths = {self._length}
        if is_in_backward():
            lengths = {e.whole for e in self._awaited if not e.is_over} or lengths
        fitting = sorted(each for each in lengths if 0 <= filled - each < self._group.size)
        if len(fitting) != 1:
            raise LayoutError(
                f"{filled} positions belong to sequences of {fitting or sorted(lengths)}, and it "
                f"is not known to which, because blocks are computed again in the backward pass. "
                f"Give sequences lengths that {self._group.size} ranks divide, or set "
                "strategy.sequence_parallel=false."
            )
        return fitting[0]

    def __deepcopy__(self, _: dict[int, Any]) -> Self:
        return self


class _Length:
    """How long the sequences of one forward pass are."""

    def __init__(self, whole: int) -> None:
        self.whole = whole
        self.is_over = False
        """Whether its backward pass has come back to the stack's entry."""


class _Awaited(Function):
    """Holds a length as long as autograd may come back to the stack that was entered with it."""

    @staticmethod
    @override
    def forward(ctx: Any, part: Tensor, entry: _Length) -> Tensor:
        ctx.entry = entry
        return part.view_as(part)

    @staticmethod
    @override
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        ctx.entry.is_over = True
        return gradient, None


class Entry:
    """Around the first block of a stack: its first activation is divided."""

    def __init__(self, parts: SequenceParts) -> None:
        self._parts = parts

    def __call__(self, forward: Around, *args: Any, **kwargs: Any) -> Any:
        """Run the block."""
        place = first_activation(args, kwargs)
        args, kwargs = replaced(args, kwargs, place, self._parts.split)
        return forward(*args, **kwargs)


class Exit:
    """Around the last block of a stack: its output, or the first of several, is joined."""

    def __init__(self, parts: SequenceParts) -> None:
        self._parts = parts

    def __call__(self, forward: Around, *args: Any, **kwargs: Any) -> Any:
        """Run the block."""
        output = forward(*args, **kwargs)
        if isinstance(output, Tensor):
            return self._parts.join(output)
        if type(output) in {tuple, list} and isinstance(output[0], Tensor):
            return type(output)([self._parts.join(output[0]), *output[1:]])
        raise LayoutError(
            f"Sequence parallelism joins a tensor, or the first of a tuple, behind the last "
            f"block, which returns a {type(output).__name__}. Set strategy.sequence_parallel=false."
        )


class Gather:
    """Around a module that takes the whole sequence in some of its arguments."""

    def __init__(self, parts: SequenceParts, points: list[GatherPoint]) -> None:
        self._parts = parts
        self._arguments = [each.argument for each in points]

    def __call__(self, forward: Around, *args: Any, **kwargs: Any) -> Any:
        """Run the module."""
        for argument in self._arguments:
            args, kwargs = replaced(args, kwargs, argument, self._parts.gather)
        return forward(*args, **kwargs)


def first_activation(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int | str:
    """Return the place or keyword of the first floating point tensor.

    Raises:
        LayoutError: There is none.
    """
    for place, value in [*enumerate(args), *kwargs.items()]:
        if isinstance(value, Tensor) and value.is_floating_point():
            return place
    raise LayoutError(
        "Sequence parallelism divides the first activation that a stack of blocks takes, and it "
        "takes none. Set strategy.sequence_parallel=false."
    )


def replaced(
    args: tuple[Any, ...], kwargs: dict[str, Any], argument: int | str, change: Any
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return arguments of which one is changed; it may be missing where it has a default."""
    if isinstance(argument, int):
        if argument < len(args):
            args = (*args[:argument], change(args[argument]), *args[argument + 1 :])
    elif argument in kwargs:
        kwargs = {**kwargs, argument: change(kwargs[argument])}
    return args, kwargs
