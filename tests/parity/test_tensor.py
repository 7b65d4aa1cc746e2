"""Tensor parallelism on 2 and 4 ranks computes what one process computes."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor
from torch.nn import Parameter
from torch.optim import AdamW, Optimizer

from boltmesh.check.differences import Trace
from boltmesh.check.parity import trace_layout
from boltmesh.strategies import TensorParallelStrategy
from tests.support.cases import BF16, CLIP, ROUGH, SGD, differences, reference
from tests.support.cases import Case as AnyCase
from tests.support.gpts import TinyGPT
from tests.support.models import Autoencoder, Regression, Tagger, TwoOptimizers
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.ranks


@dataclass(frozen=True)
class Case(AnyCase):
    """On ranks that share batches in groups of ``size``."""

    module: type[LightningModule] = TinyGPT
    size: int | None = None
    least: float = 0.7
    """How much of the model has to be divided, of its elements."""

    @property
    def data_size(self) -> int:
        return self.ranks // (self.size or self.ranks)


class ByWidth(TinyGPT):
    """Rates by the width of a layer's input, as muP has them."""

    def configure_optimizers(self) -> AdamW:
        rates = [
            {"params": [each], "lr": 0.1 / each.shape[-1] if each.ndim == 2 else 0.01}
            for each in self.parameters()
        ]
        return AdamW(rates, eps=1e-4)


class Matrices(Optimizer):
    """Steps matrices by their square roots; which they are is in the state from the beginning.

    Source: https://github.com/MoonshotAI/Moonlight keeps ``use_muon`` there.
    """

    def __init__(self, matrices: Iterable[Parameter], others: Iterable[Parameter]) -> None:
        chosen = list(matrices)
        super().__init__([*chosen, *others], {"lr": 0.02})
        for each in self.param_groups[0]["params"]:
            self.state[each]["is_matrix"] = any(each is matrix for matrix in chosen)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        group = self.param_groups[0]
        for each in group["params"]:
            if self.state[each]["is_matrix"]:
                each.sub_(self._orthogonal(each.grad), alpha=group["lr"] * max(each.shape) ** 0.5)
            else:
                each.sub_(each.grad, alpha=group["lr"])
        return loss

    def _orthogonal(self, gradient: Tensor) -> Tensor:
        assert gradient.ndim == 2
        found = gradient / (gradient.norm() + 1e-7)
        for _ in range(5):
            found = 1.5 * found - 0.5 * found @ found.T @ found
        return found


class OfMatrices(TinyGPT):
    """Trained by ``Matrices``."""

    def configure_optimizers(self) -> Matrices:
        named = list(self.named_parameters())
        matrices = [each for name, each in named if each.ndim == 2 and "blocks" in name]
        return Matrices(matrices, [each for _, each in named if each not in set(matrices)])


CASES = [
    Case("plain"),
    Case("separate q, k, v, 4 ranks", ranks=4, model={"is_fused": False}),
    Case("odd batches", count=43, batch_size=3, model=SGD),
    Case("tied", ranks=2, model={"ties": True}, trainer=CLIP),
    Case("clipping, 4 ranks", ranks=4, trainer=CLIP),
    Case("clipping by value", model=SGD,
         trainer={"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}),
    Case("accumulation of 3, clipping", accumulate=3, trainer=CLIP, count=52),
    Case("scheduled accumulation", accumulate={0: 1, 1: 2, 2: 3}, count=16, steps=6),
    Case("two groups of replicas", ranks=4, size=2, trainer=CLIP, accumulate=2),
    Case("replicas, odd batches", ranks=4, size=2, count=43, batch_size=3, model=SGD),
    Case("bf16-mixed", model=SGD, trainer={**BF16, **CLIP}, tolerance=ROUGH),
    Case("bf16-true", model=SGD, trainer={"precision": "bf16-true"}, tolerance=ROUGH),
    Case("64 bits", trainer={"precision": "64-true"}),
    Case("two parameter groups, schedule", model={"groups": True}, trainer=CLIP),
    Case("frozen layers", model={"freezes": True}, accumulate=2, trainer=CLIP),
    Case("recomputation", strategy={"activation_checkpointing": "full"}),
    Case("an odd vocabulary, tied, 4 ranks", ranks=4, model={"vocabulary": 27, "ties": True}),
    Case("logits are joined", strategy={"loss_parallel": False}, least=0.6),
    Case("logits stay divided", strategy={"loss_parallel": True}, trainer=CLIP),
    Case("a sequence that is divided", strategy={"sequence_parallel": True}, trainer=CLIP),
    Case("a sequence that is divided and computed again, 2 groups, bf16", ranks=4, size=2, steps=2,
         model=SGD, strategy={"sequence_parallel": True, "activation_checkpointing": "full"},
         trainer=BF16, tolerance=ROUGH),
    Case("a group of one rank", ranks=1, accumulate=3, trainer=CLIP, count=52),
    Case("a divided sequence that is computed again", model={"is_fused": False},
         strategy={"sequence_parallel": True, "activation_checkpointing": "full"}),
    Case("a plan of the user's", strategy={"plan": {"blocks.*.attention*": "whole"}}, least=0.4),
    Case("adapters beside frozen layers", model={"lora": 2}, trainer=CLIP, least=0.5),
    Case("a sequence of layers", module=Regression, model={"width": 12}, accumulate=2, least=0.5),
    Case("several optimizers", module=TwoOptimizers, least=0.0),
    Case("packed sequences", module=Tagger, least=0.3),
    Case("layers that the step calls itself", module=Autoencoder, least=0.5),
    Case("rates by width", module=ByWidth),
    Case("an optimizer that knows matrices by their state", module=OfMatrices),
]  # fmt: skip


def layout(rank: int, world_size: int, case: Case) -> tuple[Trace, float, tuple[str, ...]]:
    strategy = TensorParallelStrategy(telemetry=False, size=case.size, **case.strategy)
    trace = trace_layout(case.problem(), strategy, devices=world_size)
    plan = strategy.plan
    if world_size == 1:
        assert plan is None, "there is nobody to divide anything with"
        return trace, 1.0, ()
    assert plan is not None
    divided = sum(each.elements for each in plan.sharded.values())
    return trace, divided / sum(each.numel() for each in trace.parameters.values()), plan.notes


@pytest.mark.sample(
    "an odd vocabulary, tied, 4 ranks",
    "a sequence that is divided and computed again, 2 groups, bf16",
    "rates by width",
)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_it_equals_one_process(case: Case) -> None:
    wanted = reference(case)
    for trace, share, notes in run_ranks(layout, case.ranks, case):
        assert share >= case.least, notes
        assert differences(wanted, [case.name], [trace], case.tolerance) == {}
