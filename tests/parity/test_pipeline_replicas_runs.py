"""Several pipelines in one job: checkpoints, metrics, buffers, fp16, traffic and failures."""

import os
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import seed_everything
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric
from typing_extensions import override

from boltmesh.strategies import DDPStrategy
from boltmesh.strategies.pipeline_mesh import PipelineMeshStrategy
from boltmesh.telemetry.job import ID_VARIABLE, RUN_DIR_VARIABLE
from boltmesh.telemetry.reading.reader import Job
from boltmesh.telemetry.snapshot import JobSnapshot
from tests.support.pipelines import MICROBATCHES, ShardedPipeline, pipeline, quiet_trainer
from tests.support.ranks import RankFailure, run_ranks
from tests.support.stack import Stack, token_data

pytestmark = [pytest.mark.ranks, pytest.mark.slow]

ROWS, BATCH = 22, 8
STAGES = 2


@dataclass(frozen=True)
class Run:
    """A fit, from a checkpoint or from the start, up to an epoch."""

    layout: str
    """``plain`` Lightning, ``ddp``, a schedule, or ``shards``: ZeRO-1 beside 1f1b."""
    epochs: int
    target: str
    source: str | None = None


def data(rank: int, replicas: int) -> DataLoader[Any]:
    """The batches of one process, or a replica's share of each."""
    loader = token_data(ROWS, BATCH)
    batches = [range(at, min(at + BATCH, ROWS)) for at in range(0, ROWS, BATCH)]
    shares = [list(each[rank::replicas]) for each in batches]
    return DataLoader(loader.dataset, batch_sampler=shares)


def fits(rank: int, world_size: int, folder: str, runs: list[Run]) -> list[dict[str, Tensor]]:
    """Train; return of each run what this rank holds, parameters and moments by name."""
    return [fit(rank, world_size, Path(folder), each) for each in runs]


def fit(rank: int, world_size: int, folder: Path, run: Run) -> dict[str, Tensor]:
    seed_everything(1, verbose=False)
    replicas = 1
    strategy: Any = "auto"
    if run.layout == "ddp":
        replicas, strategy = world_size, DDPStrategy(telemetry=False)
    elif run.layout != "plain":
        replicas = world_size // STAGES
        if run.layout == "shards":
            strategy = ShardedPipeline(stages=STAGES)
        else:
            strategy = pipeline(schedule=run.layout, stages=STAGES)
    module = Stack(depth=4, ties=True, groups=True, freezes=True, has_scalar=True)
    trainer = quiet_trainer(world_size, strategy, max_epochs=run.epochs)
    source = None if run.source is None else str(folder / run.source)
    # The ranks of a stage stand side by side.
    trainer.fit(module, data(rank % replicas, replicas), ckpt_path=source)
    trainer.save_checkpoint(folder / run.target)
    found = {}
    for name, parameter in module.named_parameters():
        if isinstance(strategy, PipelineMeshStrategy) and not strategy.holds(name):
            continue
        found[name] = whole(parameter)
        for optimizer in trainer.optimizers:
            for key, value in optimizer.state.get(parameter, {}).items():
                found[f"{name}.{key}"] = whole(value)
    return found


def whole(value: Tensor) -> Tensor:
    value = value.full_tensor() if isinstance(value, DTensor) else value
    return value.detach().clone()


def merged(ranks: list[list[dict[str, Tensor]]]) -> list[dict[str, Tensor]]:
    """Put together what ranks hold; what several hold is the same to the bit."""
    runs: list[dict[str, Tensor]] = []
    for each in zip(*ranks, strict=True):
        runs.append({})
        for found in each:
            for name, value in found.items():
                assert torch.equal(runs[-1].setdefault(name, value), value), name
    return runs


def test_runs_of_several_pipelines_go_on_in_every_layout(tmp_path: Path) -> None:
    folder = str(tmp_path)
    four = [
        Run("1f1b", 2, "whole"),
        Run("1f1b", 1, "half"),
        Run("1f1b", 2, "same", "half"),
        Run("shards", 2, "shards_whole"),
        Run("shards", 1, "shards_half"),
        Run("shards", 2, "shards_same", "shards_half"),
        Run("shards", 2, "as_shards", "half"),
    ]
    found = merged(run_ranks(fits, 4, folder, four, timeout_s=110))
    reference, _, same, whole_shards, _, same_shards, as_shards = found
    for again, uninterrupted in ((same, reference), (same_shards, whole_shards)):
        assert again.keys() == uninterrupted.keys()
        assert all(torch.equal(again[name], each) for name, each in uninterrupted.items())
    two = [
        Run("ddp", 2, "as_ddp.ckpt", "half"),
        Run("ddp", 1, "ddp_half.ckpt"),
        Run("ddp", 2, "ddp_from_shards.ckpt", "shards_half"),
        Run("zbv", 2, "as_one_pipeline", "half"),
        Run("1f1b", 1, "one_half"),
    ]
    others = merged(run_ranks(fits, 2, folder, two, timeout_s=110))
    others += merged(run_ranks(fits, 1, folder, [Run("plain", 2, "as_plain", "ddp_half.ckpt")]))
    back = [
        Run("zbv", 2, "from_ddp", "ddp_half.ckpt"),
        Run("1f1b", 2, "from_one_pipeline", "one_half"),
        Run("shards", 2, "shards_from_ddp", "ddp_half.ckpt"),
    ]
    others += merged(run_ranks(fits, 4, folder, back, timeout_s=110))
    others += [whole_shards, as_shards]
    targets = [*(each.target for each in two), "as_plain", *(each.target for each in back)]
    for name, run in zip((*targets, "shards_whole", "as_shards"), others, strict=True):
        if name.endswith(("half", "half.ckpt")):
            continue
        assert run.keys() == reference.keys(), name
        for key, each in run.items():
            torch.testing.assert_close(
                each, reference[key], rtol=1e-4, atol=2e-5, msg=f"{name}: {key}"
            )


