"""The private names of Lightning that the strategies need, each with why, in one place.

Written for lightning 2.6. Public names are imported where they are used.
"""

import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.fabric.utilities.data import sized_len
from lightning.fabric.utilities.distributed import (
    _distributed_is_initialized as distributed_is_initialized,
)
from lightning.fabric.utilities.distributed import (
    _get_default_process_group_backend_for_device as default_backend,
)
from lightning.fabric.utilities.distributed import (
    _init_dist_connection as init_process_group,
)
from lightning.fabric.utilities.distributed import (
    _set_num_threads_if_needed,
)
from lightning.fabric.utilities.distributed import (
    _sync_ddp_if_available as all_reduce_copy,
)
from lightning.fabric.utilities.optimizer import _optimizers_to_device as optimizers_to_device
from lightning.fabric.utilities.seed import pl_worker_init_function, reset_seed
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loops.fetchers import _DataLoaderIterDataFetcher
from lightning.pytorch.overrides.distributed import _sync_module_states as sync_module_states
from lightning.pytorch.overrides.distributed import prepare_for_backward
from lightning.pytorch.plugins import MixedPrecision, Precision
from lightning.pytorch.plugins.io.wrapper import _WrappingCheckpointIO
from lightning.pytorch.strategies.ddp import _DDPForwardRedirection as DDPForwardRedirection
from lightning.pytorch.strategies.launchers import (
    _MultiProcessingLauncher,
    _SubprocessScriptLauncher,
)
from lightning.pytorch.trainer.connectors.data_connector import (
    _get_distributed_sampler,
    _request_dataloader,
)
from lightning.pytorch.trainer.states import RunningStage, TrainerFn
from lightning.pytorch.utilities.data import _update_dataloader
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch.utils.data import DataLoader
from typing_extensions import override

from boltmesh.process import describe_exit, wait_for_end_of_parent

if TYPE_CHECKING:
    from subprocess import Popen
    from types import FrameType

