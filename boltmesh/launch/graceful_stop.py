"""Stops the ranks of a training run on a signal: after the same optimizer step, with a checkpoint.

A signal reaches ranks at different moments, and a rank that stops alone fails the others in their
next collective. So the ranks reduce a flag between optimizer steps, at most about four times a
second: whether one of them received a signal. Lightning's ``received_sigterm`` raises only on the
rank that received it, and is not used.
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
from boltmesh.strategies.engine import MeshStrategy
from boltmesh.strategies.lightning_compat.loops import is_epoch_over, validation_follows

CHECK_EVERY_S = 0.25
"""Seconds between two reductions: short for a person, rare for a step."""
MOST_STEPS = 1000
PREFIX = "interrupted"


class GracefulStop(Checkpoint):
    """Ends training on all ranks after the same step, once one of them received a signal.

    A subclass of ``Checkpoint`` only because the Trainer calls those last: the checkpoint then has
    what all other callbacks did after the step.

    Args:
        switch: Records the signal of this rank.
        folder: Folder of the checkpoint; None for no checkpoint.
    """

    def __init__(self, switch: StopSwitch, folder: Path | None) -> None:
        self.folder = folder
        self._switch = switch
        self._step_before = 0
        self._steps = 0
        self._next_check = 1
        self._checked_at = (0, 0.0)
        self._stopped: StoppedBySignal | None = None

    @override
    def on_sanity_check_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # Lightning has just installed a handler that broadcasts at any point of the code.
        self._switch.install()

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._switch.install()
        self._switch.is_training = True
        self._step_before = trainer.global_step
        self._checked_at = (0, time.monotonic())

    @override
    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        # One hook after the checkpoint, so that loggers record the last step.
        if self._stopped is not None:
            self._switch.is_training = False
            raise self._stopped

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
        # Lightning does not count optimizer steps that manual optimization hides from it.
        if not has_stepped and (pl_module.automatic_optimization or trainer.global_step):
            return
        self._step_before = trainer.global_step
        self._steps += 1
        if self._steps < self._next_check:
            return
        signum, is_between_steps = self._reduce_signal(trainer)
        if signum and is_between_steps:
            checkpoint = self._save(trainer)
            self._stopped = StoppedBySignal(signum, step=trainer.global_step, checkpoint=checkpoint)

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._switch.is_training = False

    def _reduce_signal(self, trainer: Trainer) -> tuple[int, bool]:
        """Agree on the signal and on the next step to check. Collective over all ranks.

        Returns:
            The signal, 0 for none, and whether the run can end here: a run that resumes from a
            checkpoint before a validation, or before the end of an epoch, would skip it.
        """
        now, (steps, since) = time.monotonic(), self._checked_at
        step_s = (now - since) / max(1, self._steps - steps)
        must_go_on = is_epoch_over(trainer) or validation_follows(trainer)
        own = [float(self._switch.signum or 0), step_s, float(must_go_on)]
        if trainer.world_size > 1:
            agreed = torch.tensor(own, device=trainer.strategy.root_device)
            dist.all_reduce(agreed, op=dist.ReduceOp.MAX)
            own = agreed.tolist()
        signum, step_s, must_go_on = int(own[0]), own[1], bool(own[2])
        # Once the run is to end, the next step may be the last.
        interval = 1 if signum else int(CHECK_EVERY_S / max(step_s, 1e-9))
        # Steps may suddenly take longer.
        interval = max(1, min(interval, 2 * (self._steps - steps), MOST_STEPS))
        self._next_check = self._steps + interval
        self._checked_at = (self._steps, time.monotonic())
        return signum, not must_go_on

    def _save(self, trainer: Trainer) -> str | None:
        # fast_dev_run keeps no files.
        if self.folder is None or getattr(trainer, "fast_dev_run", False):
            return None
        path = self.folder / f"{PREFIX}-step={trainer.global_step}.ckpt"
        trainer.save_checkpoint(path, weights_only=False)
        if isinstance(trainer.strategy, MeshStrategy):
            trainer.strategy.finish_saving()  # before older ones are removed
        if trainer.is_global_zero:
            for older in self.folder.glob(f"{PREFIX}-step=*.ckpt"):
                if older != path:
                    with contextlib.suppress(OSError):
                        remove(older)
        return str(path)