STEPS, ACCUMULATED = 4, 2
INITIAL_SCALE = 8.0


class Watched(Stack):
    count: Tensor

    """Has a buffer that training writes, a metric, and gradients that overflow on one data rank."""

    def __init__(self, data_rank: int, overflows_at: int) -> None:
        super().__init__(depth=4, ties=True)
        self.data_rank, self.overflows_at = data_rank, overflows_at
        self.register_buffer("count", torch.zeros(()))
        self.average = MeanMetric()

    @override
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.count += self.data_rank + 1
        self.average(batch[0].float().mean(), weight=len(batch[0]))
        self.log("average", self.average, on_step=False, on_epoch=True)
        has_overflow = batch_idx == self.overflows_at and self.data_rank == 1
        return loss * torch.inf if has_overflow else loss


@dataclass
class Seen:
    scale: float
    count: float
    average: float
    steps: int
    weights: dict[str, Tensor]
    snapshot: JobSnapshot | None


def watch(rank: int, world_size: int, run_dir: Path, door: Any) -> Seen:
    os.environ[RUN_DIR_VARIABLE], os.environ[ID_VARIABLE] = str(run_dir), "told"
    torch.manual_seed(rank)  # the first data rank's weights are everybody's
    module = Watched(rank % 2, overflows_at=3)
    scaler = torch.amp.GradScaler("cpu", init_scale=INITIAL_SCALE)
    strategy = door(stages=STAGES, telemetry=True)
    trainer = quiet_trainer(
        world_size, strategy, max_steps=STEPS, accumulate_grad_batches=ACCUMULATED,
        gradient_clip_val=1.0, log_every_n_steps=1, use_distributed_sampler=True,
        plugins=[MixedPrecision("16-mixed", "cpu", scaler)],
    )  # fmt: skip
    trainer.fit(module, token_data(2 * 8 * STEPS * ACCUMULATED, 8))
    snapshot = None
    if rank == 0:
        with Job(run_dir / "told") as job:
            snapshot = job.snapshot()
    held = {name: each for name, each in module.named_parameters() if strategy.holds(name)}
    return Seen(
        scale=scaler.get_scale(),
        count=float(module.count),
        average=float(trainer.callback_metrics["average"]),
        steps=trainer.global_step,
        weights={name: whole(each) for name, each in held.items()},
        snapshot=snapshot,
    )


@pytest.mark.parametrize(
    "door",
    [pipeline, partial(ShardedPipeline, zero_stage=3)],
    ids=["replicas", "stage 3"],
)
def test_pipelines_agree_on_weights_overflow_metrics_and_buffers(tmp_path: Path, door: Any) -> None:
    ranks = run_ranks(watch, 4, tmp_path / "runs", door, timeout_s=110)
    tokens = torch.cat([batch[0] for batch in token_data(2 * 8 * STEPS * ACCUMULATED, 8)]).float()
    for seen in ranks:
        assert seen.scale == INITIAL_SCALE / 2  # one step of four was skipped, by all
        assert seen.average == pytest.approx(tokens.mean().item())
    merged([[each.weights] for each in ranks])
    # On the last stage: the second pipeline has the first one's before the last batch, and its own.
    num_calls = MICROBATCHES * STEPS * ACCUMULATED
    assert [each.count for each in ranks[2:]] == [num_calls, num_calls + MICROBATCHES]
    snapshot = ranks[0].snapshot
    assert snapshot is not None
    expected = {
        (each.axis, each.operator): each.payload_bytes
        for each in snapshot.expected
        if each.axis == "data"
    }
    sharded = {("data", "_allgather_base"), ("data", "_reduce_scatter_base")}
    assert set(expected) == {("data", "allreduce"), ("data", "broadcast")} | (
        set() if door is pipeline else sharded
    )
    for (axis, operator), size in expected.items():
        found = [
            sum(
                each.bytes_per_step or 0.0
                for each in rank.collectives
                if (each.axis, each.operator) == (axis, operator)
            )
            for rank in snapshot.ranks
        ]
        logged = 4.0 * ACCUMULATED if operator == "allreduce" else 0.0  # by sync_dist
        assert sum(found) / len(found) - logged == pytest.approx(size, rel=0.01), operator


class Failing(Stack):
    """Fails in its third batch on one rank."""

    def __init__(self, rank: int) -> None:
        super().__init__(depth=4)
        self.rank = rank

    @override
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.rank == 3 and batch_idx == 2:
            self.blocks[3].register_forward_pre_hook(_raise)


def _raise(*_: object) -> None:
    raise ValueError("no more")


def fail(rank: int, world_size: int) -> None:
    seed_everything(1, verbose=False)
    trainer = quiet_trainer(world_size, pipeline(stages=STAGES))
    trainer.fit(Failing(rank), token_data(64, 8))


def test_where_one_pipeline_fails_the_others_say_why() -> None:
    with pytest.raises(RankFailure) as caught:
        run_ranks(fail, 4, grace_s=20.0)
    told = str(caught.value).split("\nrank ")
    assert len(told) == 4
    for each in told:
        assert "no more" in each, each
    assert sum("Another pipeline of the job failed" in each for each in told) == 2
