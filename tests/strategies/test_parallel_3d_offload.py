"""Pipelines with their optimizer on the host or a disk: memory, overflows, faults, more fits."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from boltmesh.strategies import Parallel3DStrategy, gathered_parameters
from boltmesh.strategies.offload.disk import swap_file
from boltmesh.telemetry.reader.reader import open_job
from boltmesh.telemetry.writer import memory
from tests.support.faulty_disk import EIO, FaultyCalls, failing
from tests.support.pipelines import quiet_trainer
from tests.support.ranks import RankFailure, run_ranks
from tests.support.stack import Stack, token_data
from tests.support.turns import in_turn

Options = dict[str, Any]

CPU: Options = {"offload_optimizer": "cpu"}


def strategy_of(**options: Any) -> Parallel3DStrategy:
    settings = {"telemetry": False, "microbatches": 2, "timeout_s": 60, **options}
    return Parallel3DStrategy(pipeline=2, **settings)


# Memory.

WIDTH = 192
SHARD = 4 * 2 * (2 * 4 * WIDTH * WIDTH + 5 * WIDTH) // 2
"""Bytes of one tensor of all parameters of two layers on one of two data ranks."""
PAGE = 4096 * 8
"""What the blocks of a file round up to, all of them together."""


class Layers(LightningModule):
    """Large enough for its shards to be worth offloading, and nothing else."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
            for _ in range(4)
        )

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        (x,) = batch
        for layer in self.layers:
            x = x + layer(x)
        return x.square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def held(rank: int, world_size: int, options: Options) -> dict[tuple[str, str], Any]:
    """Train; return what is measured and what was predicted, by kind of memory and place."""
    vars(memory)["MEMORY_EVERY_NS"] = vars(memory)["WALK_EVERY_NS"] = 0
    strategy = strategy_of(**{**options, "telemetry": True})
    trainer = quiet_trainer(world_size, strategy, max_steps=5)
    trainer.fit(Layers(), DataLoader(TensorDataset(torch.randn(40, WIDTH)), batch_size=4))
    with open_job() as job:
        found = job.snapshot().ranks[rank]
    return {
        (each.kind, each.place): (each.measured_bytes, each.predicted_bytes)
        for each in found.memory_kinds
    }


@pytest.mark.full
@pytest.mark.ranks
def test_each_stage_measures_its_share_where_it_is_predicted(tmp_path: Path) -> None:
    nvme = {"offload_optimizer": "nvme", "offload_path": str(tmp_path)}
    away = {"zero_stage": 3, **nvme, "offload_parameters": "nvme", "offload_fraction": 0.5}
    for on_host, on_disk in run_ranks(in_turn, 4, held, [(CPU,), (away,)]):
        measured, predicted = on_host["optimizer", "host"]
        assert predicted == 3 * SHARD
        assert 3 * SHARD <= measured <= 3 * SHARD + 2**21  # one page of 2 MiB at most
        measured, predicted = on_host["parameters", "host"]
        assert predicted == SHARD <= measured <= SHARD + 8 * 4  # and what stands for each shard
        measured, predicted = on_disk["optimizer", "disk"]
        assert SHARD <= predicted <= measured <= 2 * SHARD + PAGE
        measured, predicted = on_disk["parameters", "disk"]
        assert 0.99 * SHARD <= predicted <= measured <= SHARD + PAGE


# Several runs, and what is refused.


def again(rank: int, world_size: int, options: Options) -> list[float]:
    """Evaluate, train, look and train on with the same Trainer; return losses and a sum."""
    seed_everything(1, verbose=False)
    module = Stack(depth=4, ties=True)
    strategy = strategy_of(**options) if world_size > 1 else "auto"
    size = 8 if world_size == 1 else 4
    trainer = quiet_trainer(world_size, strategy, gradient_clip_val=0.5)
    data, found = token_data(24, 8), []
    for epochs in (1, 2):
        trainer.fit_loop.max_epochs = epochs
        trainer.fit(module, dealt(data, trainer))
        (metrics,) = trainer.validate(module, token_data(16, size), verbose=False)
        found.append(metrics["val_loss"])
        with gathered_parameters(module, writes=True) as whole:
            weight = whole["head.weight"]
            found.append(weight.detach().abs().sum().item())
            weight.data[0] = weight.data.mean(0)
    return found


def dealt(loader: DataLoader[Any], trainer: Trainer) -> DataLoader[Any]:
    """Every second row for each of two replicas, in the batches of one process."""
    strategy: Any = trainer.strategy
    if trainer.world_size == 1:
        return loader
    replica, rows = trainer.global_rank % 2, range(len(loader.dataset))  # type: ignore[arg-type]
    assert strategy.num_processes == 4
    batches = [list(rows[at : at + 8])[replica::2] for at in range(0, len(rows), 8)]
    return DataLoader(loader.dataset, batch_sampler=batches)


