"""Launchers that end all ranks of this host if one dies, and handling of SIGTERM in a run.

``RankErrors`` shows the errors of the ranks that a script has started, with the first cause last
on the screen. Each failing rank leaves a report for the process that started it, and its traceback
in a file. That process shows the traceback of the rank that failed first, followed by one line
that says what failed and where the tracebacks of the other ranks are.
"""

import atexit
import contextlib
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist
from lightning.fabric.plugins import ClusterEnvironment
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.fabric.utilities.distributed import _set_num_threads_if_needed
from lightning.fabric.utilities.imports import _IS_INTERACTIVE
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.strategies.launchers import (
    _MultiProcessingLauncher,
    _SubprocessScriptLauncher,
)
from lightning.pytorch.trainer.connectors.signal_connector import _HandlersCompose
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import SIGTERMException
from typing_extensions import override

from boltmesh.errors import ConfigError
from boltmesh.process import describe_exit, end_process, wait_for_end_of_parent
from boltmesh.rank_reports import (
    Report,
    make_report_folder,
    read_reports,
    report_of_error,
    store_traceback,
    write_report,
)
from boltmesh.strategies.lightning_compat.loops import begins_step
from boltmesh.strategies.patch import patched
from boltmesh.strategies.process_groups import temporary_group

if TYPE_CHECKING:
    from types import FrameType

_FOLDER = "BOLTMESH_RANK_REPORTS"
_REPORTS_POLL_S = 0.03


class RankErrors:
    """Reports from the ranks that a script's process starts to that process.

    Args:
        rank: Global rank of this process.
        log_folder: Folder for tracebacks; if it does not exist, the temporary folder is used.
    """

    def __init__(self, rank: int, log_folder: str | os.PathLike[str]) -> None:
        is_local = os.path.isdir(log_folder)
        self.rank = rank
        self.log_folder = Path(log_folder if is_local else tempfile.gettempdir()).absolute()

    @staticmethod
    def open_folder() -> None:
        """Create a folder for reports, which processes that are started later inherit."""
        os.environ[_FOLDER] = str(make_report_folder())
        atexit.register(RankErrors.remove_folder, of=os.getpid())

    @staticmethod
    def remove_folder(of: int | None = None) -> None:
        """Remove the folder of reports, at the end of the process that created it.

        Args:
            of: Id of that process: a fork of it also runs its exit functions, and removes nothing.
        """
        folder = os.environ.get(_FOLDER)
        if folder is not None and of in (None, os.getpid()):
            shutil.rmtree(folder, ignore_errors=True)

    def report(self, error: Exception) -> None:
        """Write a report for the process that started this one, which shows it."""
        report = report_of_error(error, rank=self.rank, run_folder=self.log_folder)
        store_traceback(report)
        with contextlib.suppress(FileNotFoundError):  # that process showed its own error and ended
            write_report(Path(os.environ[_FOLDER]), report)
        _hide(error)

    def show(self, error: Exception, find_death: Callable[[], str | None], within_s: float) -> None:
        """Show which rank failed first; hide this process's error if it is a consequence.

        Args:
            error: The error that ends this process.
            find_death: Returns a text that names a rank that died without a report, else None.
            within_s: Seconds to wait for the cause of an error that names a lost peer.
        """
        own = report_of_error(error, rank=self.rank, run_folder=self.log_folder)
        deadline = time.monotonic() + within_s
        while True:
            first, death = self._first_cause(), find_death()
            is_known = first is not None or death is not None
            if own.kind != "consequence" or is_known or time.monotonic() >= deadline:
                break
            time.sleep(_REPORTS_POLL_S)
        if own.kind != "consequence" and (
            first is None or own.time_ns < first.time_ns or own.message == first.message
        ):
            if first is not None:
                _print(f"boltmesh: tracebacks of other ranks: {self.logs}")
            return
        if first is None and death is None:
            return
        store_traceback(own)
        self.show_first(death or "")
        _hide(error)

    def show_first(self, death: str) -> None:
        """Show the report of the rank that failed first, or which rank died.

        Args:
            death: Text that names a rank that died without a report.
        """
        first = self._first_cause()
        if first is None:
            line = death
        else:
            _print(first.traceback.rstrip())
            line = f"rank {first.rank} failed: {first.message}"
        _print(f"boltmesh: {line.rstrip('.')}. Tracebacks of other ranks: {self.logs}")

    @property
    def logs(self) -> Path:
        """Pattern of the paths of all tracebacks."""
        return self.log_folder / "error-rank-*.txt"

    @staticmethod
    def _first_cause() -> Report | None:
        """Return the first report of a rank that failed by itself."""
        reports = read_reports(Path(os.environ[_FOLDER])).values()
        causes = [each for each in reports if each.kind in {"user", "failure"}]
        return min(causes, key=lambda each: each.time_ns, default=None)


