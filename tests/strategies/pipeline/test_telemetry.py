"""What a pipeline tells of itself: its bubble as a logged metric, its traffic, what stages keep."""

import os
import warnings
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.plugins import MixedPrecision
from torch.amp import GradScaler

from boltmesh.strategies.pipeline.axis import BUBBLE
from boltmesh.strategies.pipeline_parallel import PipelineParallelStrategy
from boltmesh.telemetry.job import ID_VARIABLE, RUN_DIR_VARIABLE
from boltmesh.telemetry.reader.job_reader import JobReader
from boltmesh.telemetry.traffic import CONTROL
from tests.support.ranks import run_ranks
from tests.support.stack import Stack, token_data

STEPS, ACCUMULATED = 6, 2


class Logging(Stack):
    """Has a value of its own beside the strategy's."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.log("mine", loss, on_step=True, on_epoch=True)
        return loss


class Follower(Callback):
    """Notes what is logged after each batch."""

    def __init__(self) -> None:
        self.seen: list[float | None] = []

    def on_train_batch_end(self, trainer: Trainer, module: LightningModule, *args: Any) -> None:
        value = trainer.callback_metrics.get(BUBBLE)
        self.seen.append(None if value is None else float(value))


def train(
    rank: int, world_size: int, run_dir: Path, has_scaler: bool
) -> tuple[list[float | None], set[str]]:
    os.environ[RUN_DIR_VARIABLE], os.environ[ID_VARIABLE] = str(run_dir), "told"
    follower = Follower()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module="lightning")
        trainer = Trainer(
            accelerator="cpu",
            devices=world_size,
            strategy=PipelineParallelStrategy(microbatches=4),
            plugins=[MixedPrecision("16-mixed", "cpu", GradScaler("cpu"))] if has_scaler else [],
            max_steps=STEPS,
            accumulate_grad_batches=ACCUMULATED,
            gradient_clip_val=1.0,
            log_every_n_steps=1,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            callbacks=[follower],
        )
        trainer.fit(Logging(depth=6, ties=True), token_data(8 * STEPS * ACCUMULATED, 8))
    return follower.seen, set(trainer.callback_metrics)


@pytest.mark.sample("fp32")
@pytest.mark.ranks
@pytest.mark.parametrize("has_scaler", [False, True], ids=["fp32", "fp16"])
def test_a_pipeline_tells_its_bubble_its_traffic_and_what_it_keeps(
    tmp_path: Path, has_scaler: bool
) -> None:
    told = run_ranks(train, 2, tmp_path / "runs", has_scaler)
    (first, names), (second, _) = told
    assert first == second  # the same on all ranks
    assert first[0] is None  # there is no batch before the first
    assert len(first) == STEPS * ACCUMULATED
    assert all(each is not None and 0.0 < each < 1.0 for each in first[1:])
    assert {BUBBLE, "mine_step", "mine_epoch"} <= names
    with JobReader(tmp_path / "runs" / "told") as job:  # when all ranks have told all
        seen = job.snapshot()
    assert BUBBLE in {point.name for point in seen.history}
    expected = {
        (each.axis, each.operator): (each.payload_bytes, each.calls) for each in seen.expected
    }
    ranks = seen.ranks
    kinds = [("pipeline", each) for each in ("send", "recv", "allreduce")]
    # The loss and what was logged ride on the agreements.
    assert expected.keys() == {*kinds, (CONTROL, "send"), (CONTROL, "recv")}
    for axis, operator in expected:
        own = [
            [each for each in rank.collectives if (each.axis, each.operator) == (axis, operator)]
            for rank in ranks
        ]
        size = sum(each.bytes_per_step or 0.0 for found in own for each in found) / len(ranks)
        calls = sum(each.calls_per_step or 0.0 for found in own for each in found) / len(ranks)
        assert (size, calls) == pytest.approx(expected[axis, operator]), (axis, operator)
    kept = [(each.stage, each.most) for rank in ranks for each in rank.live_microbatches]
    assert kept == [(0, 2), (1, 1)]
    assert seen.pipeline is not None
    assert seen.pipeline.rank_of_stage == (0, 1)
    ((forward, back),) = seen.pipeline.border_bytes
    sent = {
        (rank.rank, each.peer): each.bytes_per_step
        for rank in ranks
        for each in rank.peers
        if each.axis == "pipeline"
    }
    assert (sent[0, 1], sent[1, 0]) == pytest.approx((forward, back))
