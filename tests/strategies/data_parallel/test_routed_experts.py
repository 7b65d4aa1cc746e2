"""Experts that get rows on some ranks alone train under ZeRO as in one process.

Switch Transformers of Hugging Face run an expert only if a token was sent to it.
"""

from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from boltmesh.strategies import ZeROStrategy, gathered_parameters
from tests.support.ranks import RankFailure, run_ranks

pytestmark = pytest.mark.ranks

WIDTH, EXPERTS, ROWS, BATCHES = 8, 6, 3, 16
"""So few rows that experts get none on one rank, and on all of them."""


class Expert(nn.Module):
    """Of ``scale`` the last rank's shard has no rows; ``parts.1`` has a sibling and no use."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.scale = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.parts[0](x)) * self.scale(x)


class Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS)
        self.experts = nn.ModuleList(Expert() for _ in range(EXPERTS))
        self.gain = nn.Linear(WIDTH, WIDTH)
        self.unused = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, is_large: bool) -> Tensor:
        share, chosen = self.router(x).softmax(-1).max(-1)
        output = self.gain(x) if is_large else x
        for number, expert in enumerate(self.experts):
            rows = (chosen == number).nonzero()[:, 0]
            if len(rows):
                given = expert(x[rows]) * share[rows, None]
                output = output.index_add(0, rows, given.to(output.dtype))
        return x + output


class Routed(LightningModule):
    """Behind the first step, only large batches use ``gain``, which has no siblings."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.blocks = nn.ModuleList(Mixture() for _ in range(3))
        self.head = nn.Linear(WIDTH, 2)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        is_large = self.global_step == 0 or bool(batch.norm() > 5)
        for block in self.blocks:
            batch = block(batch, is_large)
        return self.head(batch).square().mean()

    def configure_optimizers(self) -> Any:
        # A gradient of zeros and none at all differ, by weight decay and momentum.
        if self.kind == "Muon":
            matrices = [each for each in self.parameters() if each.ndim == 2]
            return torch.optim.Muon(matrices, lr=0.05, weight_decay=0.3)
        return torch.optim.AdamW(self.parameters(), lr=0.05, weight_decay=0.3, eps=1e-4)


Values = dict[str, Tensor]


def train(
    rank: int,
    world_size: int,
    micro_batches: int,
    options: dict[str, Any],
    kind: str,
    precision: Any,
) -> tuple[Values, int]:
    seed_everything(1, verbose=False)
    generator = torch.Generator().manual_seed(3)
    batches = [torch.randn(ROWS, WIDTH, generator=generator) for _ in range(BATCHES)]
    module = Routed(kind)
    Trainer(
        accelerator="cpu", devices=world_size, max_epochs=1, logger=False,
        strategy=ZeROStrategy(telemetry=False, **options) if options else "auto",
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        use_distributed_sampler=False, accumulate_grad_batches=micro_batches, precision=precision,
    ).fit(module, DataLoader(batches[rank::world_size], batch_size=None))  # type: ignore[arg-type]  # fmt: skip
    optimizer = module.optimizers()
    assert isinstance(optimizer, torch.optim.Optimizer)
    with gathered_parameters(module) as whole:
        return {name: each.detach().clone() for name, each in whole.items()}, len(optimizer.state)


@pytest.mark.sample("3", "1, accumulating in bf16")
@pytest.mark.parametrize(
    ("ranks", "micro_batches", "options", "kind", "precision"),
    [
        pytest.param(2, 1, {"stage": 1}, "AdamW", "32-true", id="1"),
        pytest.param(2, 1, {"stage": 2}, "AdamW", "32-true", id="2"),
        pytest.param(2, 1, {"stage": 3}, "AdamW", "32-true", id="3"),
        pytest.param(2, 1, {"stage": 2}, "Muon", "32-true", id="2, whole matrices"),
        pytest.param(2, 2, {"stage": 2}, "AdamW", "32-true", id="2, accumulating"),
        pytest.param(2, 2, {"stage": 1}, "AdamW", "bf16-mixed", id="1, accumulating in bf16"),
        pytest.param(2, 2, {"stage": 3}, "AdamW", "32-true", id="3, accumulating"),
        pytest.param(4, 1, {"stage": 3, "shard_size": 2}, "AdamW", "32-true", id="replicated"),
        pytest.param(
            4, 2, {"stage": 3, "shard_size": 2}, "AdamW", "32-true", id="replicated, accumulating"
        ),
    ],
)
def test_experts_without_rows_on_some_ranks_train_as_in_one_process(
    ranks: int, micro_batches: int, options: dict[str, Any], kind: str, precision: str
) -> None:
    ((one, num_states),) = run_ranks(train, 1, ranks * micro_batches, {}, kind, precision)
    tolerance = 1e-6 if precision == "32-true" else 3e-2
    for found, count in run_ranks(train, ranks, micro_batches, options, kind, precision):
        if kind == "AdamW":  # of Muon a rank steps the matrices that it owns
            assert count == num_states  # none of what no step uses
        for name, value in one.items():
            torch.testing.assert_close(found[name], value, rtol=1e-5, atol=tolerance, msg=name)


class Turns(LightningModule):
    """Runs each block twice in reentrant checkpoints; odd batches use ``right`` in one turn."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2)
        self.blocks = nn.ModuleList(Branches() for _ in range(2))

    def training_step(self, batch: tuple[Tensor, int], batch_idx: int) -> Tensor:
        x = self.first(batch[0])
        for turn in range(2):
            for block in self.blocks:
                x = checkpoint(block, x, batch[1] > turn, use_reentrant=True)
        loss: Tensor = self.head(x).square().mean()
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, x: Tensor, goes_right: bool) -> Tensor:
        x = x + torch.tanh(self.experts[0](x))
        return x + torch.tanh(self.experts[1](x)) if goes_right else x


def train_in_turns(rank: int, world_size: int, stage: int) -> Values:
    seed_everything(1, verbose=False)
    generator = torch.Generator().manual_seed(3)
    batches = [(torch.randn(ROWS, WIDTH, generator=generator), number % 2) for number in range(8)]
    module = Turns()
    Trainer(
        accelerator="cpu", devices=world_size, max_epochs=1, logger=False,
        strategy=ZeROStrategy(telemetry=False, stage=stage) if stage else "auto",
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        use_distributed_sampler=False, accumulate_grad_batches=2 // world_size,
    ).fit(module, DataLoader(batches[rank::world_size], batch_size=None))  # type: ignore[arg-type]  # fmt: skip
    with gathered_parameters(module) as whole:
        return {name: each.detach().clone() for name, each in whole.items()}


@pytest.mark.sample("3")
@pytest.mark.parametrize("stage", [1, 3])
def test_blocks_that_reentrant_checkpoints_run_again_twice_in_a_step(stage: int) -> None:
    (one,) = run_ranks(train_in_turns, 1, 0)
    for found in run_ranks(train_in_turns, 2, stage):
        for name, value in one.items():
            torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6, msg=name)


@pytest.mark.full
def test_with_offload_they_end_the_run_with_both_calls_named() -> None:
    options = {"stage": 2, "offload_optimizer": "cpu"}
    with pytest.raises(RankFailure, match="Ranks issued different collectives: rank"):
        run_ranks(train, 2, 1, options, "AdamW", "32-true")
