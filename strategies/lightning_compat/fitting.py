"""Where the loop that trains stands."""

from typing import Any

from lightning.pytorch import Trainer


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


def loggers_follow(trainer: Trainer) -> bool:
    """Whether loggers are given what the batch in work logs."""
    return bool(trainer._logger_connector.should_update_logs or getattr(trainer, "fast_dev_run", 0))
