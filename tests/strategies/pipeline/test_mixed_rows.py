"""Layers that mix the rows of a batch are refused where microbatches have some of them."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader

from boltmesh.errors import ConfigError
from boltmesh.strategies import Parallel3DStrategy
from boltmesh.strategies.pipeline.microbatch import MicrobatchSplitter, cut
from boltmesh.strategies.pipeline.microbatch_runs import MicrobatchRun
from boltmesh.strategies.pipeline.row_check import RowCheck
from boltmesh.strategies.pipeline.stage.plan_cache import StagePlans
from boltmesh.strategies.pipeline.stage.units import find_stage_units
from tests.support import pipeline_models as models
from tests.support.ranks import RankFailure, run_ranks
from tests.support.staged import split_evenly


class Centred(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y - y.mean(0).detach()


class Flat(nn.Linear):
    """Mixes no rows, but has them in other places than the first dimension."""

    def forward(self, x: Tensor) -> Tensor:
        flat = x.unsqueeze(1).expand(-1, 3, -1).flatten(0, 1)
        return super().forward(flat).unflatten(0, (-1, 3)).mean(1)


class TwoViews(nn.Linear):
    """Mixes no rows, but gives two views of the batch, one behind the other."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(torch.cat((x, 2 * x)))


class SetFromRows(nn.Linear):
    """Sets its bias from the first rows that it sees, as an ActNorm does."""

    is_set: Tensor

    def __init__(self) -> None:
        super().__init__(8, 8)
        self.register_buffer("is_set", torch.tensor(False))

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        if self.training and not self.is_set:
            self.bias.data.copy_(-y.mean(0).detach())
            self.is_set.fill_(True)
        return super().forward(x)


class Unit(nn.Linear):
    """Keeps its rows of length one, whatever it is given."""

    def forward(self, x: Tensor) -> Tensor:
        self.weight.data = nn.functional.normalize(self.weight.data)
        return super().forward(x)


class Contrast(nn.Linear):
    """A projection and the loss of all pairs of rows in one, as heads of MoCo v3 are written."""

    def forward(self, x: Tensor) -> Tensor:
        y = nn.functional.normalize(super().forward(x), dim=-1)
        return nn.functional.cross_entropy(5 * y @ y.T, torch.arange(len(y)))


class Classify(nn.Linear):
    """A head and its loss in one: a mean over the rows that have a label."""

    def forward(self, x: Tensor) -> Tensor:
        labels = x[:, 0].mul(4).long().clamp(-1, 7)
        y = nn.functional.dropout(super().forward(x), 0.3)
        return nn.functional.cross_entropy(y, labels, ignore_index=-1)


class Perplexity(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        shares = super().forward(x).softmax(-1).mean(0)
        return torch.exp(-(shares * shares.log()).sum())


KINDS: dict[str, Callable[[], list[nn.Module]]] = {
    "first": lambda: [Centred(8, 8), nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)],
    "last": lambda: [nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8), Centred(8, 8)],
    "pairs": lambda: [nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8), Contrast(8, 8)],
    "labels": lambda: [nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8), Classify(8, 8)],
    "set": lambda: [nn.Linear(8, 8), SetFromRows(), nn.Linear(8, 8), nn.Linear(8, 8)],
    "units": lambda: [Unit(8, 8), nn.Linear(8, 8), nn.Linear(8, 8), Unit(8, 8)],
    "norms": lambda: [nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8), nn.BatchNorm1d(8)],
    "views": lambda: [TwoViews(8, 8), nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)],
    "rows": lambda: [Flat(8, 8), nn.Linear(8, 8), nn.GRUCell(8, 8), Flat(8, 8)],
}
MIXED = {
    "first": "the output of 'layers.0'",
    "last": "the output of 'layers.3'",
    "pairs": "the output of 'layers.3'",
    "set": "what a layer writes to 'layers.1.bias'",
}


class Layers(LightningModule):
    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.ModuleList(KINDS[kind]())

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        x = batch
        for layer in self.layers:
            x = nn.functional.dropout(layer(x), 0.2)
        return x.square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05)


class Monitored(Layers):
    """Logs the perplexity of a layer, which no mean over microbatches gives, before its loss."""

    def __init__(self) -> None:
        super().__init__("pairs")
        self.perplexity = Perplexity(8, 8)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        x = self.layers[2](self.layers[1](self.layers[0](batch)))
        self.log("perplexity", self.perplexity(x))
        loss: Tensor = self.layers[3](x)
        return loss


def look(module: LightningModule, batch: Any, sizes: list[int]) -> None:
    """Let two stages see their first microbatches, in one process."""
    units = find_stage_units(module)
    plans = StagePlans(module, units, split_evenly(module, "training_step", (batch, 0), 2))
    rows = MicrobatchSplitter().rows(batch)
    parts = cut(batch, rows, sizes)
    run = MicrobatchRun("training_step", batch, parts, (0,), {}, list(range(len(parts))), sizes)
    check = RowCheck(plans, run, rows)
    for number, part in enumerate(parts[:2]):
        check.see(0, number, (), nullcontext)
        sent = plans.stages("training_step", part, 0)[0].forward((), (part, 0), seed=number)
        check.see(1, number, sent, nullcontext)


SIZES = [[2, 2, 2, 2], [3, 3, 2], [1] * 8]
"""Of microbatches. Of single rows the first has set what is set once, before two are seen."""


@pytest.mark.parametrize(
    ("kind", "sizes"),
    [(kind, each) for kind in MIXED for each in SIZES if kind != "set" or each[0] > 1],
)
def test_a_layer_that_mixes_rows_is_named(kind: str, sizes: list[int]) -> None:
    with pytest.raises(ConfigError, match=f"{MIXED[kind]} depends on other rows"):
        look(Layers(kind), torch.randn(8, 8), sizes)


def test_a_scalar_that_is_logged_hides_no_other() -> None:
    with pytest.raises(ConfigError, match=r"the output of 'layers\.3' depends on other rows"):
        look(Monitored(), torch.randn(8, 8), [4, 4])


@pytest.mark.parametrize("kind", ["norms", "rows", "views", "units", "labels"])
def test_others_and_batch_norms_are_not_refused(kind: str) -> None:
    module = Layers(kind)
    look(module, torch.randn(8, 8), [4, 4])
    assert all(each.training for each in module.modules())


@pytest.mark.parametrize(
    "kind", [models.Words, models.Streams, models.DataclassState, models.Extra, models.UNet]
)
def test_models_whose_rows_are_apart_are_not_refused(kind: Any) -> None:
    tokens = torch.arange(36).reshape(6, 6) % models.WORDS
    look(kind(), torch.randn(6, 1, 8, 8) if kind is models.UNet else tokens, [3, 3])


def train(rank: int, world_size: int, kind: str) -> None:
    rows = torch.randn(16, 8, generator=torch.Generator().manual_seed(1))
    Trainer(
        accelerator="cpu", devices=world_size, max_steps=2, logger=False,
        strategy=Parallel3DStrategy(pipeline=2, tensor=2, microbatches=4, telemetry=False),
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    ).fit(Layers(kind), DataLoader(rows, 8))  # type: ignore[arg-type]  # fmt: skip


@pytest.mark.full
@pytest.mark.ranks
def test_all_ranks_of_a_run_end_with_the_name_of_the_layer() -> None:
    with pytest.raises(RankFailure, match=r"output of .layers\.3. depends on other rows"):
        run_ranks(train, 4, "last")
