"""Buffers are those of the first rank."""

from functools import partial
from typing import Any

import pytest
import torch
from lightning.pytorch import seed_everything
from torch import Tensor, nn

from boltmesh.check.differences import Trace, find_differences
from boltmesh.check.parity import Problem, trace_layout, trace_one_process
from boltmesh.strategies.registry import build_strategy
from tests.support.ranks import run_ranks
from tests.support.shard_runs import trainer
from tests.support.stack import Stack, token_data

pytestmark = pytest.mark.ranks


class Normalised(Stack):
    """Keeps running statistics, of which every rank sees other batches."""

    def __init__(self) -> None:
        super().__init__()
        self.statistics = nn.BatchNorm1d(7)
        self.seen: list[Tensor] = []

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.statistics(self.embedding(tokens).flatten(0, 1)).view(*tokens.shape, -1)
        return self.head(self.norm(x))

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        assert self.statistics.running_mean is not None
        self.seen.append(self.statistics.running_mean.clone())


class Codebook(Stack):
    """Writes buffers past autograd's counter, and on each rank other ones."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("codes", torch.zeros(3))
        self.register_buffer("scratch", torch.zeros(3), persistent=False)
        self.seen: list[Tensor] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        codes, scratch = self.get_buffer("codes"), self.get_buffer("scratch")
        self.seen.append(torch.cat([codes, scratch]))
        codes.data += batch[0].sum()
        if self.global_rank == 1:
            scratch.add_(1.0)
        return super().training_step(batch, batch_idx)


def fit_codebook(rank: int, world_size: int, stage: int) -> list[Tensor]:
    module = Codebook()
    # The last batch has had another one since the evaluation, which sends buffers, too.
    run = trainer(world_size, stage, max_steps=4, val_check_interval=2, num_sanity_val_steps=0)
    run.fit(module, token_data(16, 2), token_data(4, 2))
    return module.seen


def test_buffers_are_the_first_ranks_however_they_were_written() -> None:
    first, second = run_ranks(fit_codebook, 2, 3)
    assert len(first) == 4
    assert first[-1][:3].min() > 0
    for one, other in zip(first, second, strict=True):
        assert torch.equal(one, other)


def fit_with_statistics(rank: int, world_size: int, stage: int) -> list[Tensor]:
    seed_everything(1)
    module = Normalised()
    run = trainer(world_size, stage, max_steps=3, val_check_interval=1, num_sanity_val_steps=0)
    run.fit(module, token_data(16, 2), token_data(4, 2))
    return module.seen


@pytest.mark.full
def test_ranks_evaluate_with_the_running_statistics_of_the_first() -> None:
    first, second = run_ranks(fit_with_statistics, 2, 3)
    assert len(first) == 3
    assert not torch.equal(first[0], first[1])
    for one, other in zip(first, second, strict=True):
        assert torch.equal(one, other)


class Positions(Stack):
    """Has the positions of torch's tutorial as its only buffer, with a stride of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("positions", torch.randn(5, 7).unsqueeze(0).transpose(0, 1))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens) + self.get_buffer("positions")[: tokens.shape[1], 0]
        for each in self.blocks:
            x = each(x)
        return self.head(self.norm(x))


POSITIONS = Problem(
    module=Positions,
    train=partial(token_data, 16, 2),
    validation=partial(token_data, 8, 2),
    steps=3,
    trainer={"accelerator": "cpu"},
)


def in_one_process(rank: int, world_size: int) -> Trace:
    return trace_one_process(POSITIONS, data_size=2)


def on_two_ranks(rank: int, world_size: int, name: str) -> Trace:
    strategy = build_strategy(name, telemetry=False)
    return trace_layout(POSITIONS, strategy, devices=world_size)


@pytest.mark.parametrize("name", ["bolt_ddp", "bolt_zero1", "bolt_zero3"])
def test_a_buffer_with_a_stride_of_its_own_is_sent(name: str) -> None:
    (reference,) = run_ranks(in_one_process, 1)
    for trace in run_ranks(on_two_ranks, 2, name):
        assert find_differences(reference, trace) == []
