"""Starting the ranks of this host, and ending all of them when one dies.

Ending a run on SIGTERM, and saving it when SLURM announces the end of its time.
"""

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from lightning.fabric.plugins import ClusterEnvironment
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.fabric.utilities.distributed import _set_num_threads_if_needed
from lightning.pytorch import Trainer
from lightning.pytorch.strategies.launchers import (
    _MultiProcessingLauncher,
    _SubprocessScriptLauncher,
)
from lightning.pytorch.trainer.connectors.signal_connector import _HandlersCompose
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import SIGTERMException
from typing_extensions import override

from boltmesh.process import describe_exit, end_process, wait_for_end_of_parent

if TYPE_CHECKING:
    from subprocess import Popen
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


_PARENT = "BOLTMESH_LAUNCHER_PID"


_POLL_S = 0.3


_GRACE_S = 3.0


class ScriptLauncher(_SubprocessScriptLauncher):
    """Runs the script again for the other ranks of this host, and ends all when one dies.

    Lightning's own observer looks every five seconds and kills its process without a word; this
    one names the rank that went first, within a second. Ranks whose parent dies, end with it.
    """

    on_death: Callable[[int, int | None], None] | None = None
    """Called with the local rank that went first and its exit code, None where that is unknown."""

    def __init__(
        self, cluster_environment: ClusterEnvironment, num_processes: int, num_nodes: int
    ) -> None:
        super().__init__(cluster_environment, num_processes, num_nodes)
        self._naming = threading.Lock()
        self._is_named = False

    def __getstate__(self) -> dict[str, Any]:
        # Users copy Trainers, and a lock cannot be copied.
        return {key: value for key, value in vars(self).items() if key != "_naming"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _naming=threading.Lock())

    @override
    def launch(
        self,
        function: Callable[..., Any],
        *args: Any,
        trainer: Trainer | None = None,
        **kwargs: Any,
    ) -> Any:
        self.cluster_environment.validate_settings(
            num_devices=self.num_processes, num_nodes=self.num_nodes
        )
        if not self.cluster_environment.creates_processes_externally:
            os.environ[_PARENT] = str(os.getpid())
            self._call_children_scripts()
            threading.Thread(target=self._watch, name="boltmesh-ranks", daemon=True).start()
        elif os.environ.get(_PARENT) == str(os.getppid()):
            parent = threading.Thread(
                target=self._watch_parent, name="boltmesh-parent", daemon=True
            )
            parent.start()
        _set_num_threads_if_needed(num_processes=self.num_processes)
        try:
            return function(*args, **kwargs)
        except BaseException:
            # This rank may have failed because it lost a peer, and then says only that.
            self._name_first_death(within_s=_POLL_S)
            raise

    def _watch_parent(self) -> None:
        wait_for_end_of_parent()
        if self.on_death is not None:
            self.on_death(0, None)
        end_process(1)

    def _watch(self) -> None:
        while not self._name_first_death():
            if all(process.poll() == 0 for process in self.procs):
                return
            time.sleep(_POLL_S)
        # A rank that failed by an exception leaves its peers with an error of their own to
        # report; one that is stuck in a collective never gets there.
        time.sleep(_GRACE_S)
        for process in self.procs:
            if process.poll() is None:
                process.kill()
        sys.stdout.flush()
        end_process(1)

    def _name_first_death(self, *, within_s: float = 0.0) -> bool:
        """Say once which rank went first. False when all are alive or ended well."""
        deadline = time.monotonic() + within_s
        with self._naming:
            while not self._is_named:
                codes = [process.poll() for process in self.procs]
                first = next((rank for rank, code in enumerate(codes, start=1) if code), None)
                if first is not None:
                    self._is_named = True
                    self._name(first, self.procs[first - 1])
                elif time.monotonic() >= deadline:
                    return False
                else:
                    time.sleep(_POLL_S / 10)
        return True

    def _name(self, local_rank: int, process: "Popen[bytes]") -> None:
        how = describe_exit(process.returncode)
        print(  # noqa: T201 - the logging of a process about to end cannot be trusted to flush
            f"boltmesh: local rank {local_rank} (pid {process.pid}) {how}; ending the other ranks.",
            file=sys.stderr,
            flush=True,
        )
        if self.on_death is not None:
            self.on_death(local_rank, process.returncode)


class MultiProcessingLauncher(_MultiProcessingLauncher):
    """Hands the main process whole parameters, where ranks have parts of them."""

    @override
    def _collect_rank_zero_results(self, trainer: Trainer, results: Any) -> Any:
        module = trainer.lightning_module
        state_dict = module.state_dict

        def whole_state_dict() -> dict[str, Any]:
            if trainer.state.fn != TrainerFn.FITTING:
                return {}  # the main process has what was evaluated
            strategy: Any = self._strategy
            whole: dict[str, Any] = strategy.whole_state(state_dict)
            return whole

        vars(module)["state_dict"] = whole_state_dict  # all ranks ask, before the first one saves
        try:
            return super()._collect_rank_zero_results(trainer, results)
        finally:
            del vars(module)["state_dict"]