def _hide(error: Exception) -> None:
    """Suppress the traceback of an error that ends this process."""
    before = sys.excepthook

    def hook(
        kind: type[BaseException], value: BaseException, traceback: TracebackType | None
    ) -> None:
        if value is not error:
            before(kind, value, traceback)

    sys.excepthook = hook


def _print(text: str) -> None:
    # The logging of a process about to end cannot be trusted to flush.
    print(text, file=sys.stderr, flush=True)  # noqa: T201


class SigtermAgreement:
    """Ends a run after SIGTERM, on all ranks before the same batch.

    Lightning's handler broadcasts at any point in the code, and its loop broadcasts before every
    batch. A rank that is already in the loop's broadcast pairs it with the handler's, and then each
    rank waits in another collective forever. Here the handler only sets a flag, and the ranks
    exchange their flags before a batch: if one rank received the signal, all of them end.

    SLURM's signal to save and requeue is handled likewise. Lightning saves in the handler, at any
    point in the code: ranks would wait for each other forever or write shards of different steps,
    and a single rank would record a batch as used that it has not trained on, or half a step. Here
    all ranks, even a single one, save before the same batch, with which a new step begins.

    Args:
        trainer: The Trainer of the run.
        take_flags: Returns the maximum over all ranks of ``flags`` since its last call, equal on
            all ranks, if they already exchange them at the end of a batch. None: flags are
            reduced before each batch; on GPUs the result is used one batch later.
    """

    def __init__(
        self, trainer: Trainer, take_flags: Callable[[], tuple[float, ...]] | None = None
    ) -> None:
        self._trainer = trainer
        self._take_flags = take_flags
        self._has_sigterm = False
        self._requeue = 0
        """SLURM's signal after it was received, else 0."""
        self._is_saving = False
        self._host_group: dist.ProcessGroup | None = None
        """A gloo group of all ranks; None before the first batch, and on the CPU."""
        self._reduced: tuple[dist.Work, torch.Tensor] | None = None

    def begin(self) -> None:
        """Replace Lightning's handler and the broadcast of its loop.

        Call it on all ranks before a loop; further calls change nothing. Handlers that are not
        Lightning's, such as that of ``boltmesh fit``, stay.
        """
        loop: Any = self._trainer.fit_loop.epoch_loop
        connector = self._trainer._signal_connector
        if self._trainer.world_size > 1:
            loop._broadcast_sigterm_tensor = self._reduce_flags
            _replace_handler(signal.SIGTERM, connector._sigterm_notifier_fn, self._on_sigterm)
        else:
            loop.advance = self._advance  # one rank exchanges no flags
        environment = self._trainer._accelerator_connector.cluster_environment
        is_fitting = self._trainer.state.fn == TrainerFn.FITTING
        if is_fitting and isinstance(environment, SLURMEnvironment) and environment.requeue_signal:
            requeue = connector._slurm_sigusr_handler_fn
            _replace_handler(environment.requeue_signal, requeue, self._on_requeue)

    @contextlib.contextmanager
    def saving(self) -> Iterator[None]:
        """Context in which SIGTERM ends the run only after a save outside of training."""
        with patched(self, _is_saving=True):
            yield
        if self._has_sigterm and not self._trainer.training:
            raise SIGTERMException(128 + signal.SIGTERM)

    def end(self) -> None:
        """Restore the loop. Lightning itself removes its handler."""
        self._drop_reduced()
        loop: Any = self._trainer.fit_loop.epoch_loop
        for name in ("_broadcast_sigterm_tensor", "advance"):
            loop.__dict__.pop(name, None)

    def _on_sigterm(self, signum: int, frame: "FrameType | None") -> None:
        trainer = self._trainer
        if not self._has_sigterm and trainer.strategy.launcher is not None:
            trainer.strategy.launcher.kill(signum)  # forwards it to the ranks that it started
        self._has_sigterm = True
        if not trainer.training and not self._is_saving:
            # Nothing is lost, and loops that do not train exchange no flags.
            raise SIGTERMException(128 + signum)

    def _on_requeue(self, signum: int, frame: "FrameType | None") -> None:
        self._requeue = signum

    def flags(self) -> tuple[float, float]:
        """Return whether this rank received SIGTERM (0 or 1), and SLURM's signal or 0."""
        return float(self._has_sigterm), float(self._requeue)

    def _reduce_flags(self) -> None:
        """Save or end the run if any rank received a signal. Collective over all ranks."""
        trainer = self._trainer
        if self._take_flags is not None:
            must_end, requeue = map(int, self._take_flags())
        elif trainer.strategy.root_device.type == "cpu":
            flags = torch.tensor(self.flags())
            dist.all_reduce(flags, dist.ReduceOp.MAX)
            must_end, requeue = map(int, flags.tolist())
        else:
            must_end, requeue = map(int, self._reduce_on_host())
        if requeue:
            self._save_and_requeue(requeue)
        if must_end:
            trainer._signal_connector.received_sigterm = True
            raise SIGTERMException(128 + signal.SIGTERM)

    def _save_and_requeue(self, signum: int) -> None:
        """Save and requeue as Lightning's handler does, unless a step has accumulated gradients.

        Checkpoints do not contain these. The rank that received the signal then keeps its flag.
        """
        trainer = self._trainer
        if begins_step(trainer):
            self._requeue = 0
            self._drop_reduced()  # flags that tell it again
            trainer._signal_connector._slurm_sigusr_handler_fn(signum, None)  # type: ignore[arg-type]

    def _advance(self, fetcher: object) -> None:
        """Run the loop's next batch; save before it if this one rank received SLURM's signal."""
        if self._requeue:
            self._save_and_requeue(self._requeue)
        loop: Any = self._trainer.fit_loop.epoch_loop
        type(loop).advance(loop, fetcher)

    def _drop_reduced(self) -> None:
        if self._reduced is not None:
            self._reduced[0].wait()
            self._reduced = None

    def _reduce_on_host(self) -> list[float]:
        """Return the maximum of the last batch's flags; start to reduce the present ones.

        A reduction on a GPU would make the host wait for all kernels of the last batch.
        """
        if self._host_group is None:
            group = dist.new_group(backend="gloo")
            self._host_group = temporary_group(group, self._trainer.strategy)
        before, flags = self._reduced, torch.tensor(self.flags())
        work = dist.all_reduce(flags, dist.ReduceOp.MAX, group=self._host_group, async_op=True)
        assert work is not None
        self._reduced = work, flags
        if before is None:
            return [0.0, 0.0]
        before[0].wait()
        return before[1].tolist()


