"""How activations come to the divided modules of a block, and how they leave them."""

from abc import ABC, abstractmethod
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


class BlockBoundary(ABC):
    """Between what is alike on all ranks and what one axis of a block divides."""

    def __init__(self, group: TensorGroup) -> None:
        self.group = group

    @abstractmethod
    def enter(self, value: Tensor) -> Tensor:
        """Give a value to a computation that is divided."""

    def enter_linear(self, value: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor | None:
        """Give a value to ``F.linear`` and return its product, or None to use ``enter``."""
        return None

    @abstractmethod
    def leave(self, part: Tensor) -> Tensor:
        """Take what a divided computation gives: a part of a sum. Collective."""

    @abstractmethod
    def after(self, parameter: Tensor) -> Tensor:
        """Return a whole parameter for use with what has left."""

    @abstractmethod
    def forget(self) -> None:
        """Keep no activation longer than the block runs."""


class ReplicatedBoundary(BlockBoundary):
    """Everything outside is whole on every rank.

    What several modules take (q, k and v; gate and up) enters once, so that its gradient is summed
    once: with that a block has Megatron's minimum of two sums forward and two backward.
    """

    def __init__(self, group: TensorGroup) -> None:
        super().__init__(group)
        self._entered: tuple[Tensor, int, Tensor] | None = None
        """What entered last, how often it had been written by then, and as what."""

    @override
    def enter(self, value: Tensor) -> Tensor:
        """Return the value with the sum of the gradients in its backward."""
        if not (value.requires_grad and torch.is_grad_enabled()):
            return value
        entered = self._as_before(value)
        if entered is None:
            entered = reduce_gradient(value, self.group)
            self._entered = value, times_written(value), entered
        return entered

    @override
    def enter_linear(self, value: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor | None:
        """Compute the product that the sum of gradients runs beside, if it is the first one."""
        if self._as_before(value) is not None:
            return None
        found = reduce_gradient_beside(value, weight, bias, self.group)
        if found is None:
            return None
        entered, product = found
        self._entered = value, times_written(value), entered
        return product

    def _as_before(self, value: Tensor) -> Tensor | None:
        """As what a value has entered, unless it was written since."""
        if self._entered is not None:
            earlier, version, entered = self._entered
            if earlier is value and version == times_written(value):
                return entered
        return None

    @override
    def leave(self, part: Tensor) -> Tensor:
        """Return the sum."""
        self.forget()
        return reduce_sum(part, self.group)

    @override
    def after(self, parameter: Tensor) -> Tensor:
        """Return it as it is: all ranks do the same with it."""
        return parameter

    @override
    def forget(self) -> None:
        """Keep no activation longer than the block runs."""
        self._entered = None


class SequenceBoundary(ReplicatedBoundary):
    """Outside, each rank has a part of the sequence.

    What enters from elsewhere, such as an encoder's states, is equal on all ranks; see
    `GradSummedUpstream` for what was gathered.
    """

    def __init__(self, group: TensorGroup, parts: SequenceParts) -> None:
        super().__init__(group)
        self._parts = parts

    @override
    def leave(self, part: Tensor) -> Tensor:
        """Return this rank's part of the sum."""
        self.forget()
        return self._parts.scatter(part)

    @override
    def after(self, parameter: Tensor) -> Tensor:
        """Return it with the sum of the gradients that its uses on parts of the sequence give."""
        return reduce_gradient(parameter, self.group)


class GradSummedUpstream(BlockBoundary):
    """The boundary of a module whose input's gradient is summed further up.

    By the gather of a sequence, or by a boundary behind what the input was made of.
    """

    def __init__(self, boundary: BlockBoundary) -> None:
        super().__init__(boundary.group)
        self._boundary = boundary

    @override
    def enter(self, value: Tensor) -> Tensor:
        """Return it as it is."""
        return value

    @override
    def leave(self, part: Tensor) -> Tensor:
        """As the other boundary."""
        return self._boundary.leave(part)

    @override
    def after(self, parameter: Tensor) -> Tensor:
        """As the other boundary."""
        return self._boundary.after(parameter)

    @override
    def forget(self) -> None:
        """As the other boundary."""
        self._boundary.forget()


class BlockScope:
    """Around the module that holds all divided modules of an axis in a block."""

    def __init__(self, boundary: BlockBoundary) -> None:
        self._boundary = boundary

    def __call__(self, forward: Any, *args: Any, **kwargs: Any) -> Any:
        """Run the module."""
        try:
            return forward(*args, **kwargs)
        finally:
            self._boundary.forget()
