"""Ending a run on SIGTERM."""

import signal
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from lightning.pytorch import Trainer
from lightning.pytorch.trainer.connectors.signal_connector import _HandlersCompose
from lightning.pytorch.utilities.exceptions import SIGTERMException

if TYPE_CHECKING:
    from types import FrameType


class SigtermAgreement:
    """How the ranks of a run agree to end after SIGTERM: all before the same batch.

    Lightning's handler broadcasts from wherever the signal finds a rank, and its loop broadcasts
    before every batch. A rank that stands in the loop's broadcast already takes the handler's for
    it, and each rank then waits for another collective for good. Here the handler only makes a
    note, and the loop's question is put to all ranks: whichever was told, all of them leave.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._is_told = False

    def begin(self) -> None:
        """Take the place of Lightning's handler and of its loop's question.

        On all ranks before a loop; more than once is as good as once. Another one's handler, such
        as that of ``boltmesh fit``, stays.
        """
        loop: Any = self._trainer.fit_loop.epoch_loop
        loop._broadcast_sigterm_tensor = self._ask
        notify = self._trainer._signal_connector._sigterm_notifier_fn
        composed = signal.getsignal(signal.SIGTERM)
        if isinstance(composed, _HandlersCompose):
            composed.signal_handlers = [
                self._hear if each == notify else each for each in composed.signal_handlers
            ]

    def end(self) -> None:
        """Leave the loop as it was. Lightning itself takes its handler away."""
        loop: Any = self._trainer.fit_loop.epoch_loop
        loop.__dict__.pop("_broadcast_sigterm_tensor", None)

    def _hear(self, signum: int, frame: "FrameType | None") -> None:
        trainer = self._trainer
        if not self._is_told and trainer.strategy.launcher is not None:
            trainer.strategy.launcher.kill(signum)  # hands it on to the ranks that it started
        self._is_told = True
        if not trainer.training:
            # Nothing is lost, and loops that train nothing ask nobody.
            raise SIGTERMException(128 + signum)

    def _ask(self) -> None:
        """End the run when any rank was told to. Collective over all ranks."""
        told = torch.tensor(int(self._is_told), device=self._trainer.strategy.root_device)
        dist.all_reduce(told, dist.ReduceOp.MAX)
        if told.item():
            self._trainer._signal_connector.received_sigterm = True
            raise SIGTERMException(128 + signal.SIGTERM)
