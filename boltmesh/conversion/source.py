"""Opens a checkpoint of any layout without loading its tensors, and gives them one at a time."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from boltmesh.configs.advice import first_line
from boltmesh.errors import CheckpointError, ConfigError
from boltmesh.strategies.checkpoint.directory import MODEL, is_directory, load_directory
from boltmesh.strategies.checkpoint.file import load_file
from boltmesh.strategies.checkpoint.shard_reader import Placeholder


def open_checkpoint(path: str | Path) -> dict[str, Any]:
    """Read a directory of shards or a Lightning file; its tensors stay on the disk.

    Tensors of a directory are placeholders, those of a file are mapped. No code of the checkpoint
    is run.

    Raises:
        ConfigError: When there is no checkpoint, or not a complete or readable one.
    """
    try:
        if is_directory(path):
            return load_directory(path)
    except (CheckpointError, OSError) as error:
        raise ConfigError(str(error)) from error
    if not isinstance(path, Path):
        raise ConfigError(
            f"{path} is no directory of shards, and a file is read from a local disk alone, where "
            f"it can be mapped. Copy it to one."
        )
    return open_file(path)


def open_file(path: Path) -> dict[str, Any]:
    """Read a Lightning file whose tensors are mapped.

    Raises:
        ConfigError: When it is none.
    """
    if not path.is_file():
        raise ConfigError(f"{path} does not exist. Give the path of a checkpoint.")
    try:
        checkpoint: Any = load_file(path, is_mapped=True)
    except CheckpointError as error:
        raise ConfigError(str(error)) from error
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {first_line(error)}.") from error
    state = checkpoint.get(MODEL) if isinstance(checkpoint, dict) else None
    if not isinstance(state, Mapping):
        raise ConfigError(
            f"{path} has no 'state_dict', as every checkpoint of Lightning has. Save it with "
            f"Trainer.save_checkpoint, or store {{'state_dict': model.state_dict()}}."
        )
    return dict(checkpoint)


def tensors_of(checkpoint: Mapping[str, Any]) -> dict[str, Tensor]:
    """The parameters and buffers of a checkpoint; other state of modules is left out."""
    state = checkpoint[MODEL]
    return {name: each for name, each in state.items() if isinstance(each, Tensor)}


def load_value(tensor: Tensor, name: str) -> Tensor:
    """The whole value of a tensor on the CPU, contiguous.

    Raises:
        ConfigError: When it was damaged after it was written.
    """
    try:
        value = tensor.load() if isinstance(tensor, Placeholder) else tensor.detach()
    except (CheckpointError, OSError, RuntimeError) as error:
        raise ConfigError(f"{name} cannot be read: {first_line(error)}.") from error
    return value.contiguous()


def identity(tensor: Tensor) -> tuple[Any, ...]:
    """Return a key that two names of one stored tensor share."""
    if isinstance(tensor, Placeholder) or not tensor.numel():
        return (id(tensor),)
    storage = tensor.untyped_storage().data_ptr()
    return storage, tensor.storage_offset(), tensor.dtype, tensor.shape, tensor.stride()


def second_names(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Names of tied tensors, and the first name that each has."""
    first: dict[tuple[Any, ...], str] = {}
    return {
        name: stored
        for name, each in tensors.items()
        if (stored := first.setdefault(identity(each), name)) != name
    }


def as_bytes(value: Tensor) -> memoryview:
    """The elements of a contiguous tensor on the CPU, without a copy."""
    elements: Any = value.reshape(-1).view(torch.uint8).numpy()
    return memoryview(elements)
