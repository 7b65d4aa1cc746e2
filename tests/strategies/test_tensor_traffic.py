"""What ``TensorParallelStrategy`` says a step moves is what telemetry counts, to the byte."""

from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import Trainer, seed_everything

from boltmesh.strategies import TensorParallelStrategy
from boltmesh.telemetry.reader.reader import open_job
from boltmesh.telemetry.tensor_plan import WHOLE
from tests.support.gpts import LENGTH, TinyGPT, text_data
from tests.support.ranks import run_ranks
from tests.support.recording_path import RecordingPath

pytestmark = pytest.mark.ranks

ROWS = 4


def train(
    rank: int, world_size: int, options: Any, model: Any, trainer_options: Any
) -> tuple[str, int]:
    seed_everything(1, verbose=False)
    strategy = TensorParallelStrategy(**options)
    recording = RecordingPath()
    accumulate = trainer_options.get("accumulate_grad_batches", 1)
    trainer = Trainer(
        accelerator="cpu", devices=world_size, strategy=strategy, max_steps=12, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        callbacks=[recording], **trainer_options,
    )  # fmt: skip
    trainer.fit(TinyGPT(**model), text_data(12 * accumulate * ROWS * strategy.layout.data, ROWS))
    assert strategy.plan is not None
    in_blocks = sum(name.startswith("blocks") for name in strategy.plan.sharded)
    return recording.path, in_blocks


@pytest.mark.full
@pytest.mark.parametrize(
    ("world_size", "options", "model", "trainer"),
    [
        (2, {}, {}, {}),
        (2, {}, {"is_fused": False}, {"gradient_clip_val": 0.5, "accumulate_grad_batches": 3}),
        (2, {}, {}, {"precision": "bf16-mixed"}),
        (2, {}, {"freezes": True}, {}),
        (2, {"activation_checkpointing": "full"}, {}, {}),
        (4, {"size": 2}, {"ties": True}, {"gradient_clip_val": 0.5}),
        (4, {}, {"vocabulary": 25}, {}),
    ],
    ids=str,
)
def test_the_bytes_of_a_step_are_the_bytes_expected(
    world_size: int, options: Any, model: Any, trainer: Any
) -> None:
    told = run_ranks(train, world_size, options, model, trainer)
    with open_job(Path(told[0][0])) as job:
        snapshot = job.snapshot()
    assert snapshot.communication_note is None
    expected = {
        each.operator: (each.payload_bytes, each.calls)
        for each in snapshot.expected
        if each.axis == "tensor"
    }
    assert expected["allreduce"][0] > 0
    for rank in snapshot.ranks:
        counted: dict[str, tuple[float, float]] = {}
        for each in rank.collectives:  # of two groups: activations, and questions on the CPU
            if each.axis == "tensor" and each.bytes_per_step:
                known = counted.get(each.operator, (0.0, 0.0))
                moved = each.bytes_per_step, each.calls_per_step or 0.0
                counted[each.operator] = known[0] + moved[0], known[1] + moved[1]
        assert counted == expected
    plan = snapshot.tensor_plan
    assert plan is not None
    assert plan.size == (options.get("size") or world_size)
    assert any(row.pattern.startswith("blocks.*") and row.style != WHOLE for row in plan.rows)
    assert plan.blocks
    if (options, model, trainer) == ({}, {}, {}):
        # Megatron's: in each of two blocks two sums of activations forward and two backward.
        activations = ROWS * LENGTH * 16 * 4
        assert expected["allreduce"][0] >= 2 * 4 * activations
