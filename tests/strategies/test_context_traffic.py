"""What a strategy with a context axis says a step moves is what telemetry counts, to the byte."""

from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import Trainer, seed_everything

from boltmesh.strategies import ContextParallelStrategy, Parallel3DStrategy
from boltmesh.telemetry.reader.reader import open_job
from tests.support.gpts import TinyGPT, text_data
from tests.support.ranks import run_ranks
from tests.support.recording_path import RecordingPath

pytestmark = pytest.mark.ranks

ROWS = 4


def train(rank: int, world_size: int, options: Any, trainer_options: Any) -> str:
    seed_everything(1, verbose=False)
    kind: Any = Parallel3DStrategy if "context" in options else ContextParallelStrategy
    strategy = kind(**options)
    recording = RecordingPath()
    accumulate = trainer_options.get("accumulate_grad_batches", 1)
    trainer = Trainer(
        accelerator="cpu", devices=world_size, strategy=strategy, max_steps=12, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        callbacks=[recording], **trainer_options,
    )  # fmt: skip
    trainer.fit(TinyGPT(), text_data(12 * accumulate * ROWS * strategy.layout.data, ROWS))
    return recording.path


@pytest.mark.full
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
    check(2, options, trainer, {"pipeline": 1, "data": 1, "context": 2, "tensor": 1})


@pytest.mark.full
@pytest.mark.parametrize("options", [{}, {"sequence_parallel": True, "zero_stage": 3}], ids=str)
def test_the_bytes_of_a_step_beside_a_tensor_axis_are_those_expected(options: Any) -> None:
    sizes = {"pipeline": 1, "data": 1, "context": 2, "tensor": 2}
    check(4, {"context": 2, "tensor": 2, **options}, {"gradient_clip_val": 0.5}, sizes)


def check(ranks: int, options: Any, trainer: Any, sizes: dict[str, int]) -> None:
    folders = run_ranks(train, ranks, options, trainer)
    with open_job(Path(folders[0])) as job:
        snapshot = job.snapshot()
    assert snapshot.communication_note is None
    assert snapshot.mesh == sizes
    for axis in ("context", "tensor"):
        if sizes[axis] == 1:
            continue
        expected = {
            each.operator: (each.payload_bytes, each.calls)
            for each in snapshot.expected
            if each.axis == axis
        }
        assert expected["alltoall_base" if axis == "context" else "allreduce"][0] > 0
        counted: dict[str, tuple[float, float]] = {}
        # Of two groups: activations, and digests on the CPU.
        for each in snapshot.ranks[0].collectives:
            if each.axis == axis and each.bytes_per_step:
                known = counted.get(each.operator, (0.0, 0.0))
                moved = each.bytes_per_step, each.calls_per_step or 0.0
                counted[each.operator] = known[0] + moved[0], known[1] + moved[1]
        assert counted == expected
