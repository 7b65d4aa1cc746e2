"""DDP on 2 and 4 ranks computes what one process computes."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from torch import Tensor
from torch.utils.data import DataLoader, Subset, TensorDataset

from boltmesh.check.differences import Trace
from boltmesh.check.parity import trace_layout
from boltmesh.strategies import DDPStrategy, ZeROStrategy
from tests.support.cases import SGD, differences, reference
from tests.support.cases import Case as AnyCase
from tests.support.models import Regression, TwoOptimizers, regression_data
from tests.support.ranks import reuse_ranks as run_ranks
from tests.support.shard_runs import QUIET, whole_parameters

pytestmark = pytest.mark.ranks


@dataclass(frozen=True)
class Case(AnyCase):
    module: type[LightningModule] = Regression


UNUSED = {"find_unused_parameters": True}
CASES = [
    Case("plain"),
    Case("plain, 4 ranks", ranks=4),
    Case("sgd with momentum, 4 ranks", ranks=4, model=SGD),
    Case("odd sizes", count=37, batch_size=5),
    Case("odd sizes, 4 ranks", count=43, batch_size=3, ranks=4, model=SGD),
    Case("accumulation", accumulate=3),
    Case("accumulation over an odd epoch, 4 ranks", accumulate=2, count=45, ranks=4, model=SGD),
    Case("scheduled accumulation", accumulate={0: 1, 1: 2, 2: 3}, count=16, steps=6),
    Case("clipping by norm", trainer={"gradient_clip_val": 0.05}),
    Case("clipping by norm, accumulation, 4 ranks", ranks=4, accumulate=2,
         trainer={"gradient_clip_val": 0.05}),
    Case("clipping by value", model=SGD,
         trainer={"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}),
    Case("bf16-mixed", trainer={"precision": "bf16-mixed"}),
    Case("bf16-mixed, accumulation, clipping", accumulate=2,
         trainer={"precision": "bf16-mixed", "gradient_clip_val": 0.05}),
    Case("bf16-true", model=SGD, trainer={"precision": "bf16-true"}),
    Case("64 bits", trainer={"precision": "64-true"}, accumulate=2, ranks=4),
    Case("several buckets", strategy={"bucket_cap_mb": 0.0001}, model={"width": 64}),
    Case("a static graph", strategy={"static_graph": True}, accumulate=2),
    Case("unused parameters", model={"leaves_out_on_odd_steps": True, **SGD},
         strategy=UNUSED),
    Case("a frozen layer", model={"has_frozen_layer": True}, ranks=4),
    Case("several optimizers", module=TwoOptimizers, strategy=UNUSED),
    Case("several optimizers, 4 ranks", module=TwoOptimizers, ranks=4, strategy=UNUSED),
]  # fmt: skip


def layout(rank: int, world_size: int, case: Case) -> Trace:
    strategy = DDPStrategy(telemetry=False, **case.strategy)
    return trace_layout(case.problem(), strategy, devices=world_size)


@pytest.mark.sample("clipping by norm, accumulation, 4 ranks", "several optimizers")
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_ddp_equals_one_process(case: Case) -> None:
    wanted = reference(case)
    traces = run_ranks(layout, case.ranks, case)
    assert differences(wanted, range(case.ranks), traces, case.tolerance) == {}


class Quasi(Regression):
    """Several passes a step, by products of whole gradients."""

    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=3)


def train_by_lbfgs(rank: int, world_size: int) -> list[torch.Tensor]:
    seed_everything(1, verbose=False)
    module, data = Quasi(), regression_data(16, 4).dataset
    trainer = Trainer(
        accelerator="cpu", devices=world_size, strategy=DDPStrategy(telemetry=False), max_steps=4,
        use_distributed_sampler=False, **QUIET,
    )  # fmt: skip
    share = Subset(data, range(rank, 16, world_size))
    trainer.fit(module, DataLoader(share, batch_size=4 // world_size))
    return [each.detach() for each in module.parameters()]


@pytest.mark.full
def test_lbfgs_equals_one_process() -> None:
    (expected,) = run_ranks(train_by_lbfgs, 1)
    for found in run_ranks(train_by_lbfgs, 2):
        for mine, other in zip(found, expected, strict=True):
            torch.testing.assert_close(mine, other, rtol=0, atol=1e-5)


class Monitored(Regression):
    """Its scheduler monitors a loss that is logged without ``sync_dist``."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
        return [optimizer], [{"scheduler": scheduler, "monitor": "val_local"}]


def train_monitored(rank: int, world_size: int, name: str) -> tuple[float, dict[str, Tensor]]:
    seed_everything(1, verbose=False)
    strategy: Any = {
        "one process": "auto",
        "ddp": DDPStrategy(telemetry=False),
        "zero": ZeROStrategy(stage=1, telemetry=False),
    }[name]
    module, data = Monitored(), regression_data(16, 4).dataset
    inputs, targets = data[:]
    signs = torch.tensor([1.0, -1.0]).repeat(8).unsqueeze(1)  # the loss of the second rank rises
    share = range(rank, 16, world_size)
    loaders: list[Any] = [
        DataLoader(Subset(TensorDataset(inputs, each), share), batch_size=8 // world_size)
        for each in (targets, signs * targets)
    ]
    trainer = Trainer(
        accelerator="cpu", devices=world_size, strategy=strategy, max_epochs=4,
        num_sanity_val_steps=0, use_distributed_sampler=False, **QUIET,
    )  # fmt: skip
    trainer.fit(module, *loaders)
    return trainer.optimizers[0].param_groups[0]["lr"], whole_parameters(module)


@pytest.mark.parametrize("name", ["ddp", "zero"])
def test_the_rate_follows_the_mean_of_a_loss_that_each_rank_has_for_itself(name: str) -> None:
    ((rate, expected),) = run_ranks(train_monitored, 1, "one process")
    assert rate < 0.1
    for its_rate, found in run_ranks(train_monitored, 2, name):
        assert its_rate == rate
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