@pytest.mark.full
@pytest.mark.ranks
def test_one_trainer_trains_and_evaluates_and_trains_on(tmp_path: Path) -> None:
    nvme = {"offload_optimizer": "nvme", "offload_path": str(tmp_path)}
    away = {"zero_stage": 3, **nvme, "offload_parameters": "nvme"}
    (alone,) = run_ranks(again, 1, {})
    for runs in run_ranks(in_turn, 4, again, [(CPU,), (away,)]):
        for found in runs:
            assert found == pytest.approx(alone, rel=1e-5)


def train_scalar(rank: int, world_size: int) -> dict[str, Tensor]:
    """Train a model with a parameter of no rows in one process, or in a pipeline of two ranks."""
    seed_everything(1, verbose=False)
    module = Stack(depth=4, has_scalar=True)
    strategy = strategy_of(**CPU) if world_size > 1 else "auto"
    trainer = quiet_trainer(world_size, strategy, gradient_clip_val=0.5, max_steps=3)
    trainer.fit(module, token_data(24, 8))
    with gathered_parameters(module) as whole:
        return {name: each.detach().clone() for name, each in whole.items()}


@pytest.mark.full
@pytest.mark.ranks
def test_a_scalar_is_stepped_on_the_host_as_in_one_process() -> None:
    (alone,) = run_ranks(train_scalar, 1)
    for found in run_ranks(train_scalar, 2):
        torch.testing.assert_close(found, alone, rtol=1e-5, atol=1e-6)


# What one rank alone meets.


class Overflows(Callback):
    """Makes one gradient infinite on the last rank alone."""

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.global_step == 1 and trainer.global_rank == trainer.world_size - 1:
            gradients = [each.grad for each in pl_module.parameters() if each.grad is not None]
            gradients[0].to_local().fill_(float("inf"))  # type: ignore[attr-defined]


def overflow(rank: int, world_size: int) -> tuple[float, bool, int]:
    scaler = torch.amp.GradScaler("cpu", init_scale=128.0)
    plugin = MixedPrecision("16-mixed", device="cpu", scaler=scaler)
    seed_everything(1, verbose=False)
    module = Stack(depth=4)
    trainer = quiet_trainer(
        world_size, strategy_of(**CPU), max_epochs=-1, max_steps=3, plugins=[plugin],
        gradient_clip_val=1.0, callbacks=[Overflows()],
    )  # fmt: skip
    trainer.fit(module, token_data(64, 4))
    with gathered_parameters(module) as whole:
        is_finite = all(bool(each.isfinite().all()) for each in whole.values())
    states = trainer.optimizers[0].state.values()
    return scaler.get_scale(), is_finite, max(int(each["step"]) for each in states)


@pytest.mark.full
@pytest.mark.ranks
def test_an_overflow_of_one_stage_is_one_for_all() -> None:
    for found in run_ranks(overflow, 4):
        assert found == (64.0, True, 2)


class Breaks(Callback):
    """Lets the disk of one rank fail from a step on."""

    reads_gradients = False

    def __init__(self, rank: int, calls: FaultyCalls) -> None:
        self.rank, self.calls = rank, calls

    def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
        if trainer.global_rank == self.rank and trainer.global_step == 2:
            self.calls.before_write = failing(EIO)


def break_disk(rank: int, world_size: int, folder: str, data: int) -> None:
    calls = FaultyCalls()
    vars(swap_file)["FileCalls"] = lambda: calls
    seed_everything(1, verbose=False)
    strategy = strategy_of(data=data, offload_optimizer="nvme", offload_path=folder)
    breaks = Breaks(world_size - 1, calls)
    trainer = quiet_trainer(world_size, strategy, callbacks=[breaks], gradient_clip_val=1.0)
    trainer.fit(Layers(), DataLoader(TensorDataset(torch.randn(80, WIDTH)), batch_size=4))


@pytest.mark.full
@pytest.mark.ranks
@pytest.mark.parametrize("data", [1, 2])
def test_a_disk_that_fails_ends_all_ranks_with_its_cause(data: int, tmp_path: Path) -> None:
    with pytest.raises(RankFailure) as caught:
        run_ranks(break_disk, 2 * data, str(tmp_path), data, grace_s=20)
    told = re.split(r"^rank \d: ", str(caught.value), flags=re.MULTILINE)[1:]
    assert len(told) == 2 * data
    for each in told:
        assert f"rank {2 * data - 1} could not write chunk" in each
        assert "(EIO)" in each
