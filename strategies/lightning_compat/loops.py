"""Lightning's loops: progress of training and evaluation, loaders, and arguments of steps."""

import math
import os
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, TypeVar

import torch
from lightning.fabric.utilities.data import _set_sampler_epoch, sized_len
from lightning.fabric.utilities.distributed import _DatasetSamplerWrapper
from lightning.fabric.utilities.seed import pl_worker_init_function
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.loggers import Logger
from lightning.pytorch.loops.fetchers import _DataLoaderIterDataFetcher
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.trainer.connectors.data_connector import (
    _get_distributed_sampler,
    _parse_num_batches,
    _request_dataloader,
)
from lightning.pytorch.trainer.states import RunningStage, TrainerFn
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from lightning.pytorch.utilities.data import _update_dataloader
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch.utils.data import DataLoader, Sampler

Result = TypeVar("Result")


def training_loaders(trainer: Trainer) -> list[Any]:
    """Return the loaders that the fit loop iterates over, with the Trainer's samplers."""
    combined = trainer.fit_loop._combined_loader
    return [] if combined is None else list(combined.flattened)


def prefetched_batches(trainer: Trainer) -> int:
    """Return the number of batches fetched ahead by the fit loop (loaders without a length)."""
    return len(getattr(trainer.fit_loop._data_fetcher, "batches", ()))


def ended_loaders(trainer: Trainer) -> list[bool]:
    """Return whether each training loader has ended in this epoch, restarted or exhausted.

    Shorter loaders restart beside longer ones; the epoch is over when all have ended.
    """
    iterator = getattr(trainer.fit_loop._combined_loader, "_iterator", None)
    ended = list(getattr(iterator, "_consumed", ()))
    return ended or [False] * len(training_loaders(trainer))


class _Announced:
    """An iterator over batches that calls a function before its first one."""

    def __init__(self, batches: Iterator[Any], call: Callable[[], None]) -> None:
        self._batches = batches
        self._call: Callable[[], None] | None = call

    def __iter__(self) -> "_Announced":
        return self

    def __next__(self) -> Any:
        if self._call is not None:
            self._call()
            self._call = None
        return next(self._batches)


def call_before_fetch(trainer: Trainer, call: Callable[[], None]) -> None:
    """Call once before the fit loop fetches its next batch."""
    fetcher = trainer.fit_loop._data_fetcher
    if fetcher is not None and fetcher.iterator is not None:
        fetcher.iterator = _Announced(fetcher.iterator, call)


def set_sampler_epochs(trainer: Trainer) -> None:
    """Set the present epoch in the samplers of training loaders, as the fit loop is about to."""
    progress: Any = trainer.fit_loop.epoch_progress.current
    for loader in training_loaders(trainer):
        _set_sampler_epoch(loader, progress.processed)


_SAMPLERS = (Sampler, _DatasetSamplerWrapper)


def own_generators(loader: Any) -> list[torch.Generator]:
    """Return the generators of a loader and its samplers, which are not in the process's state."""
    generators: list[torch.Generator] = []
    holders = [loader]
    for holder in holders:
        for value in getattr(holder, "__dict__", {}).values():
            if isinstance(value, torch.Generator) and all(value is not each for each in generators):
                generators.append(value)
            elif isinstance(value, _SAMPLERS) and all(value is not each for each in holders):
                holders.append(value)
    return generators


def is_epoch_over(trainer: Trainer) -> bool:
    """Whether the current batch, or the last one done, is the last of its epoch."""
    return bool(trainer.fit_loop.epoch_loop._num_ready_batches_reached())


def validation_follows(trainer: Trainer) -> bool:
    """Whether the fit loop will validate before it trains on the next batch."""
    fetcher = trainer.fit_loop._data_fetcher
    return fetcher is not None and bool(trainer.fit_loop.epoch_loop._should_check_val_fx(fetcher))


def batches_to_skip(trainer: Trainer) -> int:
    """Return how many batches of the current epoch a restored fit loop has used."""
    loop = trainer.fit_loop
    if not loop.is_resuming and not loop.restarting:
        return 0
    used = int(loop.epoch_loop.batch_progress.current.ready)
    return 0 if loop.epoch_loop.batch_progress.is_last_batch else used


def restart_fetching(trainer: Trainer) -> None:
    """Make the fit loop request new iterators from its loaders."""
    fetcher = trainer.fit_loop._data_fetcher
    if fetcher is not None:
        iter(fetcher)


def loggers_follow(trainer: Trainer) -> bool:
    """Whether loggers receive values that the current batch logs."""
    return bool(trainer._logger_connector.should_update_logs or getattr(trainer, "fast_dev_run", 0))


