"""How the ranks of a training run agree to stop: after the same optimizer step, with a checkpoint.

A signal reaches ranks at different moments, and a rank that leaves alone takes the others down in
their next collective. So the ranks ask each other, between optimizer steps and at most about four
times a second, whether one of them was told to stop. Lightning's own way (``received_sigterm``)
raises on the rank that was told, and is not used.
"""

import contextlib
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint
from typing_extensions import override

from boltmesh.launch.stopping import StoppedBySignal, StopSwitch
from boltmesh.strategies.checkpoint.atomic_replace import remove
from boltmesh.strategies.engine.checkpointing import CheckpointingStrategy
from boltmesh.strategies.lightning_compat.loops import is_epoch_over, validation_follows

ASK_EVERY_S = 0.25
"""A person does not notice this delay, and a step does not notice the question."""
MOST_STEPS = 1000
PREFIX = "interrupted"


class GracefulStop(Checkpoint):
    """Ends training on all ranks after the same step, once one of them was told to stop.

    A subclass of ``Checkpoint`` only because the Trainer calls those last: what it stores is then
    what every other callback has made of the step.

    Args:
        switch: Remembers the signal of this rank.
        folder: Where the checkpoint goes; None keeps none.
    """

    def __init__(self, switch: StopSwitch, folder: Path | None) -> None:
        self.folder = folder
        self._switch = switch
        self._step_before = 0
        self._steps = 0
        self._next_ask = 1
        self._asked_at = (0, 0.0)
        self._leaving: StoppedBySignal | None = None

    @override
    def on_sanity_check_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # Lightning has just put a handler in front that broadcasts from wherever the signal
        # finds the rank.
        self._switch.install()

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._switch.install()
        self._switch.is_training = True
        self._step_before = trainer.global_step
        self._asked_at = (0, time.monotonic())

    @override
    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        # One hook later than the checkpoint, so that the loggers have the last step.
        if self._leaving is not None:
            self._switch.is_training = False
            raise self._leaving

    @override
    def on_train_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        has_stepped = trainer.global_step != self._step_before
        # Lightning does not count the steps of optimizers that manual optimisation hides from it.
        if not has_stepped and (pl_module.automatic_optimization or trainer.global_step):
            return
        self._step_before = trainer.global_step
        self._steps += 1
        if self._steps < self._next_ask:
            return
        signum, is_between_steps = self._ask(trainer)
        if signum and is_between_steps:
            checkpoint = self._save(trainer)
            self._leaving = StoppedBySignal(signum, step=trainer.global_step, checkpoint=checkpoint)

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._switch.is_training = False

    def _ask(self, trainer: Trainer) -> tuple[int, bool]:
        """Agree on the signal and on the next step at which to ask. Collective over all ranks.

        Returns:
            The signal, 0 for none, and whether the run can end here: a checkpoint that is written
            before a validation, or before an epoch is closed, would resume without it.
        """
        now, (steps, since) = time.monotonic(), self._asked_at
        step_s = (now - since) / max(1, self._steps - steps)
        must_go_on = is_epoch_over(trainer) or validation_follows(trainer)
        mine = [float(self._switch.signum or 0), step_s, float(must_go_on)]
        if trainer.world_size > 1:
            agreed = torch.tensor(mine, device=trainer.strategy.root_device)
            dist.all_reduce(agreed, op=dist.ReduceOp.MAX)
            mine = agreed.tolist()
        signum, step_s, must_go_on = int(mine[0]), mine[1], bool(mine[2])
        # Once it is known that the run ends, the next step may be the one.
        interval = 1 if signum else int(ASK_EVERY_S / max(step_s, 1e-9))
        # Steps that suddenly take longer are noticed before long.
        interval = max(1, min(interval, 2 * (self._steps - steps), MOST_STEPS))
        self._next_ask = self._steps + interval
        self._asked_at = (self._steps, time.monotonic())
        return signum, not must_go_on

    def _save(self, trainer: Trainer) -> str | None:
        # fast_dev_run promises to keep nothing.
        if self.folder is None or getattr(trainer, "fast_dev_run", False):
            return None
        path = self.folder / f"{PREFIX}-step={trainer.global_step}.ckpt"
        trainer.save_checkpoint(path, weights_only=False)
        if isinstance(trainer.strategy, CheckpointingStrategy):
            trainer.strategy.finish_saving()  # before older ones go
        if trainer.is_global_zero:
            for older in self.folder.glob(f"{PREFIX}-step=*.ckpt"):
                if older != path:
                    with contextlib.suppress(OSError):
                        remove(older)
        return str(path)
