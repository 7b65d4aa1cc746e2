"""Steps of published modules that a pipeline has to look at without data, as in one process."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.distributions import Categorical, Normal, kl_divergence
from torch.nn import functional
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils.data import DataLoader

from boltmesh.strategies.pipeline_parallel import PipelineParallelStrategy
from tests.support.ranks import RankFailure, run_ranks

MICROBATCHES, STEPS = 4, 2


class Trains(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05)


class Latent(Trains):
    """Makes distributions of what layers give, whose arguments torch checks."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder, self.choice = nn.Linear(8, 8), nn.Linear(4, 8), nn.Linear(8, 3)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        mean, scale = self.encoder(batch).chunk(2, -1)
        latent = Normal(mean, functional.softplus(scale) + 1e-3)
        prior = Normal(torch.zeros_like(mean), torch.ones_like(mean))
        decoded = self.decoder(latent.mean)
        chosen = Categorical(logits=self.choice(decoded))
        return (
            functional.mse_loss(decoded, batch)
            + 0.1 * kl_divergence(latent, prior).sum(-1).mean()
            - chosen.log_prob(batch.argmax(-1) % 3).mean()
            - Normal(decoded, 1.0).log_prob(batch).mean()
        )


class Pooled(Trains):
    """Has norms of maps of one pixel, which have no moments of one row."""

    def __init__(self, affine: bool = True) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(1, 6, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1))
        self.mix, self.norm = nn.Conv2d(6, 6, 1), nn.BatchNorm2d(6, affine=affine)
        self.head = nn.Sequential(nn.ReLU(), nn.Flatten(), nn.Linear(6, 3))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        maps = self.body(batch.view(-1, 1, 2, 4))
        loss: Tensor = self.head(self.norm(self.mix(maps))).square().mean()
        return loss


class Experts(nn.Module):
    """Gives each row to one of four experts, by a product of groups as Mixtral takes it."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(8, 4)
        self.weight = nn.Parameter(torch.randn(4, 8, 8) / 3)

    def forward(self, x: Tensor) -> Tensor:
        score, expert = self.router(x).softmax(-1).max(-1)
        order = expert.argsort()
        ends = (expert[:, None] == torch.arange(4)).sum(0).cumsum(0).to(torch.int32)
        product: Any = getattr(functional, "grouped_mm", None) or torch._grouped_mm
        made: Tensor = product(x[order], self.weight, offs=ends)
        return x + score[:, None] * torch.zeros_like(x).index_copy(0, order, made)


class Mixture(Trains):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Experts() for _ in range(2))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        for each in self.layers:
            batch = each(batch)
        return batch.square().mean()


class Reader(nn.Module):
    """Packs what comes of a layer by lengths of the batch, which differ from one to the next."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.LSTM(6, 5, batch_first=True, bidirectional=True)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        packed = pack_padded_sequence(x, lengths.cpu(), batch_first=True, enforce_sorted=False)
        made: Tensor = pad_packed_sequence(self.rnn(packed)[0], True, total_length=x.shape[1])[0]
        return made


class Sequences(Trains):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(2, 6), nn.Linear(10, 3)
        self.reader: nn.Module = Reader()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        steps = batch.view(-1, 4, 2)
        lengths = (steps.sum(-1) > 0).sum(1).clamp(min=1)
        read: Tensor = self.head(self.reader(self.embed(steps), lengths))
        return read.square().mean()


class Packed(Sequences):
    """Packs between layers."""

    def __init__(self) -> None:
        super().__init__()
        self.reader = nn.LSTM(6, 5, batch_first=True, bidirectional=True)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        steps = batch.view(-1, 4, 2)
        lengths = (steps.sum(-1) > 0).sum(1).clamp(min=1)
        packed = pack_padded_sequence(self.embed(steps), lengths, True, enforce_sorted=False)
        made = pad_packed_sequence(self.reader(packed)[0], True, total_length=4)[0]
        read: Tensor = self.head(made)
        return read.square().mean()


def fixed() -> LightningModule:
    return Pooled(affine=False)


CASES: list[tuple[Callable[[], LightningModule], int, int]] = [
    (Latent, 4, MICROBATCHES),
    (Pooled, 4, MICROBATCHES // 2),  # microbatches of two rows
    (fixed, 4, MICROBATCHES // 2),
    (Mixture, 16, MICROBATCHES),
    (Sequences, 8, MICROBATCHES),
]
"""Models with their rows and how many microbatches these are cut into."""


def train(rank: int, world_size: int) -> list[dict[str, Tensor]]:
    """Return the parameters and buffers of each model that this rank holds."""
    found = []
    for build, rows, parts in CASES:
        data = torch.randn(STEPS * rows, 8, generator=torch.Generator().manual_seed(1))
        is_one = world_size == 1
        strategy: Any = "auto"
        if not is_one:
            strategy = PipelineParallelStrategy(telemetry=False, microbatches=MICROBATCHES)
        trainer = Trainer(
            accelerator="cpu", devices=world_size, strategy=strategy, max_steps=STEPS,
            accumulate_grad_batches=parts if is_one else 1, logger=False,
            enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        )  # fmt: skip
        model = build()
        loader: Any = DataLoader(data, rows // parts if is_one else rows)  # type: ignore[arg-type]
        trainer.fit(model, loader)
        stores = (lambda name: True) if is_one else strategy.checkpoints.stores
        named = [*model.named_parameters(), *model.named_buffers()]
        found.append({k: v.detach().clone() for k, v in named if stores(k)})
    return found


@pytest.mark.full
@pytest.mark.ranks
def test_published_steps_equal_those_of_one_process() -> None:
    (alone,) = run_ranks(train, 1)
    for found in run_ranks(train, 2):
        for tensors, expected in zip(found, alone, strict=True):
            assert tensors
            own = {name: expected[name] for name in tensors}
            torch.testing.assert_close(tensors, own, rtol=1e-5, atol=1e-6)


def train_packed(rank: int, world_size: int) -> None:
    trainer = Trainer(
        accelerator="cpu", devices=world_size, max_steps=1, logger=False,
        strategy=PipelineParallelStrategy(telemetry=False, microbatches=2),
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(Packed(), DataLoader(torch.ones(4, 8), 4))  # type: ignore[arg-type]


@pytest.mark.full
@pytest.mark.ranks
def test_packing_between_layers_is_refused() -> None:
    with pytest.raises(RankFailure, match=r"_pack_padded_sequence .* Do it inside a layer"):
        run_ranks(train_packed, 2)
