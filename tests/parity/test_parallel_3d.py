"""Data and tensor axis together, in every ZeRO stage, compute what one process computes."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor

from boltmesh.check.differences import Trace
from boltmesh.check.parity import trace_layout
from boltmesh.strategies import Parallel3DStrategy
from tests.support.cases import BF16, CLIP, ROUGH, SGD, differences, reference
from tests.support.cases import Case as AnyCase
from tests.support.causal_lms import build
from tests.support.gpts import TinyGPT
from tests.support.models import Autoencoder
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.ranks


class Llama(LightningModule):
    """Hugging Face's, as it is, with its own loss."""

    def __init__(self) -> None:
        super().__init__()
        self.model = build("llama")

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss: Tensor = self.model(input_ids=batch[0], labels=batch[0]).loss
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.training_step(batch, batch_idx), sync_dist=True)

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        logits: Tensor = self.model(input_ids=batch[0]).logits
        return logits

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@dataclass(frozen=True)
class Case(AnyCase):
    """In each of some stages, with batches for every group of ``tensor`` ranks."""

    ranks: int = 4
    module: type[LightningModule] = TinyGPT
    tensor: int = 2
    stages: tuple[int, ...] = (0, 1, 2, 3)

    @property
    def data_size(self) -> int:
        return self.ranks // (self.tensor * self.strategy.get("pipeline", 1))


CASES = [
    Case("tied, clipping, accumulation", accumulate=2, model={"ties": True}, trainer=CLIP),
    Case("a divided sequence that is computed again", stages=(3,), trainer=CLIP,
         strategy={"sequence_parallel": True, "activation_checkpointing": "full"}),
    Case("a Llama", stages=(3,), steps=3, module=Llama, trainer=CLIP),
    Case("layers that the step calls itself, in a pipeline", stages=(0,), module=Autoencoder,
         strategy={"pipeline": 2, "microbatches": 2}),
    Case("bf16, accumulation, frozen layers", stages=(1,), accumulate=2, steps=2,
         model={"freezes": True, **SGD}, trainer={**CLIP, **BF16}, tolerance=ROUGH),
]  # fmt: skip


def layouts(rank: int, world_size: int, case: Case) -> list[Trace]:
    return [
        trace_layout(
            case.problem(),
            Parallel3DStrategy(
                telemetry=False, tensor=case.tensor, zero_stage=stage, **case.strategy
            ),
            devices=world_size,
        )
        for stage in case.stages
    ]


@pytest.mark.sample("bf16, accumulation, frozen layers")
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_stage_equals_one_process(case: Case) -> None:
    wanted = reference(case)
    for traces in run_ranks(layouts, case.ranks, case):
        assert differences(wanted, case.stages, traces, case.tolerance) == {}
