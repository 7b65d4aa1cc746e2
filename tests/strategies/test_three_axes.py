"""On 2 x 2 x 2 ranks: whole parameters in callbacks, one overflow for all, bytes of each axis."""

import itertools
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import (
    Callback,
    LightningDataModule,
    LightningModule,
    Trainer,
    seed_everything,
)
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

from boltmesh.axes import AXES, OPTIONAL
from boltmesh.strategies import Parallel3DStrategy, gathered_parameters
from boltmesh.telemetry.reader.reader import open_job
from tests.support.gpts import TinyGPT, text_data
from tests.support.planned_meshes import check_memory, measured, planned, said
from tests.support.ranks import run_ranks
from tests.support.recording_path import RecordingPath

# Of two axes at a time other tests keep this; three train in tests/parity/test_three_axes.py.
pytestmark = [pytest.mark.ranks, pytest.mark.slow(20), pytest.mark.full]

SIZE = 2
"""Of each axis."""
RANKS = SIZE**3
INTERLEAVED = {"schedule": "interleaved_1f1b"}
LAST = "blocks.3.up.weight"
"""Of the last stage, and divided over the tensor axis."""


def data(rank: int, replicas: int, *, steps: int) -> DataLoader[Any]:
    """Batches of 8, or a replica's share of each."""
    replica = rank // SIZE % replicas  # ranks of a tensor group stand side by side
    shares = [list(range(8 * at, 8 * at + 8))[replica::replicas] for at in range(steps)]
    return DataLoader(text_data(8 * steps, 8).dataset, batch_sampler=shares)


def strategy_of(world_size: int, **options: Any) -> Any:
    if world_size == 1:
        return "auto"
    settings = {"telemetry": False, "data": SIZE, "microbatches": 2, **options}
    return Parallel3DStrategy(pipeline=SIZE, tensor=SIZE, **settings)


def trainer_of(world_size: int, strategy: Any, **options: Any) -> Trainer:
    settings: dict[str, Any] = {
        "accelerator": "cpu", "devices": world_size, "max_steps": 4, "logger": False,
        "enable_checkpointing": False, "enable_progress_bar": False, "strategy": strategy,
        "enable_model_summary": False, "num_sanity_val_steps": 0, "use_distributed_sampler": False,
    }  # fmt: skip
    return Trainer(**{**settings, **options})


# Whole parameters.


class Access(Callback):
    """Looks at weights after each step and in an evaluation, and changes some after the second."""

    reads_gradients = False

    def __init__(self) -> None:
        self.seen: list[dict[str, Tensor]] = []

    def look(self, module: LightningModule) -> None:
        with gathered_parameters(module) as whole:
            assert module.head.weight is whole["head.weight"] is whole["tokens.weight"]
            self.seen.append({name: each.detach().clone() for name, each in whole.items()})

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        self.look(pl_module)
        if trainer.global_step == 2:
            names = ["tokens.weight", "head.weight", "blocks.0.first.*", "blocks.[13].*", "norm.*"]
            with gathered_parameters(pl_module, names, writes=True) as whole:
                for each in dict.fromkeys(whole.values()):
                    # The first rank's values count.
                    each.data.mul_(0.5 + (dist.get_rank() if dist.is_initialized() else 0))
            self.look(pl_module)

    def on_validation_batch_end(self, trainer: Any, pl_module: LightningModule, *_: Any) -> None:
        self.look(pl_module)


def look(rank: int, world_size: int, **options: Any) -> tuple[list[dict[str, Tensor]], float]:
    seed_everything(1, verbose=False)
    access = Access()
    replicas = 1 if world_size == 1 else SIZE
    strategy = strategy_of(world_size, **options)
    trainer = trainer_of(world_size, strategy, callbacks=[access], gradient_clip_val=0.5)
    module = TinyGPT(depth=4, ties=True)
    trainer.fit(module, data(rank, replicas, steps=4))
    found = trainer.validate(module, data(rank, replicas, steps=1), verbose=False)
    return access.seen, found[0]["val_loss"]


# An overflow.


class Overflows(Callback):
    """Makes one gradient infinite on the last rank alone, and looks at the weights."""

    def __init__(self) -> None:
        self.seen: list[Tensor] = []

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.global_step == 1 and trainer.global_rank == RANKS - 1:
            gradient = pl_module.get_parameter(LAST).grad
            assert isinstance(gradient, DTensor)
            gradient.to_local()[0] = float("inf")

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        with gathered_parameters(pl_module) as whole:
            self.seen.append(torch.cat([each.detach().flatten() for each in whole.values()]))


