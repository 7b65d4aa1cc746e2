"""What a Trainer has: its module, callbacks, plugins and modes."""

import torch
from lightning.fabric.plugins import CheckpointIO
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.plugins import MixedPrecision, Precision
from lightning.pytorch.plugins.io.wrapper import _WrappingCheckpointIO


def is_wrapping(checkpoint_io: CheckpointIO) -> bool:
    """Whether a checkpoint plugin hands on to another one, as the asynchronous one does."""
    return isinstance(checkpoint_io, _WrappingCheckpointIO)


def trainer_of(module: LightningModule | None) -> Trainer | None:
    """The module's Trainer, None before it is attached (the public property raises then)."""
    return None if module is None else module._trainer


def autocast_dtype(plugin: Precision) -> "torch.dtype | None":
    """Return what autocast computes in, None for precisions without autocast."""
    if not isinstance(plugin, MixedPrecision):
        return None
    return torch.bfloat16 if plugin.precision == "bf16-mixed" else torch.float16


def callbacks_of(trainer: Trainer) -> list[Callback]:
    """Return the callbacks; Lightning sets the attribute without declaring it."""
    return list(trainer.callbacks)  # type: ignore[attr-defined]


def forbid_inference_mode(trainer: Trainer) -> None:
    """Make the evaluation loops use ``no_grad``.

    Tensors made under ``inference_mode`` are inference tensors for good, and gathered parameters
    are kept and written in place later.
    """
    for loop in (trainer.validate_loop, trainer.test_loop, trainer.predict_loop):
        loop.inference_mode = False
