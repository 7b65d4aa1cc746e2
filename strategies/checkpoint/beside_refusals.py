"""Refuses what would look at a checkpoint, or count on it, before it is complete."""

from lightning.fabric.plugins import CheckpointIO
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

from boltmesh.errors import ConfigError
from boltmesh.strategies.checkpoint.file import AtomicCheckpointIO


def refuse_beside(
    trainer: Trainer, checkpoint_io: CheckpointIO, *, keeps_state_on_disk: bool
) -> None:
    """Refuse what cannot be right with ``async_save=True``.

    Args:
        trainer: Whose callbacks save.
        checkpoint_io: What writes files.
        keeps_state_on_disk: Whether a copy may not fit into memory.

    Raises:
        ConfigError: Naming it, and what to do instead.
    """
    if keeps_state_on_disk:
        raise ConfigError(
            "async_save=True copies this rank's share of model and optimizer into host memory, and "
            "offload to 'nvme' is for what does not fit there. Leave one of them out."
        )
    if not isinstance(checkpoint_io, AtomicCheckpointIO):
        raise ConfigError(
            f"async_save=True writes checkpoints itself and would never call "
            f"{type(checkpoint_io).__name__}. Leave one of them out."
        )
    named: dict[tuple[object, object], ModelCheckpoint] = {}
    for callback in trainer.checkpoint_callbacks:
        if not isinstance(callback, ModelCheckpoint):
            continue
        if callback.save_last == "link":
            raise ConfigError(
                "ModelCheckpoint(save_last='link') would link to a checkpoint that async_save=True "
                "has not written yet. Use save_last=True, or leave it out: the newest complete "
                "checkpoint is the last."
            )
        place = (callback.dirpath, callback.filename)
        if place in named:
            raise ConfigError(
                f"Two ModelCheckpoints save under the same name ({callback.filename!r} in "
                f"{callback.dirpath!r}), and with async_save=True the second cannot see that the "
                f"first has taken it. Give one of them a filename or dirpath of its own."
            )
        named[place] = callback
