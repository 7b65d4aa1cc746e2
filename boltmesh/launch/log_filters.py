"""Keeps what Lightning and torch say in every run, on every rank, out of the terminal."""

import logging
import warnings

from typing_extensions import override

_LOGGED = (
    "GPU available: ",
    "TPU available: ",
    "💡 Tip: ",
    "Initializing distributed: ",
    "Adding 1 callbacks from entry point 'boltmesh'",
    "distributed_backend=",
    "All distributed processes registered",
    "-" * 20,
)
"""Known before (the dry run shows the devices), or an advertisement."""

_WARNED = (
    # Going on in one's own folder is what resuming means here.
    r"Checkpoint directory .* exists and is not empty",
    # Evaluation makes no checkpoints, so their callback is rightly absent.
    r"Be aware that when using `ckpt_path`, callbacks used to create the checkpoint",
    # Between Lightning 2.6 and torch 2.13; nothing that a user can change.
    r"`isinstance\(treespec, LeafSpec\)` is deprecated",
)


class _KnownBefore(logging.Filter):
    @override
    def filter(self, record: logging.LogRecord) -> bool:
        return not record.getMessage().lstrip().startswith(_LOGGED)


def quiet_lightning() -> None:
    """Call once Lightning is imported."""
    for name in ("lightning.pytorch", "lightning.fabric"):
        for handler in logging.getLogger(name).handlers:
            handler.addFilter(_KnownBefore())
    for message in _WARNED:
        warnings.filterwarnings("ignore", message=message)
