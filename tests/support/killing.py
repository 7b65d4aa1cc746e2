"""Ranks that are killed without a word: in a step, in a save, in a resume."""

import os
import signal
from typing import Any
from unittest import mock

from lightning.pytorch import Callback, Trainer

from boltmesh.strategies.checkpoint import directory, shard_writer


def die(*args: Any, **kwargs: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def fatal(where: str, steps: int) -> list[Callback]:
    """Have this rank killed.

    Args:
        where: ``"step"``, behind a backward pass; ``"save"``, before it writes its shards;
            ``"resume"``, before it reads a checkpoint.
        steps: After how many; in the save, that of one step more.

    Returns:
        What its Trainer needs for it.
    """
    if where == "resume":
        mock.patch.object(directory, "read_checked", die).start()
        return []
    return [{"step": _DieInStep, "save": _DieInSave}[where](steps)]


class _DieInStep(Callback):
    def __init__(self, steps: int) -> None:
        self.steps = steps

    def on_after_backward(self, trainer: Trainer, pl_module: Any) -> None:
        if trainer.global_step == self.steps:
            die()


class _DieInSave(Callback):
    def __init__(self, steps: int) -> None:
        self.steps = steps

    def on_train_batch_start(self, trainer: Trainer, *args: Any) -> None:
        if trainer.global_step == self.steps:
            mock.patch.object(shard_writer, "_write", die).start()