__all__ = [
    "DDPForwardRedirection",
    "MultiProcessingLauncher",
    "ScriptLauncher",
    "all_reduce_copy",
    "autocast_dtype",
    "batches_to_skip",
    "callbacks_of",
    "default_backend",
    "distributed_is_initialized",
    "draws_batches",
    "draws_from_iterator",
    "evaluation_batch_index",
    "evaluation_is_over",
    "evaluation_length",
    "forbid_inference_mode",
    "gives_last_batch",
    "has_norm_clipping",
    "hear_sigterm_once",
    "init_process_group",
    "is_epoch_over",
    "is_wrapping",
    "optimizers_to_device",
    "prefetched_batches",
    "prepare_for_backward",
    "rank_loader",
    "reads_gradients",
    "requested_loader",
    "reset_seed",
    "restart_fetching",
    "seed_workers",
    "step_arguments",
    "sync_module_states",
    "trainer_of",
    "training_loaders",
    "transferred_to_host",
    "uses_lightning_norm",
    "validation_follows",
    "watch_batches",
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
        os._exit(1)

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
        os._exit(1)

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


class _Once:
    """Hears a signal the first time and not again."""

    def __init__(self, handler: "Callable[[int, FrameType | None], Any]") -> None:
        self._handler = handler
        self._is_heard = False

    def __call__(self, signum: int, frame: "FrameType | None") -> None:
        if not self._is_heard:
            self._is_heard = True
            self._handler(signum, frame)


def hear_sigterm_once() -> None:
    """Make the fit's handler of SIGTERM deaf to a second one.

    The handler broadcasts, and rank 0 passes the signal on to the ranks that it started. When
    these were sent it as well (a scheduler signals whole jobs), they would broadcast twice, and
    each rank would wait for the other for good.
    """
    handler = signal.getsignal(signal.SIGTERM)
    if threading.current_thread() is not threading.main_thread():
        return
    if callable(handler) and not isinstance(handler, (_Once, signal.Handlers)):
        signal.signal(signal.SIGTERM, _Once(handler))


def is_wrapping(checkpoint_io: CheckpointIO) -> bool:
    """Whether a checkpoint plugin hands on to another one, as the asynchronous one does."""
    return isinstance(checkpoint_io, _WrappingCheckpointIO)


def trainer_of(module: LightningModule | None) -> Trainer | None:
    """The module's Trainer, None before it is attached (the public property raises then)."""
    return None if module is None else module._trainer


def training_loaders(trainer: Trainer) -> list[Any]:
    """The loaders of the fit loop as it iterates over them, after samplers were put in."""
    combined = trainer.fit_loop._combined_loader
    return [] if combined is None else list(combined.flattened)


def prefetched_batches(trainer: Trainer) -> int:
    """How many batches the fit loop has fetched and not yet used (loaders without a length)."""
    return len(getattr(trainer.fit_loop._data_fetcher, "batches", ()))


def is_epoch_over(trainer: Trainer) -> bool:
    """Whether the batch in work, or the last one done, is the last of its epoch."""
    return bool(trainer.fit_loop.epoch_loop._num_ready_batches_reached())


def validation_follows(trainer: Trainer) -> bool:
    """Whether the fit loop will validate before it trains on the next batch."""
    fetcher = trainer.fit_loop._data_fetcher
    return fetcher is not None and bool(trainer.fit_loop.epoch_loop._should_check_val_fx(fetcher))


def batches_to_skip(trainer: Trainer) -> int:
    """How many batches of the current epoch a restored fit loop has used."""
    loop = trainer.fit_loop
    if not loop.is_resuming and not loop.restarting:
        return 0
    used = int(loop.epoch_loop.batch_progress.current.ready)
    return 0 if loop.epoch_loop.batch_progress.is_last_batch else used


def restart_fetching(trainer: Trainer) -> None:
    """Make the fit loop ask its loaders for new iterators."""
    fetcher = trainer.fit_loop._data_fetcher
    if fetcher is not None:
        iter(fetcher)


def rank_loader(
    loader: DataLoader[Any], rank: int, num_replicas: int, stage: RunningStage
) -> DataLoader[Any]:
    """The loader that the Trainer would make of ``loader`` for one rank of a data axis."""
    sampler = _get_distributed_sampler(
        loader,
        shuffle=stage == RunningStage.TRAINING,
        overfit_batches=0,
        mode=stage,
        num_replicas=num_replicas,
        rank=rank,
    )
    return _update_dataloader(loader, sampler, mode=stage)


def uses_lightning_norm(plugin: Precision) -> bool:
    """Whether clipping by norm is Lightning's own, so that ours may take its place."""
    return type(plugin).clip_grad_by_norm is Precision.clip_grad_by_norm


def autocast_dtype(plugin: Precision) -> "torch.dtype | None":
    """Return what autocast computes in, None for precisions without autocast."""
    if not isinstance(plugin, MixedPrecision):
        return None
    return torch.bfloat16 if plugin.precision == "bf16-mixed" else torch.float16


_GRADIENT_HOOKS = (
    "on_after_backward",
    "on_before_optimizer_step",
    "on_before_zero_grad",
    "optimizer_step",
)


def reads_gradients(trainer: Trainer, module: LightningModule) -> bool:
    """Whether anything of the user's may look at ``.grad`` before an optimizer has stepped.

    A callback with the class attribute ``reads_gradients = False`` is taken at its word.
    """
    if trainer.gradient_clip_algorithm == "value":
        return True
    if getattr(trainer.precision_plugin, "scaler", None) is not None:
        return True
    if module_reads_gradients(module):
        return True
    return any(
        is_overridden(name, callback, Callback)
        for callback in _readers(trainer)
        for name in _GRADIENT_HOOKS[:3]
    )


def module_reads_gradients(module: LightningModule) -> bool:
    """Whether a module's own hooks may look at ``.grad`` before an optimizer has stepped."""
    hooks = (*_GRADIENT_HOOKS, "backward", "configure_gradient_clipping", "optimizer_zero_grad")
    is_automatic = module.automatic_optimization
    return not is_automatic or any(is_overridden(h, module, LightningModule) for h in hooks)


def module_keeps_gradients(module: LightningModule) -> bool:
    """Whether gradients of the step before are there until a module's own code zeroes them."""
    hooks = ("optimizer_zero_grad", "on_before_zero_grad")
    is_automatic = module.automatic_optimization
    return not is_automatic or any(is_overridden(h, module, LightningModule) for h in hooks)


def zeroes_gradients(trainer: Trainer) -> bool:
    """Whether the batch in work begins a step whose gradients Lightning's own code zeroes.

    It does so between forward and backward pass. False where a hook of the user's does it, or may
    look at what is there.
    """
    module = trainer.lightning_module
    if not trainer.training or module_keeps_gradients(module):
        return False
    if isinstance(trainer.fit_loop._data_fetcher, _DataLoaderIterDataFetcher):
        return False  # whose steps say nothing dependable of a batch's number
    if trainer.fit_loop.epoch_loop.batch_idx % trainer.accumulate_grad_batches:
        return False
    return not any(
        is_overridden("on_before_zero_grad", each, Callback) for each in _readers(trainer)
    )


def callbacks_of(trainer: Trainer) -> list[Callback]:
    """Return the callbacks; Lightning sets the attribute without declaring it."""
    return list(trainer.callbacks)  # type: ignore[attr-defined]


def _readers(trainer: Trainer) -> list[Callback]:
    """The callbacks that do not say of themselves that they look at no gradients."""
    return [each for each in callbacks_of(trainer) if getattr(each, "reads_gradients", True)]


def forbid_inference_mode(trainer: Trainer) -> None:
    """Make the evaluation loops use ``no_grad``.

    Tensors made under ``inference_mode`` are inference tensors for good, and gathered parameters
    are kept and written in place later.
    """
    for loop in (trainer.validate_loop, trainer.test_loop, trainer.predict_loop):
        loop.inference_mode = False


def has_norm_clipping(trainer: Trainer) -> bool:
    """Whether the Trainer clips gradients by their norm."""
    algorithm = trainer.gradient_clip_algorithm
    return bool(trainer.gradient_clip_val) and algorithm in {None, "norm"}


def _evaluating_loop(trainer: Trainer) -> Any:
    return trainer.predict_loop if trainer.predicting else trainer._evaluation_loop


def evaluation_length(trainer: Trainer) -> float:
    """Return how many batches this rank evaluates, infinity where nobody knows.

    Valid from the start of validation, test or prediction on.
    """
    loop = _evaluating_loop(trainer)
    if any(sized_len(each) is None for each in loop._combined_loader.flattened):
        return math.inf  # a limit says how many there are at most
    return float(sum(loop.max_batches))


def draws_batches(trainer: Trainer) -> bool:
    """Whether the steps of an evaluation take an iterator instead of a batch."""
    return isinstance(_evaluating_loop(trainer)._data_fetcher, _DataLoaderIterDataFetcher)


class _WatchedBatches:
    """An iterator over batches that says when it ends."""

    def __init__(
        self, batches: Iterator[Any], num_served: int, on_end: Callable[[int], None]
    ) -> None:
        self._batches, self._num_served, self._on_end = batches, num_served, on_end

    def __iter__(self) -> "_WatchedBatches":
        return self

    def __next__(self) -> Any:
        try:
            batch = next(self._batches)
        except StopIteration:
            self._on_end(self._num_served)
            raise
        self._num_served += 1
        return batch


def watch_batches(trainer: Trainer, on_end: Callable[[int], None]) -> None:
    """Call ``on_end`` with the number of batches given when an evaluation's loaders end.

    A loader may end before the length that it or a limit tells, which the loop learns only here.
    """
    fetcher = _evaluating_loop(trainer)._data_fetcher
    fetched_ahead = len(getattr(fetcher, "batches", ()))
    if fetcher.done and not fetched_ahead:
        on_end(0)  # it has looked already, and will not again
    fetcher.iterator = _WatchedBatches(fetcher.iterator, fetched_ahead, on_end)


def evaluation_is_over(trainer: Trainer) -> bool:
    """Whether the batch in work, or the last one done, is this rank's last of the evaluation."""
    fetcher = _evaluating_loop(trainer)._data_fetcher
    return fetcher is None or bool(fetcher.done)


def requested_loader(trainer: Trainer) -> Any:
    """What the user's hook gives for the loop that is about to run; a new one, as a rule."""
    if trainer.state.fn == TrainerFn.FITTING:
        return _request_dataloader(trainer.fit_loop._data_source)
    assert trainer.state.fn is not None
    loop: Any = {
        TrainerFn.VALIDATING: trainer.validate_loop,
        TrainerFn.TESTING: trainer.test_loop,
        TrainerFn.PREDICTING: trainer.predict_loop,
    }[trainer.state.fn]
    loaders = _request_dataloader(loop._data_source)
    # Evaluations run one loader after the other.
    return loaders[0] if isinstance(loaders, list | tuple) else loaders


def transferred_to_host(trainer: Trainer, batch: Any) -> Any:
    """A batch after the module's hooks around its transfer, on the CPU."""
    module = trainer.lightning_module
    batch = trainer.precision_plugin.convert_input(batch)
    batch = module._on_before_batch_transfer(batch, 0)
    return module._apply_batch_transfer_handler(batch, torch.device("cpu"), 0)


def step_arguments(module: LightningModule, step: str) -> tuple[int, ...]:
    """What the loops call a step with behind its batch, for the first batch of the first loader.

    The index of the batch and that of the loader are given where the step has them.
    """
    method = getattr(module, step)
    if not is_param_in_hook_signature(method, "batch_idx", min_args=2):
        return ()
    has_loader = is_param_in_hook_signature(method, "dataloader_idx", explicit=True)
    return (0, 0) if has_loader and step != "training_step" else (0,)


def draws_from_iterator(module: LightningModule, step: str) -> bool:
    """Whether a step takes an iterator over batches instead of a batch."""
    return is_param_in_hook_signature(getattr(module, step), "dataloader_iter", explicit=True)


def evaluation_batch_index(trainer: Trainer) -> int:
    """How many batches of this evaluation came before the one in work, over all its loaders."""
    return int(_evaluating_loop(trainer).batch_progress.current.ready) - 1


def gives_last_batch(trainer: Trainer) -> bool:
    """Whether the running loop's loaders have no batch after the one that was fetched last."""
    loop: Any = trainer.fit_loop if trainer.training else _evaluating_loop(trainer)
    return loop._data_fetcher is not None and bool(loop._data_fetcher.done)


def seed_workers(loader: object, rank: int) -> None:
    """Seed a loader's workers as the Trainer is about to, by another rank than the global one."""
    is_asked = int(os.environ.get("PL_SEED_WORKERS", "0"))
    if is_asked and isinstance(loader, DataLoader) and loader.worker_init_fn is None:
        loader.worker_init_fn = partial(pl_worker_init_function, rank=rank)
