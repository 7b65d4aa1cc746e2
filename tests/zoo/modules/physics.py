"""Physics: networks of torchphysics and pina whose loss has derivatives by their inputs."""

from typing import Any

import torch
from torch import Tensor, nn

from tests.zoo.entry import ROWS, Entry, Trained, normal

IMPORTS = ["torchphysics", "pina.model", "nflows", "tabm", "st_moe_pytorch"]


def points(number: int) -> Any:
    return normal(number, ROWS, 2), normal(number + 1, ROWS, 1)


def residual(net: nn.Module, batch: Any) -> Tensor:
    """Return the loss of Poisson's equation inside, and of measured values."""
    places, measured = batch
    places = places.clone().requires_grad_()
    values = net(places)
    (slope,) = torch.autograd.grad(values.sum(), places, create_graph=True)
    second = [
        torch.autograd.grad(slope[:, at].sum(), places, create_graph=True)[0][:, at]
        for at in range(2)
    ]
    inside = (second[0] + second[1] - torch.sin(places.detach().sum(1))).square().mean()
    loss: Tensor = inside + (values - measured).square().mean()
    return loss


def dense() -> Any:
    from pina.model import FeedForward

    return Trained(FeedForward(2, 1, inner_size=16, n_layers=4, func=nn.Tanh), residual)


class OfPoints(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        from torchphysics.models import FCN
        from torchphysics.problem.spaces import R1, R2, Points

        self.space, self.points = R2("x"), Points
        self.net = FCN(R2("x"), R1("u"), hidden=(16, 16, 16, 16))

    def forward(self, places: Tensor) -> Any:
        return self.net(self.points(places, self.space)).as_tensor


def of_points() -> Any:
    return Trained(OfPoints(), residual)


def flow() -> Any:
    from nflows.distributions import StandardNormal
    from nflows.flows import Flow
    from nflows.transforms import (
        CompositeTransform,
        MaskedAffineAutoregressiveTransform,
        ReversePermutation,
    )

    layers = []
    for _ in range(4):
        layers.append(ReversePermutation(features=4))
        layers.append(MaskedAffineAutoregressiveTransform(features=4, hidden_features=16))
    net = Flow(CompositeTransform(layers), StandardNormal([4]))

    def likelihood(net: Any, batch: Any) -> Any:
        return -net.log_prob(inputs=batch[0]).mean()

    return Trained(net, likelihood)


def vectors(number: int) -> Any:
    return normal(number, ROWS, 4), normal(number + 1, ROWS, 1)


def tabm() -> Any:
    from tabm import TabM

    net = TabM.make(n_num_features=4, d_out=1, n_blocks=4, d_block=16, k=4, dropout=0.0)

    def loss(net: Any, batch: Any) -> Any:
        return (net(batch[0]) - batch[1].unsqueeze(1)).square().mean()

    return Trained(net, loss)


class Switched(nn.Module):
    """Blocks of experts, each with losses of its router beside its output."""

    def __init__(self) -> None:
        super().__init__()
        from st_moe_pytorch import MoE, SparseMoEBlock

        self.blocks = nn.ModuleList(
            SparseMoEBlock(
                MoE(dim=8, num_experts=4, threshold_train=0.0, is_distributed=False),
                add_ff_before=True,
            )
            for _ in range(4)
        )

    def forward(self, values: Tensor) -> Any:
        extra: Any = 0.0
        for block in self.blocks:
            values, more, *_ = block(values)
            extra = extra + more
        return values, extra


def switched() -> Any:
    def loss(net: Any, batch: Any) -> Any:
        values, extra = net(batch[0])
        return (values - batch[1]).square().mean() + extra

    return Trained(Switched(), loss)


def texts(number: int) -> Any:
    return normal(number, ROWS, 6, 8), normal(number + 1, ROWS, 6, 8)


ENTRIES = [
    Entry("pina FeedForward", dense, points),
    Entry("torchphysics FCN", of_points, points),
    Entry("nflows MaskedAffineAutoregressive", flow, vectors),
    Entry("tabm TabM", tabm, vectors),
    Entry("st_moe_pytorch SparseMoEBlock", switched, texts, microbatches=1, is_shared_batch=True),
]
