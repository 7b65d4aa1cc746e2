"""Ranks that are killed without a word: in a step, in a save, in a resume."""

import os
import signal
import time
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn

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
            mock.patch.object(shard_writer, "_write_piece", die).start()


class KillAt(Callback):
    """Kills the last rank at one moment of a run, and notes when.

    Every rank leaves a file ``pid-RANK`` in the working directory, the killed one ``killed``.

    Args:
        moment: One of ``MOMENTS``.
    """

    def __init__(self, moment: str) -> None:
        self.moment = moment

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        Path(f"pid-{trainer.global_rank}").write_text(str(os.getpid()))
        self._reach("setup", trainer)

    def on_load_checkpoint(self, trainer: Trainer, *args: Any) -> None:
        self._reach("load", trainer)

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if batch_idx == 1:
            *_, last = (each for each in pl_module.modules() if isinstance(each, nn.Linear))
            last.register_forward_pre_hook(lambda *args: self._reach("forward", trainer))
            last.register_forward_hook(partial(self._watch_backward, trainer))

    def _watch_backward(self, trainer: Trainer, module: nn.Module, given: Any, out: Tensor) -> None:
        if out.requires_grad:
            out.register_hook(lambda gradient: self._reach("backward", trainer))

    def on_before_optimizer_step(self, trainer: Trainer, *args: Any) -> None:
        if trainer.global_step == 1:
            self._reach("optimizer step", trainer)

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        self._reach("end of a batch", trainer)

    def on_validation_batch_start(self, trainer: Trainer, *args: Any) -> None:
        self._reach("validation", trainer)

    def on_save_checkpoint(self, trainer: Trainer, *args: Any) -> None:
        self._reach("save", trainer)

    def on_train_end(self, trainer: Trainer, *args: Any) -> None:
        self._reach("end of training", trainer)

    def _reach(self, moment: str, trainer: Trainer) -> None:
        if moment == self.moment and trainer.global_rank == trainer.world_size - 1:
            Path("killed").write_text(str(time.time()))
            die()


MOMENTS = (
    "setup", "load", "forward", "backward", "optimizer step", "end of a batch", "validation",
    "save", "end of training",
)  # fmt: skip