def log_step(trainer: Trainer, logger: Logger) -> None:
    """Pass the metrics of a finished step that Lightning has yet to log to one logger.

    No-op without such a step.
    """
    progress: Any = trainer.fit_loop.epoch_loop.batch_progress.current
    connector = trainer._logger_connector
    # A run that resumes after its last step has not begun one.
    has_begun = connector._first_loop_iter is not None
    if not trainer.training or not has_begun or progress.processed == progress.completed:
        return
    loggers, trainer.loggers = trainer.loggers, [logger]
    try:
        connector.update_train_step_metrics()
    finally:
        trainer.loggers = loggers


def agree_in_loops(trainer: Trainer, strategy: Strategy, kept: Mapping[str, float] | None) -> None:
    """Make ranks agree where the loops of a fit decide by rank-local values.

    ``ReduceLROnPlateau`` sees the mean over ranks of its monitored metric, which is collective. One
    that was logged without ``sync_dist`` differs by rank, and so would the learning rates with
    which ranks step one model.

    Args:
        trainer: The Trainer of a run that fits.
        strategy: Its strategy.
        kept: This rank's last values of metrics in the run that is resumed.
    """
    loop = trainer.fit_loop.epoch_loop
    monitored = partial(type(loop)._get_monitor_value, loop)
    averaged = partial(_averaged, monitored, strategy.reduce, kept)
    setattr(loop, "_get_monitor_value", averaged)  # noqa: B010
    interval = getattr(trainer, "_val_check_time_interval", None)
    if interval is not None and trainer.world_size > 1:
        # By the clock of each rank, some would validate and others train on.
        own = partial(type(loop)._should_check_val_fx, loop)
        agreed = partial(_agreed, own, strategy.reduce_boolean_decision)
        setattr(loop, "_should_check_val_fx", agreed)  # noqa: B010


def _agreed(own: Callable[[Any], bool], decide: Callable[..., bool], fetcher: Any) -> bool:
    return decide(own(fetcher), all=False)


def _averaged(
    own: Callable[[str], Any],
    average: Callable[[Any], Any],
    kept: Mapping[str, float] | None,
    key: str,
) -> Any:
    value = own(key)
    if value is None and kept and key in kept:
        value = torch.tensor(kept[key])
    return average(value.detach().clone()) if isinstance(value, torch.Tensor) else value


def monitored_values(trainer: Trainer) -> dict[str, float]:
    """Return this rank's last logged values of metrics monitored by ``ReduceLROnPlateau``."""
    keys = {config.monitor for config in trainer.lr_scheduler_configs if config.reduce_on_plateau}
    metrics = trainer.callback_metrics
    return {key: float(metrics[key]) for key in keys if key in metrics}


def begin_restart(trainer: Trainer) -> None:
    """Make a run that resumes after the last batch of a stream count batches from 0.

    Lightning detects the end of an epoch by its length, which a stream does not have.
    """
    loop = trainer.fit_loop
    progress = loop.epoch_loop.batch_progress
    if math.isinf(loop.max_batches) and progress.is_last_batch:
        loop.max_batches = progress.current.ready


def end_restart(trainer: Trainer) -> None:
    """Make the epoch in which a run resumes end like any other.

    Otherwise Lightning steps no ``ReduceLROnPlateau`` at its end, as the metric may be missing.
    """
    loop = trainer.fit_loop
    loop._restarting = False
    if loop._combined_loader is not None and sized_len(loop._combined_loader) is None:
        loop.max_batches = math.inf


def _evaluating_loop(trainer: Trainer) -> Any:
    return trainer.predict_loop if trainer.predicting else trainer._evaluation_loop


def evaluation_length(trainer: Trainer) -> float:
    """Return how many batches this rank evaluates; infinity if unknown.

    Valid after the start of validation, test or prediction.
    """
    loop = _evaluating_loop(trainer)
    if any(sized_len(each) is None for each in loop._combined_loader.flattened):
        return math.inf  # a limit is only an upper bound
    return float(sum(loop.max_batches))


def draws_batches(trainer: Trainer) -> bool:
    """Whether the steps of an evaluation take an iterator instead of a batch."""
    return isinstance(_evaluating_loop(trainer)._data_fetcher, _DataLoaderIterDataFetcher)


class _WatchedBatches:
    """An iterator over batches that reports its end."""

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

    A loader may end before its own length or a limit, which the loop only detects here.
    """
    fetcher = _evaluating_loop(trainer)._data_fetcher
    fetched_ahead = len(getattr(fetcher, "batches", ()))
    if fetcher.done and not fetched_ahead:
        on_end(0)  # the fetcher has reached the end, and will not read again
    fetcher.iterator = _WatchedBatches(fetcher.iterator, fetched_ahead, on_end)


def evaluation_is_over(trainer: Trainer) -> bool:
    """Whether the current batch, or the last one done, is this rank's last of the evaluation."""
    fetcher = _evaluating_loop(trainer)._data_fetcher
    return fetcher is None or bool(fetcher.done)


def evaluation_batch_index(trainer: Trainer) -> int:
    """Return the index of the current batch in this evaluation, over all its loaders."""
    return int(_evaluating_loop(trainer).batch_progress.current.ready) - 1


