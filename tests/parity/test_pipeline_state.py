"""Buffers, counters and extra state of a pipeline are those of one process that accumulates.

A batch norm sees one microbatch at a time, as it does where gradients are accumulated.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from torch import Tensor

from boltmesh.strategies import DDPStrategy
from boltmesh.strategies.pipeline_parallel import PipelineParallelStrategy
from tests.support.ranks import run_ranks
from tests.support.stateful import Images, Stateful, image_data, vector_data

pytestmark = pytest.mark.ranks

MICROBATCHES, ROWS = 4, 6


def quiet(strategy: Any, devices: int, **arguments: Any) -> Trainer:
    return Trainer(
        accelerator="cpu", devices=devices, strategy=strategy, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        **arguments,
    )  # fmt: skip


def tensors_of(module: LightningModule, stores: Callable[[str], bool]) -> dict[str, Tensor]:
    named = [
        *module.named_parameters(remove_duplicate=False),
        *module.named_buffers(remove_duplicate=False),
    ]
    return {name: each.detach().clone() for name, each in named if stores(name)}


def extra_of(module: LightningModule) -> dict[str, Any]:
    if not isinstance(module, Stateful):
        return {}
    lists = {"seen": module.seen, "recent": [*module.recent]}
    return {"rows": int(module.rows), "batches": module.batches, **lists}


def accumulate(rank: int, world_size: int, kind: Any, data: Any) -> Any:
    """Train in one process on one microbatch after the other."""
    seed_everything(1, verbose=False)
    module = kind()
    trainer = quiet("auto", 1, max_steps=3, accumulate_grad_batches=MICROBATCHES)
    trainer.fit(module, data(3 * MICROBATCHES * ROWS, ROWS))
    calls = [getattr(each, "calls", None) for each in module.blocks]
    return tensors_of(module, lambda name: True), extra_of(module), calls


def pipelines(
    rank: int, world_size: int, kind: Any, data: Any, schedules: tuple[str, ...], folder: str
) -> Any:
    found = []
    for schedule in schedules:
        seed_everything(1, verbose=False)
        module = kind()
        if isinstance(module, Stateful):
            module.noise.add_(rank)  # as without a seed
        strategy = PipelineParallelStrategy(
            telemetry=False, schedule=schedule, microbatches=MICROBATCHES
        )
        trainer = quiet(strategy, world_size, max_steps=3)
        trainer.fit(module, data(3 * MICROBATCHES * ROWS, MICROBATCHES * ROWS))
        trainer.save_checkpoint(f"{folder}/{schedule}")
        found.append((tensors_of(module, strategy.checkpoints.stores), extra_of(module)))
    return found


def read_back(rank: int, world_size: int, kind: Any, data: Any, source: str) -> Any:
    """Load a checkpoint in one process."""
    module = kind()
    trainer = quiet(DDPStrategy(telemetry=False), 1, max_steps=3)
    trainer.fit(module, data(3 * MICROBATCHES * ROWS, MICROBATCHES * ROWS), ckpt_path=source)
    calls = [getattr(each, "calls", None) for each in module.blocks]
    return tensors_of(module, lambda name: True), calls


@pytest.mark.full
@pytest.mark.parametrize(
    ("kind", "data", "schedules"),
    [
        (Images, image_data, ("zbv",)),
        (Stateful, vector_data, ("1f1b", "interleaved_1f1b")),
        pytest.param(Images, image_data, ("1f1b",), marks=pytest.mark.full),
        pytest.param(Stateful, vector_data, ("zbv",), marks=pytest.mark.full),
    ],
)
def test_state_equals_one_process_that_accumulates(
    kind: Any, data: Any, schedules: tuple[str, ...], tmp_path: Path
) -> None:
    ((alone, extra, calls),) = run_ranks(accumulate, 1, kind, data)
    ranks = run_ranks(pipelines, 2, kind, data, schedules, str(tmp_path))
    for found in zip(*ranks, strict=True):
        merged = {name: each for tensors, _ in found for name, each in tensors.items()}
        assert merged.keys() == alone.keys()
        torch.testing.assert_close(merged, alone, rtol=1e-4, atol=1e-5)
        assert all(any("running_mean" in name for name in tensors) for tensors, _ in found)
        assert [other for _, other in found] == [extra, extra]
    path = str(tmp_path / schedules[-1])
    ((loaded, loaded_calls),) = run_ranks(read_back, 1, kind, data, path)
    noise = {"noise"}  # which no checkpoint holds
    assert loaded.keys() == merged.keys()
    for name in loaded.keys() - noise:
        assert torch.equal(loaded[name], merged[name]), name
    assert loaded_calls == calls
