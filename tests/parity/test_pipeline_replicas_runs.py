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
from torchmetrics import MeanMetric
from typing_extensions import override

from boltmesh.strategies.parameter_access import whole_value
from boltmesh.telemetry.job import ID_VARIABLE, RUN_DIR_VARIABLE
from boltmesh.telemetry.reader.job_reader import JobReader
from tests.support.continued_runs import Run, different, merged, run_all
from tests.support.layouts import PLAIN
from tests.support.pipelines import MICROBATCHES, ShardedPipeline, pipeline, quiet_trainer
from tests.support.ranks import RankFailure, run_ranks
from tests.support.stack import Stack, token_data

pytestmark = [pytest.mark.ranks, pytest.mark.slow]

STAGES = 2


@pytest.mark.full
def test_runs_of_several_pipelines_go_on_in_every_layout(tmp_path: Path) -> None:
    shards = "data 2 x pipeline 2, ZeRO-1"
    found = run_all(
        tmp_path,
        "stack",
        [
            Run("data 2 x 1f1b 2", 2, "whole"),
            Run("data 2 x 1f1b 2", 1, "half"),
            Run("data 2 x 1f1b 2", 2, "same", "half"),
            Run(shards, 2, "shards_whole"),
            Run(shards, 1, "shards_half"),
            Run(shards, 2, "shards_same", "shards_half"),
            Run(shards, 2, "as_shards", "half"),
        ],
    )
    assert different(found["same"], found["whole"], exact=True) == []
    assert different(found["shards_same"], found["shards_whole"], exact=True) == []
    found |= run_all(
        tmp_path,
        "stack",
        [
            Run("DDP, 2", 2, "as_ddp.ckpt", "half"),
            Run("DDP, 2", 1, "ddp_half.ckpt"),
            Run("DDP, 2", 2, "ddp_from_shards.ckpt", "shards_half"),
            Run("zbv, 2", 2, "as_one_pipeline", "half"),
            Run("1f1b, 2", 1, "one_half"),
        ],
    )
    found |= run_all(tmp_path, "stack", [Run(PLAIN, 2, "as_plain", "ddp_half.ckpt")])
    found |= run_all(
        tmp_path,
        "stack",
        [
            Run("data 2 x zbv 2", 2, "from_ddp", "ddp_half.ckpt"),
            Run("data 2 x 1f1b 2", 2, "from_one_pipeline", "one_half"),
            Run(shards, 2, "shards_from_ddp", "ddp_half.ckpt"),
        ],
    )
    for target, end in found.items():
        if "half" not in target:
            assert different(end, found["whole"]) == [], target


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
    held = {name: each for name, each in module.named_parameters() if strategy.holds(name)}
    return Seen(
        scale=scaler.get_scale(),
        count=float(module.count),
        average=float(trainer.callback_metrics["average"]),
        steps=trainer.global_step,
        weights={name: whole_value(each.detach(), each).clone() for name, each in held.items()},
    )


@pytest.mark.full
@pytest.mark.parametrize(
    "door",
    [pipeline, partial(ShardedPipeline, zero_stage=3)],
    ids=["replicas", "stage 3"],
)
def test_pipelines_agree_on_weights_overflow_metrics_and_buffers(tmp_path: Path, door: Any) -> None:
    ranks = run_ranks(watch, 4, tmp_path / "runs", door)
    tokens = torch.cat([batch[0] for batch in token_data(2 * 8 * STEPS * ACCUMULATED, 8)]).float()
    for seen in ranks:
        assert seen.scale == INITIAL_SCALE / 2  # one step of four was skipped, by all
        assert seen.average == pytest.approx(tokens.mean().item())
    merged([each.weights for each in ranks], "weights")
    # On the last stage: the second pipeline has the first one's before the last batch, and its own.
    num_calls = MICROBATCHES * STEPS * ACCUMULATED
    assert [each.count for each in ranks[2:]] == [num_calls, num_calls + MICROBATCHES]
    with JobReader(tmp_path / "runs" / "told") as job:  # when all ranks have told all
        snapshot = job.snapshot()
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


@pytest.mark.full
def test_where_one_pipeline_fails_the_others_say_why() -> None:
    with pytest.raises(RankFailure) as caught:
        run_ranks(fail, 4, grace_s=20.0)
    told = str(caught.value).split("\nrank ")
    assert len(told) == 4
    for each in told:
        assert "no more" in each, each
    assert sum("Another pipeline of the job failed" in each for each in told) == 2
