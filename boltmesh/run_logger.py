"""The logger of a run: metrics.csv and hparams.yaml, which never end the training."""

import os
from argparse import Namespace
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities import rank_zero_only
from typing_extensions import override

from boltmesh.process import write_stderr
from boltmesh.telemetry.redaction import holds_secret

PRIVATE = 0o600


class RunLogger(CSVLogger):
    """Lightning's ``CSVLogger``, for files that a full disk or a quota may not take.

    Rows that cannot be written are kept, and written with the next ones. ``hparams.yaml`` is
    readable by its owner alone if it holds secrets.
    """

    _has_warned = False

    @override
    @rank_zero_only
    def save(self) -> None:
        path = Path(str(self.experiment.metrics_file_path))
        size = path.stat().st_size if path.exists() else 0
        try:
            super().save()
        except OSError as error:
            self._warn(path, error)
            if path.exists() and path.stat().st_size > size:
                os.truncate(path, size)  # a part of the rows, which will be written again

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