def gives_last_batch(trainer: Trainer) -> bool:
    """Whether the running loop's loaders have no batch after the one fetched last."""
    loop: Any = trainer.fit_loop if trainer.training else _evaluating_loop(trainer)
    return loop._data_fetcher is not None and bool(loop._data_fetcher.done)


def rank_loader(
    loader: DataLoader[Any], rank: int, num_replicas: int, stage: RunningStage
) -> DataLoader[Any]:
    """Return ``loader`` as the Trainer would prepare it for one rank of a data axis."""
    sampler = _get_distributed_sampler(
        loader,
        shuffle=stage == RunningStage.TRAINING,
        overfit_batches=0,
        mode=stage,
        num_replicas=num_replicas,
        rank=rank,
    )
    return _update_dataloader(loader, sampler, mode=stage)


def requested_loader(trainer: Trainer) -> Any:
    """Return the loader from the user's hook for the loop about to run; usually a new one."""
    if trainer.state.fn == TrainerFn.FITTING:
        return _request_dataloader(trainer.fit_loop._data_source)
    loaders = _request_dataloader(_evaluating_loop(trainer)._data_source)
    # Evaluations run one loader after the other.
    return loaders[0] if isinstance(loaders, list | tuple) else loaders


def show_loader(trainer: Trainer, loader: Any) -> None:
    """Show a loader and a number of batches to steps that run before the fit loop has them.

    Otherwise such a step would set up the loop, on this rank alone, to estimate a run's steps.
    """
    loop = trainer.fit_loop
    if trainer.state.fn != TrainerFn.FITTING or loop._combined_loader is not None:
        return
    combined = (
        loader
        if isinstance(loader, CombinedLoader)
        else CombinedLoader(loader, mode="max_size_cycle")
    )
    lengths = [sized_len(each) for each in combined.flattened]
    if None not in lengths:
        counts = [
            _parse_num_batches(RunningStage.TRAINING, each or 0, trainer.limit_train_batches)
            for each in lengths
        ]
        loop.max_batches = min(counts) if combined._mode == "min_size" else max(counts)
    loop._combined_loader = combined


def without_shown_loader(function: Callable[[Trainer], Result], trainer: Trainer) -> Result:
    """Call a function of a Trainer, and undo a ``show_loader`` that it made."""
    loop = trainer.fit_loop
    before = loop._combined_loader, loop.max_batches
    try:
        return function(trainer)
    finally:
        loop._combined_loader, loop.max_batches = before


def transferred_to_host(trainer: Trainer, batch: Any) -> Any:
    """Return a batch after the module's hooks around its transfer, on the CPU."""
    module = trainer.lightning_module
    batch = trainer.precision_plugin.convert_input(batch)
    batch = module._on_before_batch_transfer(batch, 0)
    return module._apply_batch_transfer_handler(batch, torch.device("cpu"), 0)


def step_arguments(module: LightningModule, step: str) -> tuple[int, ...]:
    """Return a step's further arguments after its batch, for the first batch of the first loader.

    The indices of the batch and of the loader, if the step takes them.
    """
    method = getattr(module, step)
    if not is_param_in_hook_signature(method, "batch_idx", min_args=2):
        return ()
    has_loader = is_param_in_hook_signature(method, "dataloader_idx", explicit=True)
    return (0, 0) if has_loader and step != "training_step" else (0,)


def draws_from_iterator(module: LightningModule, step: str) -> bool:
    """Whether a step takes an iterator over batches instead of a batch."""
    return is_param_in_hook_signature(getattr(module, step), "dataloader_iter", explicit=True)


def seed_workers(loader: object, rank: int) -> None:
    """Seed a loader's workers as the Trainer is about to, by another rank than the global one."""
    is_asked = int(os.environ.get("PL_SEED_WORKERS", "0"))
    if is_asked and isinstance(loader, DataLoader) and loader.worker_init_fn is None:
        loader.worker_init_fn = partial(pl_worker_init_function, rank=rank)


def begins_step(trainer: Trainer) -> bool:
    """Whether the next batch is the first of those whose gradients one step accumulates."""
    done: Any = trainer.fit_loop.epoch_loop.batch_progress.current
    return not done.ready % trainer.accumulate_grad_batches


def batches_to_break(trainer: Trainer) -> float:
    """Return how many batches follow the current one until the epoch ends or validation begins.

    Infinity if unknown.
    """
    loop = trainer.fit_loop.epoch_loop
    left = float(trainer.num_training_batches) - loop.batch_progress.current.ready
    every = trainer.val_check_batch
    if every and math.isfinite(every) and loop._should_check_val_epoch():
        is_over_epochs = trainer.check_val_every_n_epoch is None
        number = loop.total_batch_idx if is_over_epochs else loop.batch_idx
        left = min(left, every - (number + 1) % every)
    return left
