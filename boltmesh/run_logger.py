"""The logger of a run: metrics.csv and hparams.yaml, which never end the training."""

import os
import shutil
from argparse import Namespace
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities import rank_zero_only
from typing_extensions import override

from boltmesh.process import write_stderr
from boltmesh.strategies.checkpoint.atomic_replace import PARTIAL
from boltmesh.strategies.lightning_compat.loops import log_step
from boltmesh.telemetry.redaction import holds_secret

PRIVATE = 0o600


class RunLogger(CSVLogger):
    """Lightning's ``CSVLogger``, for files that a full disk or a quota may not take.

    Rows that cannot be written are kept, and written with the next ones. ``hparams.yaml`` is
    readable by its owner alone if it holds secrets. A row that is logged twice is written once.
    """

    _has_warned = False
    _last_row: tuple[str, int | None] | None = None

    @override
    @rank_zero_only
    def log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:
        row = repr(metrics), step  # as text, in which NaN equals NaN
        if step is None or row != self._last_row:
            super().log_metrics(metrics, step)
        self._last_row = row

    @override
    @rank_zero_only
    def save(self) -> None:
        writer = self.experiment
        path = Path(str(writer.metrics_file_path))
        size = path.stat().st_size if path.exists() else None
        rows, columns = list(writer.metrics), list(writer.metrics_keys)
        draft = path.with_name(path.name + PARTIAL)
        has_new_columns = size is not None and not set().union(*rows) <= set(columns)
        try:
            if has_new_columns:  # the whole file is written again, and a kill may come meanwhile
                shutil.copyfile(path, draft)
                writer.metrics_file_path = str(draft)
            super().save()
            if has_new_columns:
                draft.replace(path)
        except OSError as error:
            self._warn(path, error)
            writer.metrics, writer.metrics_keys = rows, columns
            if path.exists() and path.stat().st_size > (size or 0):
                os.truncate(path, size or 0)  # a part of the rows, which will be written again
            draft.unlink(missing_ok=True)
        finally:
            writer.metrics_file_path = str(path)

    @override
    @rank_zero_only
    def log_hyperparams(self, params: dict[str, Any] | Namespace | None = None) -> None:
        path = Path(str(self.experiment.log_dir), "hparams.yaml")
        given = vars(params) if isinstance(params, Namespace) else params
        try:
            if holds_secret(given):
                path.touch(PRIVATE)
                path.chmod(PRIVATE)
            super().log_hyperparams(params)
        except OSError as error:
            self._warn(path, error)

    def _warn(self, path: Path, error: OSError) -> None:
        if not self._has_warned:
            self._has_warned = True
            write_stderr(
                f"boltmesh: {path} cannot be written: {error.strerror or error}. The training "
                f"goes on; rows are kept in memory until they can be.\n"
            )


class LogBeforeSave(Callback):
    """Logs a step before the state after it is saved.

    Lightning logs a step behind the hooks that save it. A run that is killed in between, and goes
    on from there, would have no row of that step.

    Args:
        logger: Gets the row; once more from Lightning.
    """

    def __init__(self, logger: RunLogger) -> None:
        self._logger = logger

    @override
    def on_save_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        log_step(trainer, self._logger)
