"""Boundaries of divided blocks: how activations enter divided modules and leave them."""

from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from boltmesh.strategies.tensor.runtime.collectives import (
    TensorGroup,
    reduce_gradient,
    reduce_gradient_beside,
    reduce_sum,
)
from boltmesh.strategies.tensor.runtime.sequence import SequenceParts
from boltmesh.strategies.torch_compat.tensors import times_written


class BlockBoundary:
    """Boundary between replicated activations and the divided modules of one axis of a block.

    An input of several modules (q, k and v; gate and up) enters once, so that its gradient is
    summed once: a block then has Megatron's minimum of two sums forward and two backward.
    """

    def __init__(self, group: TensorGroup) -> None:
        self.group = group
        self._entered: tuple[Tensor, int, Tensor] | None = None
        """The last input, its version then, and what it was returned as."""

    def enter(self, value: Tensor) -> Tensor:
        """Return ``value`` as an input of divided modules, same shape and dtype.

        Its backward sums the gradients.
        """
        if not (value.requires_grad and torch.is_grad_enabled()):
            return value
        entered = self._as_before(value)
        if entered is None:
            entered = reduce_gradient(value, self.group)
            self._entered = value, times_written(value), entered
        return entered

    def enter_linear(self, value: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor | None:
        """Return ``F.linear`` with ``value`` as a divided module's input; None to use ``enter``.

        The product runs beside the sum of gradients if it is the input's first one.
        """
        if self._as_before(value) is not None:
            return None
        found = reduce_gradient_beside(value, weight, bias, self.group)
        if found is None:
            return None
        entered, product = found
        self._entered = value, times_written(value), entered
        return product

    def _as_before(self, value: Tensor) -> Tensor | None:
        """Return what a value was returned as, unless it has been modified since."""
        if self._entered is not None:
            earlier, version, entered = self._entered
            if earlier is value and version == times_written(value):
                return entered
        return None

    def leave(self, part: Tensor) -> Tensor:
        """Return the sum over ranks of partial outputs, in the boundary's layout. Collective.

        Args:
            part: This rank's summand, of the whole shape.
        """
        self.forget()
        return reduce_sum(part, self.group)

    def after(self, parameter: Tensor) -> Tensor:
        """Return a whole parameter, same shape and dtype, for use with the result of ``leave``."""
        return parameter  # its use is replicated

    def forget(self) -> None:
        """Release activations. Called when the block has run."""
        self._entered = None


class SequenceBoundary(BlockBoundary):
    """Outside, each rank has a part of the sequence.

    Inputs from elsewhere, such as an encoder's states, are replicated; see `GradSummedUpstream`
    for inputs that were gathered.
    """

    def __init__(self, group: TensorGroup, parts: SequenceParts) -> None:
        super().__init__(group)
        self._parts = parts

    @override
    def leave(self, part: Tensor) -> Tensor:
        """Return this rank's part of the sum along the sequence, ``(..., s, ...)``. Collective."""
        self.forget()
        return self._parts.scatter(part)

    @override
    def after(self, parameter: Tensor) -> Tensor:
        """Return it; its backward sums the gradients of its uses on parts of the sequence."""
        return reduce_gradient(parameter, self.group)


class GradSummedUpstream(BlockBoundary):
    """The boundary of a module whose input's gradient is summed further upstream.

    That is in the gather of a sequence, or at the boundary that the input came through.
    """

    def __init__(self, boundary: BlockBoundary) -> None:
        super().__init__(boundary.group)
        self._boundary = boundary

    @override
    def enter(self, value: Tensor) -> Tensor:
        return value

    @override
    def enter_linear(self, value: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor | None:
        return None

    @override
    def leave(self, part: Tensor) -> Tensor:
        return self._boundary.leave(part)

    @override
    def after(self, parameter: Tensor) -> Tensor:
        return self._boundary.after(parameter)

    @override
    def forget(self) -> None:
        self._boundary.forget()


class BlockScope:
    """Wrapper of the module that holds all divided modules of an axis in a block."""

    def __init__(self, boundary: BlockBoundary) -> None:
        self._boundary = boundary

    def __call__(self, forward: Any, *args: Any, **kwargs: Any) -> Any:
        """Run the module."""
        try:
            return forward(*args, **kwargs)
        finally:
            self._boundary.forget()