def _replace_handler(signum: int, old: object, new: Callable[[int, Any], None]) -> None:
    """Replace one of the handlers that Lightning calls on a signal."""
    composed = signal.getsignal(signum)
    if isinstance(composed, _HandlersCompose):
        composed.signal_handlers = [
            new if handler == old else handler for handler in composed.signal_handlers
        ]


_PARENT = "BOLTMESH_LAUNCHER_PID"
_POLL_S = 0.3
_GRACE_S = 3.0
_UNWIND_S = 30.0
"""Seconds for this process to end by its own error."""


def _refuse_in_notebook(start_method: str) -> None:
    """Refuse to start ranks from a script if there is none. Lightning would suggest its own DDP.

    Raises:
        ConfigError: Naming the option to set.
    """
    if _IS_INTERACTIVE and start_method != "fork":
        raise ConfigError(
            f"start_method={start_method!r} starts ranks from a script, and this is a notebook or "
            f"a prompt. Give the strategy start_method='fork', as in "
            f"strategy=ZeROStrategy(stage=3, start_method='fork'), before anything uses a GPU, or "
            f"run a script."
        )


class ScriptLauncher(_SubprocessScriptLauncher):
    """Runs the script again for the other ranks of this host, and ends all if one dies.

    Lightning's own observer polls every five seconds and kills its process with no message; this
    one shows the first rank that failed, last on the screen (``RankErrors``). A rank whose
    parent dies ends with it.
    """

    on_death: Callable[[int, int | None], None] | None = None
    """Called with the first local rank that died and its exit code, None if unknown."""

    def __init__(
        self, cluster_environment: ClusterEnvironment, num_processes: int, num_nodes: int
    ) -> None:
        _refuse_in_notebook("popen")
        super().__init__(cluster_environment, num_processes, num_nodes)
        self._deaths = threading.Lock()
        self._first_death: str | None = None
        self._is_shown = False

    def __getstate__(self) -> dict[str, Any]:
        # Users copy Trainers; a lock cannot be copied.
        return {key: value for key, value in vars(self).items() if key != "_deaths"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _deaths=threading.Lock())

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
        errors = (
            None if trainer is None else RankErrors(trainer.global_rank, trainer.default_root_dir)
        )
        if not self.cluster_environment.creates_processes_externally:
            os.environ[_PARENT] = str(os.getpid())
            RankErrors.open_folder()
            self._call_children_scripts()
            threading.Thread(
                target=self._watch, args=(errors,), name="boltmesh-ranks", daemon=True
            ).start()
        elif os.environ.get(_PARENT) == str(os.getppid()):
            parent = threading.Thread(
                target=self._watch_parent, name="boltmesh-parent", daemon=True
            )
            parent.start()
        _set_num_threads_if_needed(num_processes=self.num_processes)
        try:
            return function(*args, **kwargs)
        except Exception as error:
            if errors is not None and self.procs:
                errors.show(error, self._find_death, within_s=_POLL_S)
                self._is_shown = True
            elif errors is not None and os.environ.get(_PARENT) == str(os.getppid()):
                errors.report(error)
            raise

    def _watch_parent(self) -> None:
        wait_for_end_of_parent()
        if self.on_death is not None:
            self.on_death(0, None)
        end_process(1)

    def _watch(self, errors: RankErrors | None) -> None:
        while self._find_death() is None:
            if all(process.poll() == 0 for process in self.procs):
                return
            time.sleep(_POLL_S)
        # Ranks that lost a peer get time to report their own error; one that hangs in a collective
        # never does.
        noticed = time.monotonic()
        while time.monotonic() - noticed < (_UNWIND_S if self._is_shown else _GRACE_S):
            time.sleep(_POLL_S)
        for process in self.procs:
            if process.poll() is None:
                process.kill()
        if errors is not None and not self._is_shown:
            errors.show_first(self._first_death or "")
        RankErrors.remove_folder()
        sys.stdout.flush()
        end_process(1)

    def _find_death(self) -> str | None:
        """Return a text that names the rank that died first; None if none has failed."""
        with self._deaths:
            if self._first_death is None:
                codes = [process.poll() for process in self.procs]
                first = next((rank for rank, code in enumerate(codes, start=1) if code), None)
                if first is not None:
                    process = self.procs[first - 1]
                    how = describe_exit(process.returncode)
                    self._first_death = f"local rank {first} (pid {process.pid}) {how}"
                    if self.on_death is not None:
                        self.on_death(first, process.returncode)
        return self._first_death


class MultiProcessingLauncher(_MultiProcessingLauncher):
    """Returns full parameters to the main process, also if ranks hold shards."""

    def __init__(
        self, strategy: ParallelStrategy, start_method: Literal["spawn", "fork", "forkserver"]
    ) -> None:
        _refuse_in_notebook(start_method)
        super().__init__(strategy, start_method=start_method)

    @override
    def _collect_rank_zero_results(self, trainer: Trainer, results: Any) -> Any:
        module = trainer.lightning_module
        state_dict = module.state_dict

        def whole_state_dict() -> dict[str, Any]:
            if trainer.state.fn != TrainerFn.FITTING:
                return {}  # the main process has the evaluated parameters
            strategy: Any = self._strategy
            whole: dict[str, Any] = strategy.checkpoints.whole_state(state_dict)
            return whole

        with patched(module, state_dict=whole_state_dict):  # all ranks call it, then rank 0 saves
            return super()._collect_rank_zero_results(trainer, results)
