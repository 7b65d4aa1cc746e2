"""Physics: networks of torchphysics and pina whose loss has derivatives by their inputs."""

from typing import Any

import torch
from torch import Tensor, nn

from tests.zoo.entry import ROWS, Entry, Trained, normal

IMPORTS = ["torchphysics", "pina.model"]


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


ENTRIES = [
    Entry("pina FeedForward", dense, points),
    Entry("torchphysics FCN", of_points, points),
]
