"""Refuses folders that fsspec alone can write to, where a checkpoint is a directory of shards.

All ranks write to such a directory, and it becomes complete by a rename: object stores have none.
Single files go to and come from any address, by Lightning's own way.
"""

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

from boltmesh.errors import ConfigError
from boltmesh.strategies.checkpoint.file import is_local

CURE = "Choose a local or mounted folder, and copy complete checkpoints from there"


def refuse_remote_folders(trainer: Trainer) -> None:
    """Refuse before the first step what would fail at the first save.

    Raises:
        ConfigError: Naming the folder.
    """
    for callback in trainer.checkpoint_callbacks:
        folder = callback.dirpath if isinstance(callback, ModelCheckpoint) else None
        if folder is not None and not is_local(folder):
            raise ConfigError(
                f"ModelCheckpoint saves to {folder}, and a checkpoint of shards is a directory "
                f"that all ranks write to and that is renamed when it is complete, which no remote "
                f"file system of fsspec does. {CURE}; bolt_ddp writes single files to any address."
            )
