"""Units are timed on values, and nothing of the model has changed afterwards."""

import random
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from boltmesh.errors import ConfigError
from boltmesh.strategies.deferred_initialization.deferred import deferred_init
from boltmesh.strategies.pipeline.partition.choose import measure_units
from boltmesh.strategies.pipeline.partition.materialize import DeferredModel
from boltmesh.strategies.pipeline.stage.units import find_stage_units, is_absent
from boltmesh.strategies.pipeline_parallel import PipelineParallelStrategy
from tests.support.held import held_bytes
from tests.support.ranks import run_ranks
from tests.support.shard_runs import QUIET

WIDTH = 160
CPU = torch.device("cpu")


class Block(nn.Module):
    """Runs its layers so many times: the same parameters, other times."""

    def __init__(self, times: int) -> None:
        super().__init__()
        self.times = times
        self.act, self.norm = nn.ReLU(inplace=True), nn.BatchNorm1d(WIDTH)
        self.inner, self.drop = nn.Linear(WIDTH, WIDTH), nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.act(x)
        for _ in range(self.times):
            x = x + self.inner(x)
        return self.drop(self.norm(x))


class Net(LightningModule):
    def __init__(self, times: tuple[int, ...]) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block(each) for each in times)
        self.steps = 0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.steps += 1
        x = self.first(batch[0])
        for block in self.blocks:
            x = block(x)
        self.log("loss", x.mean())
        return x.square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


BATCH = [torch.randn(256, WIDTH, generator=torch.Generator().manual_seed(1))]


def measured(module: Net) -> dict[str, float]:
    unmade = DeferredModel(module)
    units = find_stage_units(module)
    return measure_units(
        module, units, "training_step", (BATCH, 0), seed=1, device=CPU, unmade=unmade
    )


def test_times_are_those_of_the_work_that_is_done() -> None:
    module = Net((1, 40, 1, 1))
    seconds = measured(module)
    assert list(seconds) == ["first", "blocks.0", "blocks.1", "blocks.2", "blocks.3"]
    assert seconds["blocks.1"] > 4 * seconds["first"]


def test_nothing_has_changed_afterwards() -> None:
    module = Net((1, 2))
    before = {name: each.clone() for name, each in module.state_dict().items()}
    states = torch.get_rng_state(), random.getstate(), np.random.get_state(legacy=False)
    measured(module)
    changed = [
        name for name, each in module.state_dict().items() if not torch.equal(before[name], each)
    ]
    assert changed == []
    assert all(each.grad is None for each in module.parameters())
    assert module.steps == 0
    assert "log" not in vars(module)
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]
    assert str(np.random.get_state(legacy=False)) == str(states[2])


@pytest.mark.parametrize("kind", ["deferred", "meta"])
def test_a_model_that_does_not_exist_is_timed_unit_by_unit(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kind == "deferred":
        with deferred_init(min_bytes=4096):
            module = Net((1, 1, 1))
    else:
        with torch.device("meta"):
            module = Net((1, 1, 1))
    most: list[int] = []
    forward = Block.forward

    def watched(self: Block, x: Tensor) -> Tensor:
        most.append(held_bytes(module.parameters()))
        return forward(self, x)

    monkeypatch.setattr(Block, "forward", watched)
    assert min(measured(module).values()) > 0
    assert len(most) == 3 * 7
    one = sum(each.nbytes for each in module.blocks[0].parameters())
    assert one <= max(most) < one + 10_000  # and vectors too small to be deferred
    assert all(is_absent(each) or each.numel() <= WIDTH for each in module.parameters())


def test_a_step_that_fails_says_what_to_do() -> None:
    module = Net((1, 1))
    module.blocks[1].inner = nn.Linear(3, 3)
    with pytest.raises(ConfigError, match=r"runs training_step once .* split='auto'"):
        measured(module)


def stages(rank: int, world_size: int, split: Any) -> list[list[str]]:
    seed_everything(1, verbose=False)
    strategy = PipelineParallelStrategy(telemetry=False, microbatches=2, split=split)
    trainer = Trainer(
        accelerator="cpu", devices=world_size, strategy=strategy, max_steps=1, **QUIET
    )
    data = TensorDataset(torch.randn(64, WIDTH))
    trainer.fit(Net((1, 1, 60, 1, 1, 1)), DataLoader(data, batch_size=64))
    placement = strategy.pipeline_axis.staged.placement
    assert placement is not None
    return [[each.name for each in stage] for stage in placement.division.stages]


@pytest.mark.ranks
def test_all_ranks_cut_by_what_the_first_has_measured() -> None:
    one, other = run_ranks(stages, 2, "measured")
    assert one == other
    assert "blocks.2" in one[0] or one[1][0] == "blocks.2"


@pytest.mark.full
@pytest.mark.ranks
def test_memory_that_no_cut_keeps_within_is_refused_on_all_ranks() -> None:
    for said in run_ranks(refused, 2):
        assert "No cut into 2 stages" in said


def refused(rank: int, world_size: int) -> str:
    strategy = PipelineParallelStrategy(telemetry=False, microbatches=2, max_memory_bytes=10**6)
    trainer = Trainer(
        accelerator="cpu", devices=world_size, strategy=strategy, max_steps=1, **QUIET
    )
    data = TensorDataset(torch.randn(64, WIDTH))
    with pytest.raises(ConfigError) as caught:
        trainer.fit(Net((1, 1, 1, 1)), DataLoader(data, batch_size=64))
    return str(caught.value)