def overflow(rank: int, world_size: int) -> tuple[list[Tensor], float, bool]:
    scaler = torch.amp.GradScaler("cpu", init_scale=128.0)
    plugin = MixedPrecision("16-mixed", device="cpu", scaler=scaler)
    seed_everything(1, verbose=False)
    overflows = Overflows()
    strategy = strategy_of(world_size, zero_stage=2)
    trainer = trainer_of(
        world_size, strategy, plugins=[plugin], gradient_clip_val=1.0, callbacks=[overflows]
    )
    trainer.fit(TinyGPT(depth=4, optimizer="sgd"), data(rank, SIZE, steps=4))
    return overflows.seen, scaler.get_scale(), "_unscale_grads_" in vars(scaler)


# Traffic.


class Silent(TinyGPT):
    """Logs nothing, which would be reduced over the data axis, too."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(batch)


class Texts(LightningDataModule):
    """The share of one replica."""

    def train_dataloader(self) -> DataLoader[Any]:
        return data(0, SIZE, steps=2)


def train(rank: int, world_size: int, settings: dict[str, Any], **options: Any) -> str:
    """Train with telemetry and return where it is."""
    seed_everything(1, verbose=False)
    strategy = strategy_of(world_size, telemetry=True, **options)
    recording = RecordingPath()
    trainer = trainer_of(world_size, strategy, max_steps=10, callbacks=[recording], **settings)
    trainer.fit(Silent(depth=4, ties=True), data(rank, SIZE, steps=20))
    return recording.path


TRAINED: tuple[tuple[dict[str, Any], dict[str, Any]], ...] = (
    ({"accumulate_grad_batches": 2, "gradient_clip_val": 1.0}, {"zero_stage": 1}),
    ({}, {"zero_stage": 3, "sequence_parallel": True, **INTERLEAVED}),
)
"""Settings of the Trainer, and options of the strategy."""


@pytest.fixture(scope="module", params=TRAINED)
def trained(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, dict[str, Any], dict[str, Any]]:
    """Telemetry of a run, settings of its Trainer, and options of its strategy."""
    settings, options = request.param
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("BOLTMESH_RUN_DIR", str(tmp_path_factory.mktemp("telemetry")))
        path, *_ = run_ranks(partial(train, **options), RANKS, settings)
    return Path(path), settings, options


@pytest.mark.parametrize(
    "options",
    [{"zero_stage": 0, **INTERLEAVED}, {"zero_stage": 3}],
    ids=lambda options: f"stage {options['zero_stage']}",
)
def test_callbacks_see_and_write_what_they_would_in_one_process(options: dict[str, Any]) -> None:
    wanted, loss = run_ranks(look, 1)[0]
    assert len(wanted) == 6
    assert not torch.equal(wanted[1]["norm.weight"], wanted[2]["norm.weight"])
    for seen, found in run_ranks(partial(look, **options), RANKS):
        assert found == pytest.approx(loss, rel=1e-5)
        assert len(seen) == len(wanted)
        for ours, theirs in zip(seen, wanted, strict=True):
            assert ours.keys() == theirs.keys()
            for name, value in theirs.items():
                torch.testing.assert_close(ours[name], value, rtol=1e-5, atol=1e-5, msg=name)


def test_an_overflow_on_one_rank_skips_the_step_on_all() -> None:
    ranks = run_ranks(overflow, RANKS)
    first = ranks[0][0]
    for seen, scale, is_followed in ranks:
        assert scale == 64.0
        assert not is_followed  # the user's scaler is as it was
        moved = [not torch.equal(*pair) for pair in itertools.pairwise(seen)]
        assert moved == [False, True, True]
        assert bool(seen[-1].isfinite().all())
        assert all(map(torch.equal, seen, first))


def test_each_axis_moves_what_is_expected_of_it(trained: Any) -> None:
    with open_job(trained[0]) as job:
        seen = job.snapshot()
    expected = {
        (each.axis, each.operator): (each.payload_bytes, each.calls)
        for each in seen.expected
        if each.axis in AXES
    }
    assert {axis for axis, _ in expected} == set(AXES) - OPTIONAL
    moved = measured(seen)
    assert moved.keys() == expected.keys()
    for key, amount in moved.items():
        assert amount == pytest.approx(expected[key]), key


def test_a_plan_has_said_before_what_each_axis_moves_and_ranks_hold(trained: Any) -> None:
    path, settings, options = trained
    with open_job(path) as job:
        seen = job.snapshot()
    sizes = {"data": SIZE, "pipeline": SIZE, "tensor": SIZE, "microbatches": 2}
    plan = planned(Silent, Texts, RANKS, {**sizes, **options}, settings, depth=4, ties=True)
    moved, told = measured(seen), said(plan)
    assert moved.keys() == told.keys()
    for key, amount in moved.items():
        assert told[key] == pytest.approx(amount), key
    check_memory(plan, seen, num_parameters=len(list(Silent(depth=4).parameters())))
