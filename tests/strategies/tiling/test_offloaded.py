"""Layers in tiles whose shards are offloaded read what layers of one process read."""

from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer, seed_everything
from torch import Tensor
from typing_extensions import override

from boltmesh.strategies import ZeROStrategy
from boltmesh.strategies.offload import stores
from tests.support.ranks import run_ranks
from tests.support.stack import Stack, token_data

pytestmark = pytest.mark.ranks

HOST = {"offload_optimizer": "cpu", "offload_parameters": "cpu"}
TILE = 4096
"""Smaller than the embedding of ``Stack`` with this width."""


class LooksUp(Stack):
    """Notes what its embedding gives."""

    def __init__(self, *, ties: bool) -> None:
        super().__init__(width=101, hidden=11, depth=2, optimizer="sgd", ties=ties)
        self.seen: list[Tensor] = []

    @override
    def forward(self, tokens: Tensor) -> Tensor:
        self.seen.append(self.embedding(torch.arange(13)).detach().clone())
        return super().forward(tokens)


def fit(rank: int, world_size: int, ties: bool, options: dict[str, Any] | None) -> list[Tensor]:
    stores.SMALL_NUMEL = 0
    seed_everything(1)
    module = LooksUp(ties=ties)
    strategy: Any = "auto"
    if options is not None:
        strategy = ZeROStrategy(telemetry=False, tile_linear_bytes=TILE, **options)
    trainer = Trainer(
        accelerator="cpu", devices=world_size, strategy=strategy, max_steps=2, logger=False,
        precision="bf16-mixed", enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, use_distributed_sampler=False,
    )  # fmt: skip
    trainer.fit(module, token_data(8, 4))
    return module.seen


@pytest.mark.full
@pytest.mark.parametrize("ties", [False, True])
def test_an_offloaded_embedding_is_looked_up_in_fp32_under_autocast(ties: bool) -> None:
    first, second = run_ranks(fit, 1, ties, None)[0]
    assert not torch.equal(first, first.bfloat16().float())
    for seen in run_ranks(fit, 2, ties, HOST):
        assert torch.equal(seen[0], first)
        # Gradients of bf16 products round differently in tiles; the rows are fp32 all the same.
        torch.testing.assert_close(seen[1], second, rtol=1e-3, atol=1e-3)
        assert not torch.equal(seen[1], seen[1].bfloat16().float())
