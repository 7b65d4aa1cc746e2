"""Filters log lines and warnings that Lightning and torch print in every run on every rank."""

import logging
import warnings

from typing_extensions import override

from boltmesh.lightning_import import ROOTS

_LOGGED = (
    "GPU available: ",
    "TPU available: ",
    "💡 Tip: ",
    "Initializing distributed: ",
    "distributed_backend=",
    "All distributed processes registered",
    "-" * 20,
)
"""Lines without news (the dry run shows the devices), or advertisements."""

_WARNED = (
    # A resumed run continues in its own folder.
    r"Checkpoint directory .* exists and is not empty",
    # Evaluation writes no checkpoints, so it has no checkpoint callback.
    r"Be aware that when using `ckpt_path`, callbacks used to create the checkpoint",
    # Between Lightning 2.6 and torch 2.13; a user cannot change it.
    r"`isinstance\(treespec, LeafSpec\)` is deprecated",
)


class _KnownBefore(logging.Filter):
    @override
    def filter(self, record: logging.LogRecord) -> bool:
        return not record.getMessage().lstrip().startswith(_LOGGED)


def quiet_lightning() -> None:
    """Install the filters; call it after Lightning is imported."""
    for name in ("lightning.pytorch", "lightning.fabric", *ROOTS):
        for handler in logging.getLogger(name).handlers:
            handler.addFilter(_KnownBefore())
    for message in _WARNED:
        warnings.filterwarnings("ignore", message=message)
