"""Hands gradients that exist already over to whoever calls ``backward``.

Lightning calls ``training_step``, then ``zero_grad``, then ``backward``. A schedule makes its
gradients inside the first of these, where the second would wipe them. So they are taken out of
``.grad`` at once, and the loss that the step returns adds them when its backward pass comes:
every hook fires once and in its order, and accumulation, clipping and loss scaling see what they
would have seen.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from typing_extensions import override

from boltmesh.strategies.torch_compat.tensors import scalar_on


def _nothing() -> None:
    """What follows where nobody else has to know."""


class GradHandoff:
    """The gradients that one schedule made, until the backward pass asks for them."""

    def __init__(self, parameters: Iterable[Parameter]) -> None:
        self._parameters = [each for each in parameters if each.requires_grad]
        self._made: list[Tensor | None] = []

    @contextmanager
    def taking(self) -> Iterator[None]:
        """Within, gradients are made from nothing; afterwards they are here and not in ``.grad``.

        What ``.grad`` held before, from batches that this one is accumulated to, is back then.
        """
        before = [each.grad for each in self._parameters]
        for each in self._parameters:
            each.grad = None
        try:
            yield
        finally:
            self._made = [each.grad for each in self._parameters]
            for each, gradient in zip(self._parameters, before, strict=True):
                each.grad = gradient

    def made(self) -> dict[int, Tensor | None]:
        """Return the gradients, by identity of their parameter."""
        pairs = zip(self._parameters, self._made, strict=True)
        return {id(parameter): gradient for parameter, gradient in pairs}

    def put(self, gradients: Mapping[int, Tensor]) -> None:
        """Take gradients that were made elsewhere, by identity of their parameter."""
        self._made = [gradients.get(id(each)) for each in self._parameters]

    def replace(self, gradients: Mapping[int, Tensor]) -> None:
        """Put others in the place of some, by identity of their parameter."""
        self._made = [
            gradients.get(id(parameter), gradient)
            for parameter, gradient in zip(self._parameters, self._made, strict=True)
        ]

    def sign(
        self, loss: Tensor, total: Tensor | float = 1.0, *, then: Callable[[], None] = _nothing
    ) -> Tensor:
        """Return a loss with this value whose backward pass adds the gradients.

        Args:
            loss: 0-dim; its value is what callbacks and loggers see.
            total: What the gradients are to be divided by: the sum of the microbatches' weights,
                times a loss scale if they were made with one. Without any weight there is nothing
                to divide, and gradients are zeros.
            then: Called within the backward pass, when the gradients are in ``.grad``.
        """
        signed: Tensor = _HandoffFunction.apply(loss.detach().requires_grad_(), self, total, then)  # type: ignore[no-untyped-call]
        return signed

    def add(self, factor: Tensor) -> None:
        """Add the gradients, times a 0-dim factor, to ``.grad``; they are given away."""
        made, self._made = self._made, []
        pairs = [
            (parameter, gradient)
            for parameter, gradient in zip(self._parameters, made, strict=True)
            if gradient is not None
        ]
        # Only on the host is it free to ask.
        if pairs and not (factor.device.type == "cpu" and factor == 1):
            torch._foreach_mul_([gradient for _, gradient in pairs], factor)
        for parameter, gradient in pairs:
            if parameter.grad is None:
                parameter.grad = gradient
            else:
                parameter.grad.add_(gradient)


class _HandoffFunction(torch.autograd.Function):
    @staticmethod
    @override
    def forward(
        ctx: Any,
        loss: Tensor,
        deposit: GradHandoff,
        total: Tensor | float,
        then: Callable[[], None],
    ) -> Tensor:
        ctx.deposit, ctx.total, ctx.then = deposit, total, then
        return loss.clone()

    @staticmethod
    @override
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        # In the same way on every rank, in no less than fp32: parts of the model take equal steps.
        scale = gradients[0].double()
        total = scalar_on(ctx.total, scale.device)
        factor = torch.where(total == 0, 0.0, scale / total)
        ctx.deposit.add(factor.to(torch.promote_types(gradients[0].dtype, torch.float32)))
        ctx.then()
        return torch.zeros_like(gradients[0]), None, None, None
