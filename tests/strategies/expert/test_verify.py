"""A rank on which the proof of experts fails does not leave others waiting."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from boltmesh.strategies.expert.find import ExpertCall, Experts
from boltmesh.strategies.expert.verify import prove
from tests.support.expert_models import Experts as Stacked
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.ranks

FOUND = Experts(
    "routed",
    "experts",
    8,
    ("experts.up", "experts.bias", "experts.down"),
    {"rows": 0, "experts": 1, "weights": 2},
    (("experts", "num_experts"),),
)


class Raises(torch.autograd.Function):
    """Raises in the backward pass."""

    @staticmethod
    @override
    def forward(ctx: Any, value: Tensor) -> Tensor:
        return value.clone()

    @staticmethod
    @override
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        raise ValueError("no gradient")


class Failing(Stacked):
    """Fails on one rank, where rows of others come with one choice each."""

    where = ""

    @override
    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        fails = dist.get_rank() == 1 and chosen.shape[-1] == 1
        if fails and self.where == "forward":
            raise ValueError("no rows")
        made = super().forward(x, chosen, weights)
        return Raises.apply(made) if fails and self.where == "backward" else made


def proven(rank: int, world_size: int, where: str) -> str | None:
    torch.manual_seed(rank)
    rows = torch.randn(9, 6)
    weights, chosen = torch.randn(9, 8).topk(3, -1)
    torch.manual_seed(0)
    module = Failing(6, 8)
    module.where = where
    assert dist.group.WORLD is not None
    return prove(
        module,
        FOUND,
        ExpertCall((rows, chosen, weights), {}, module(rows, chosen, weights).detach()),
        dist.group.WORLD,
        around=nullcontext,
        device=torch.device("cpu"),
        is_mixed=False,
    )


@pytest.mark.full
@pytest.mark.parametrize(
    ("where", "text"), [("", None), ("forward", "no rows"), ("backward", "no gradient")]
)
def test_an_error_of_one_rank_ends_the_proof_on_all(where: str, text: str | None) -> None:
    found = run_ranks(proven, 2, where)
    assert (found[1] and found[1].removeprefix("raises ValueError: ")) == text
