"""A user's ``torch.autograd.Function`` between layers goes back as in one process."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from boltmesh.errors import ConfigError
from boltmesh.strategies.pipeline.partition.placement import _trace_costs
from boltmesh.strategies.pipeline.stage.units import find_stage_units
from tests.support.pipeline_models import WORDS, Words
from tests.support.staged import check_parity

TOKENS = [
    torch.randint(0, WORDS, (3, 6), generator=torch.Generator().manual_seed(i)) for i in (0, 1)
]


class Reversed(torch.autograd.Function):
    """Gradient reversal, as of domain-adversarial training: its result is a view."""

    @staticmethod
    def forward(_: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(_: Any, gradient: Tensor) -> Tensor:
        return -0.5 * gradient


class Sign(torch.autograd.Function):
    """A straight-through estimator."""

    @staticmethod
    def forward(_: Any, x: Tensor) -> Tensor:
        return x.sign()

    @staticmethod
    def backward(_: Any, gradient: Tensor) -> Tensor:
        return gradient


sign: Callable[[Tensor], Tensor] = Sign.apply


class Adjoint(torch.autograd.Function):
    """Calls a layer without a graph, and again in its backward pass, as torchdiffeq does."""

    @staticmethod
    def forward(ctx: Any, block: Any, x: Tensor, *parameters: Tensor) -> Tensor:
        ctx.block, ctx.x, ctx.parameters = block, x.detach(), parameters
        made: Tensor = x + block(x)
        return made

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        with torch.enable_grad():
            x = ctx.x.requires_grad_()
            made = x + ctx.block(x)
        return None, *torch.autograd.grad(made, (x, *ctx.parameters), gradient)


class Together(torch.autograd.Function):
    """Runs all blocks again in its backward pass, as reversible networks do."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, blocks: Sequence[nn.Module]) -> Tensor:
        ctx.blocks, ctx.inputs = blocks, []
        for block in blocks:
            ctx.inputs.append(x.detach())
            x = block(x)
        return x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        for block, each in zip(reversed(ctx.blocks), reversed(ctx.inputs), strict=True):
            with torch.enable_grad():
                x = each.requires_grad_()
                torch.autograd.backward(block(x), gradient)
            gradient = x.grad
        return gradient, None


class Calls(Words):
    """Calls its blocks as ``call`` says."""

    def __init__(self, call: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.call = call

    def body(self, x: Tensor, batch: Any) -> Tensor:
        for block in self.blocks:
            x = self.call(block, x)
        return x


def adjoint(block: Any, x: Tensor) -> Tensor:
    made: Tensor = Adjoint.apply(block, x, *block.parameters())
    return made


def recomputed(block: Any, x: Tensor) -> Tensor:
    made: Tensor = checkpoint(block, x, use_reentrant=True)
    return made


@pytest.mark.parametrize(
    "call",
    [
        lambda block, x: Reversed.apply(block(x)),
        lambda block, x: sign(block(x)),
        adjoint,
        recomputed,
    ],
    ids=["reversed", "straight through", "adjoint", "reentrant checkpoint"],
)
def test_a_function_at_a_boundary_hands_gradients_on(call: Callable[[Any, Tensor], Tensor]) -> None:
    torch.manual_seed(0)
    check_parity(Calls(call), TOKENS, 3)


class Reversible(Words):
    def body(self, x: Tensor, batch: Any) -> Tensor:
        made: Tensor = Together.apply(x, list(self.blocks))
        return made


def test_a_function_around_layers_of_several_stages_is_refused() -> None:
    said = (
        r"Together\.apply \(.*test_own_functions.* calls 'blocks\.\d' of stage 0 and 'blocks\.5' of"
    )
    with pytest.raises(ConfigError, match=said):
        check_parity(Reversible(), TOKENS, 3)


def test_a_function_around_layers_of_one_stage_goes_back_there() -> None:
    torch.manual_seed(0)
    split = {"embedding": 0, **{f"blocks.{number}": 1 for number in range(6)}, "norm": 2, "head": 2}
    check_parity(Reversible(), TOKENS, split=split)


class Derived(Words):
    """Takes a derivative through its blocks by a transform of torch.func."""

    def loss(self, x: Tensor, tokens: Tensor) -> Tensor:
        slope = torch.func.grad(lambda each: self.body(each, None).sum())(x.detach())
        return super().loss(x, tokens) + slope.square().mean()


def test_a_derivative_by_a_transform_is_refused_by_its_line() -> None:
    module = Derived()
    said = (
        r"at .*test_own_functions.* is called within torch.vmap or another transform of torch.func"
    )
    with pytest.raises(ConfigError, match=said):
        _trace_costs(module, find_stage_units(module), "training_step", (TOKENS[0], 0), 1)
