"""Data and tensor axis together, in every ZeRO stage, compute what one process computes."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor

from boltmesh.differences import Tolerance, Trace, find_differences
from boltmesh.parity import Problem, trace_layout, trace_one_process
from boltmesh.strategies import Parallel3DStrategy
from tests.support.causal_lms import build
from tests.support.gpts import TinyGPT, text_data
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
class Case:
    """One combination of what a user may ask for."""

    name: str
    stages: tuple[int, ...] = (0, 1, 2, 3)
    ranks: int = 4
    tensor: int = 2
    count: int = 48
    batch_size: int = 4
    accumulate: Any = 1
    steps: int = 5
    module: Callable[..., LightningModule] = TinyGPT
    model: dict[str, Any] = field(default_factory=dict)
    trainer: dict[str, Any] = field(default_factory=dict)
    strategy: dict[str, Any] = field(default_factory=dict)
    tolerance: Tolerance = field(default_factory=Tolerance)

    @property
    def data_size(self) -> int:
        return self.ranks // self.tensor

    def problem(self) -> Problem:
        return Problem(
            module=partial(self.module, **self.model),
            train=partial(text_data, self.count, self.batch_size),
            validation=partial(text_data, 21, 4),
            prediction=partial(text_data, 19, 4),
            steps=self.steps,
            accumulate=self.accumulate,
            trainer={"accelerator": "cpu", **self.trainer},
        )


SGD = {"optimizer": "sgd"}
CLIP = {"gradient_clip_val": 0.5}
BF16 = {"precision": "bf16-mixed"}
ROUGH = Tolerance(relative=2e-2, parameters=2e-2, optimizer=5e-2)
"""Of products that are added up in bf16, which has 8 bits: the order decides about the last."""

CASES = [
    Case("tied, clipping, accumulation", accumulate=2, model={"ties": True}, trainer=CLIP),
    Case("a divided sequence that is computed again", stages=(3,), trainer=CLIP,
         strategy={"sequence_parallel": True, "activation_checkpointing": "full"}),
    Case("a Llama", stages=(3,), steps=3, module=Llama, trainer=CLIP),
    Case("bf16, accumulation, frozen layers", stages=(1,), accumulate=2, steps=2,
         model={"freezes": True, **SGD}, trainer={**CLIP, **BF16}, tolerance=ROUGH),
]  # fmt: skip


def one_process(rank: int, world_size: int, case: Case) -> Trace:
    return trace_one_process(case.problem(), data_size=case.data_size, is_dealt=case.data_size > 1)


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


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_stage_equals_one_process(case: Case) -> None:
    reference = run_ranks(one_process, 1, case)[0]
    ranks = run_ranks(layouts, case.ranks, case, timeout_s=150)
    assert len(reference.losses) == case.steps
    assert reference.losses[-1] != reference.losses[0]
    assert reference.validation
    for traces in ranks:
        for stage, trace in zip(case.stages, traces, strict=True):
            found = [
                f"stage {stage}: {each}"
                for each in find_differences(reference, trace, case.tolerance)
            ]
            assert found == []
