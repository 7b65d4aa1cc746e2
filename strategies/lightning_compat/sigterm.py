"""Ending a run on SIGTERM, and saving it when SLURM announces the end of its time."""

import contextlib
import signal
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.pytorch import Trainer
from lightning.pytorch.trainer.connectors.signal_connector import _HandlersCompose
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import SIGTERMException

if TYPE_CHECKING:
    from types import FrameType


class SigtermAgreement:
    """How the ranks of a run agree to end after SIGTERM: all before the same batch.

    Lightning's handler broadcasts from wherever the signal finds a rank, and its loop broadcasts
    before every batch. A rank that stands in the loop's broadcast already takes the handler's for
    it, and each rank then waits for another collective for good. Here the handler only makes a
    note, and the loop's question is put to all ranks: whichever was told, all of them leave.

    SLURM's signal to save and go back into the queue is agreed on with it. Lightning saves in the
    handler, wherever the signal finds the rank: ranks would wait for each other for good there, or
    write shards of different steps. Here all save before the same batch.

    Args:
        trainer: Of the run.
        heard: Gives the largest of what ranks have told each other by ``told`` since it was asked
            last, alike on all ranks, where they do that anyway at the end of a batch; else they are
            asked before each.
    """

    def __init__(
        self, trainer: Trainer, heard: Callable[[], tuple[float, ...]] | None = None
    ) -> None:
        self._trainer = trainer
        self._heard = heard
        self._is_told = False
        self._requeue = 0
        """SLURM's signal, once it has come."""
        self._is_saving = False

    def begin(self) -> None:
        """Take the place of Lightning's handler and of its loop's question.

        On all ranks before a loop; more than once is as good as once. Another one's handler, such
        as that of ``boltmesh fit``, stays.
        """
        loop: Any = self._trainer.fit_loop.epoch_loop
        loop._broadcast_sigterm_tensor = self._ask
        connector = self._trainer._signal_connector
        _exchange(signal.SIGTERM, connector._sigterm_notifier_fn, self._hear)
        environment = self._trainer._accelerator_connector.cluster_environment
        is_fitting = self._trainer.state.fn == TrainerFn.FITTING
        if is_fitting and isinstance(environment, SLURMEnvironment) and environment.requeue_signal:
            requeue = connector._slurm_sigusr_handler_fn
            _exchange(environment.requeue_signal, requeue, self._hear_requeue)

    @contextlib.contextmanager
    def saving(self) -> Iterator[None]:
        """Let a save come to its end that SIGTERM would break off, where nothing is trained."""
        self._is_saving = True
        try:
            yield
        finally:
            self._is_saving = False
        if self._is_told and not self._trainer.training:
            raise SIGTERMException(128 + signal.SIGTERM)

    def end(self) -> None:
        """Leave the loop as it was. Lightning itself takes its handler away."""
        loop: Any = self._trainer.fit_loop.epoch_loop
        loop.__dict__.pop("_broadcast_sigterm_tensor", None)

    def _hear(self, signum: int, frame: "FrameType | None") -> None:
        trainer = self._trainer
        if not self._is_told and trainer.strategy.launcher is not None:
            trainer.strategy.launcher.kill(signum)  # hands it on to the ranks that it started
        self._is_told = True
        if not trainer.training and not self._is_saving:
            # Nothing is lost, and loops that train nothing ask nobody.
            raise SIGTERMException(128 + signum)

    def _hear_requeue(self, signum: int, frame: "FrameType | None") -> None:
        self._requeue = signum

    def told(self) -> tuple[float, float]:
        """Return whether this rank was told to end, and SLURM's signal if that has come."""
        return float(self._is_told), float(self._requeue)

    def _ask(self) -> None:
        """Save or end the run when any rank was told to. Collective over all ranks."""
        trainer = self._trainer
        if self._heard is None:
            told = torch.tensor(self.told(), device=trainer.strategy.root_device)
            dist.all_reduce(told, dist.ReduceOp.MAX)
            must_end, requeue = map(int, told.tolist())
        else:
            must_end, requeue = map(int, self._heard())
        if requeue:
            self._requeue = 0
            trainer._signal_connector._slurm_sigusr_handler_fn(requeue, None)  # type: ignore[arg-type]
        if must_end:
            trainer._signal_connector.received_sigterm = True
            raise SIGTERMException(128 + signal.SIGTERM)


def _exchange(signum: int, old: object, new: Callable[[int, Any], None]) -> None:
    """Put one handler in the place of another, among those that Lightning calls on a signal."""
    composed = signal.getsignal(signum)
    if isinstance(composed, _HandlersCompose):
        composed.signal_handlers = [
            new if each == old else each for each in composed.signal_handlers
        ]
