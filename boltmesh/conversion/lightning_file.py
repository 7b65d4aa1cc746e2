"""One file of a directory of shards, which plain Lightning loads and resumes from."""

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from boltmesh.conversion.optimizer_numbers import numbered_state
from boltmesh.conversion.source import load_value
from boltmesh.conversion.tensor_archive import write_archive
from boltmesh.conversion.writing import written_whole
from boltmesh.strategies.checkpoint.directory import OPTIMIZERS


def write_lightning_file(
    checkpoint: Mapping[str, Any], target: Path, *, progress: Callable[[int], Any]
) -> None:
    """Write a checkpoint whose tensors may be placeholders as one file.

    Args:
        checkpoint: As ``open_checkpoint`` gives it.
        target: The file to be; what has its name is replaced.
        progress: Called with the number of bytes of each tensor that has been written.

    Raises:
        CheckpointError: When the file could not be written.
        ConfigError: When a tensor could not be read.
    """
    content = dict(checkpoint)
    if OPTIMIZERS in content:
        content[OPTIMIZERS] = [numbered_state(each) for each in content[OPTIMIZERS]]
    with written_whole(target) as partial, partial.open("wb") as file:
        write_archive(content, file, load=_load, progress=progress)
        file.flush()
        os.fsync(file.fileno())


def _load(tensor: Tensor) -> Tensor:
    return load_value(tensor, "A tensor of the checkpoint")
