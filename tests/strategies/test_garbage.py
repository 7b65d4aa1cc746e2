"""Steps leave no tensor in a reference cycle: its memory would stay until Python collects it.

On a GPU nothing makes Python collect when memory is short. Runs leave neither their model nor their
process groups: a cross-validation trains many times in one process.
"""

import gc
import weakref
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import psutil
import pytest
import torch
from lightning.pytorch import Callback, Trainer

from boltmesh.strategies import (
    ContextParallelStrategy,
    DDPStrategy,
    Parallel3DStrategy,
    PipelineParallelStrategy,
    TensorParallelStrategy,
    ZeROStrategy,
)
from boltmesh.strategies.dry_run.step import rare_garbage_collection
from tests.support.ranks import run_ranks
from tests.support.stack import Stack, token_data

STRATEGIES: dict[str, Any] = {
    "ddp": DDPStrategy,
    "zero2": lambda: ZeROStrategy(stage=2),
    "zero3": lambda: ZeROStrategy(stage=3),
    "shard_size": lambda: ZeROStrategy(stage=3, shard_size=2),
    "zero3, recomputed": lambda: ZeROStrategy(stage=3, activation_checkpointing="full"),
    "zero3_cpu": lambda: ZeROStrategy(stage=3, offload_optimizer="cpu", offload_parameters="cpu"),
    "tensor": TensorParallelStrategy,
    "context": ContextParallelStrategy,
    "1f1b": lambda: PipelineParallelStrategy(microbatches=2),
    "zero_bubble": lambda: PipelineParallelStrategy(schedule="zero_bubble", microbatches=2),
    "pipedream_2bw": lambda: PipelineParallelStrategy(schedule="pipedream_2bw", microbatches=2),
    "pipeline with ZeRO": lambda: Parallel3DStrategy(pipeline=2, microbatches=2, zero_stage=3),
}


class Garbage(Callback):
    """Counts the tensors that five steps have left to the garbage collector."""

    def __init__(self) -> None:
        self.tensors: Counter[str] = Counter()

    def on_train_batch_start(self, trainer: Trainer, *args: Any) -> None:
        if trainer.global_step == 3:
            gc.collect()
            gc.disable()
            gc.set_debug(gc.DEBUG_SAVEALL)
        if trainer.global_step == 8:
            gc.collect()
            self.tensors.update(str(each.shape) for each in gc.garbage if torch.is_tensor(each))
            gc.set_debug(0)
            gc.garbage.clear()
            gc.enable()


def train(rank: int, world_size: int, name: str) -> Counter[str]:
    garbage = Garbage()
    Trainer(
        accelerator="cpu", devices=world_size, strategy=STRATEGIES[name](), max_steps=9,
        callbacks=[garbage], logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False,
    ).fit(Stack(depth=4), token_data(96, 4))  # fmt: skip
    return garbage.tensors


@pytest.mark.sample("zero3", "1f1b")
@pytest.mark.ranks
@pytest.mark.parametrize("name", STRATEGIES)
def test_steps_leave_no_tensor_to_the_garbage_collector(name: str) -> None:
    assert run_ranks(train, 2, name) == [Counter(), Counter()]


class Failing(Callback):
    def on_train_batch_end(self, *args: Any) -> None:
        raise ValueError("it fails")


def train_once(world_size: int, name: str, *callbacks: Callback) -> list[Callable[[], object]]:
    module = Stack()
    trainer = Trainer(
        accelerator="cpu", devices=world_size, strategy=STRATEGIES[name](), max_steps=1,
        callbacks=[*callbacks], logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(module, token_data(16, 4))
    return [weakref.ref(trainer.strategy), weakref.ref(module)]


def train_four_times(rank: int, world_size: int, name: str) -> tuple[list[bool], list[int]]:
    made: list[Callable[[], object]] = []
    files = []
    for _ in range(4):
        made += train_once(world_size, name)
        files.append(psutil.Process().num_fds())
    gc.collect()
    return [each() is None for each in made], files


@pytest.mark.ranks
@pytest.mark.sample("tensor")
@pytest.mark.parametrize("name", STRATEGIES)
def test_runs_in_one_process_keep_neither_models_nor_process_groups(name: str) -> None:
    world_size = 4 if name in {"pipeline with ZeRO", "shard_size"} else 2
    for are_gone, files in run_ranks(train_four_times, world_size, name):
        assert all(are_gone)
        # The groups of a run are used again or destroyed when the next one has begun.
        assert files[1] == files[2] == files[3]


def train_after_a_failure(rank: int, world_size: int) -> list[int]:
    files = []
    for callbacks in ([], [Failing()], [], []):
        with suppress(ValueError):
            train_once(world_size, "1f1b", *callbacks)
        files.append(psutil.Process().num_fds())
    return files


@pytest.mark.ranks
def test_groups_of_a_run_that_failed_are_not_used_again() -> None:
    for first, failed, following, last in run_ranks(train_after_a_failure, 2):
        assert first == failed < following == last


@pytest.mark.parametrize("before", [(700, 10, 10), (90_000, 10, 5), (0, 10, 10)])
def test_collections_are_rare_until_an_analysis_ends(
    before: tuple[int, int, int], request: pytest.FixtureRequest
) -> None:
    request.addfinalizer(partial(gc.set_threshold, *gc.get_threshold()))
    gc.set_threshold(*before)
    with suppress(ZeroDivisionError), rare_garbage_collection():
        within = gc.get_threshold()
        raise ZeroDivisionError
    assert gc.get_threshold() == before
    if before[0] == 0:  # none at all
        assert within == before
    else:
        assert within[0] >= max(before[0], 10_000)
