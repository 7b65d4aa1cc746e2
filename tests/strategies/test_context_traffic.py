"""What ``ContextParallelStrategy`` says a step moves is what telemetry counts, to the byte."""

from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything

from boltmesh.strategies import ContextParallelStrategy
from boltmesh.telemetry.reader.reader import open_job
from tests.support.gpts import TinyGPT, text_data
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.ranks

ROWS = 4


def train(rank: int, world_size: int, options: Any, trainer_options: Any) -> str:
    seed_everything(1, verbose=False)
    strategy = ContextParallelStrategy(**options)
    path = []

    class Notes(Callback):
        reads_gradients = False

        def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
            path.append(str(strategy.recorder.path))

    accumulate = trainer_options.get("accumulate_grad_batches", 1)
    trainer = Trainer(
        accelerator="cpu", devices=world_size, strategy=strategy, max_steps=12, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        callbacks=[Notes()], **trainer_options,
    )  # fmt: skip
    trainer.fit(TinyGPT(), text_data(12 * accumulate * ROWS * strategy.layout.data, ROWS))
    return path[0]


@pytest.mark.parametrize(
    ("options", "trainer"),
    [
        ({}, {"gradient_clip_val": 0.5}),
        ({"balance": "zigzag", "zero_stage": 3}, {"accumulate_grad_batches": 2}),
        ({"activation_checkpointing": "full", "attention": "ring"}, {}),
    ],
    ids=str,
)
def test_the_bytes_of_a_step_are_the_bytes_expected(options: Any, trainer: Any) -> None:
    told = run_ranks(train, 2, options, trainer, timeout_s=90)
    with open_job(Path(told[0])) as job:
        snapshot = job.snapshot()
    assert snapshot.communication_note is None
    assert snapshot.mesh == {"pipeline": 1, "data": 1, "context": 2, "tensor": 1}
    expected = {
        each.operator: (each.payload_bytes, each.calls)
        for each in snapshot.expected
        if each.axis == "context"
    }
    assert expected["alltoall_base"][0] > 0
    first = snapshot.ranks[0]
    counted: dict[str, tuple[float, float]] = {}
    for each in first.collectives:  # of two groups: activations, and digests on the CPU
        if each.axis == "context" and each.bytes_per_step:
            known = counted.get(each.operator, (0.0, 0.0))
            moved = each.bytes_per_step, each.calls_per_step or 0.0
            counted[each.operator] = known[0] + moved[0], known[1] + moved[1]
    assert counted == expected
