"""What a Trainer has: its module, callbacks, plugins and modes."""

from os import PathLike
from pathlib import PurePath

import torch
from lightning.fabric.plugins import CheckpointIO
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.plugins import MixedPrecision, Precision
from lightning.pytorch.plugins.io.wrapper import _WrappingCheckpointIO
from lightning.pytorch.trainer.states import TrainerFn, TrainerStatus


def is_wrapping(checkpoint_io: CheckpointIO) -> bool:
    """Whether a checkpoint plugin hands on to another one, as the asynchronous one does."""
    return isinstance(checkpoint_io, _WrappingCheckpointIO)


def is_for_requeue(path: str | PathLike[str]) -> bool:
    """Whether a checkpoint is the one that SLURM is told to go on from as soon as it is saved."""
    return PurePath(path).name.startswith("hpc_ckpt_")


def is_in_fit(trainer: Trainer) -> bool:
    """Whether a fit is under way, which will come to its end or to an error."""
    return trainer.state.fn == TrainerFn.FITTING and trainer.state.status == TrainerStatus.RUNNING


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
