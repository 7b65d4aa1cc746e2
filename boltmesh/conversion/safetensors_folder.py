"""A model as Hugging Face stores it: one file, or a folder with several and an index."""

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from boltmesh.conversion.safetensors_file import (
    METADATA,
    check_dtypes,
    num_bytes,
    write_safetensors,
)
from boltmesh.conversion.source import load_value, second_names
from boltmesh.conversion.writing import written_whole

SUFFIX = ".safetensors"
SINGLE = f"model{SUFFIX}"
INDEX = f"model{SUFFIX}.index.json"


def write_model(
    tensors: Mapping[str, Tensor],
    target: Path,
    *,
    max_shard_bytes: int | None,
    progress: Callable[[int], Any],
) -> dict[str, str]:
    """Write tensors under the names they have here. Tied ones are written once.

    The header of the file that has a tied tensor names its other names, as ``save_model`` of
    safetensors does.

    Args:
        tensors: By name; may be placeholders.
        target: The file to be, or with ``max_shard_bytes`` the folder.
        max_shard_bytes: No file holds more, unless one tensor does.
        progress: Called with the number of bytes of each tensor that has been written.

    Returns:
        Names that were not written, and the names of the tensors they are.

    Raises:
        CheckpointError: When it could not be written.
        ConfigError: When safetensors has no name for a dtype, or a tensor could not be read.
    """
    aliases = second_names(tensors)
    stored = {name: each for name, each in tensors.items() if name not in aliases}
    check_dtypes(stored)

    def write(names: Mapping[str, Tensor], path: Path) -> None:
        own = {name: kept for name, kept in aliases.items() if kept in names}
        write_safetensors(
            names, path, metadata={**own, **METADATA}, load=load_value, progress=progress
        )

    with written_whole(target) as partial:
        if max_shard_bytes is None:
            write(stored, partial)
        else:
            partial.mkdir()
            shards = divide(stored, max_shard_bytes)
            names = file_names(len(shards))
            for name, shard in zip(names, shards, strict=True):
                write(shard, partial / name)
            if len(shards) > 1:
                _write_index(dict(zip(names, shards, strict=True)), partial / INDEX)
    return aliases


def divide(tensors: Mapping[str, Tensor], max_bytes: int) -> list[dict[str, Tensor]]:
    """Share tensors out over files in their order; one that is larger has a file for itself."""
    shards: list[dict[str, Tensor]] = [{}]
    taken = 0
    for name, each in tensors.items():
        size = num_bytes(each)
        if shards[-1] and taken + size > max_bytes:
            shards.append({})
            taken = 0
        shards[-1][name] = each
        taken += size
    return shards


def file_names(count: int) -> list[str]:
    """As Hugging Face names the files of a model."""
    if count == 1:
        return [SINGLE]
    return [f"model-{at:05}-of-{count:05}{SUFFIX}" for at in range(1, count + 1)]


def _write_index(shards: Mapping[str, Mapping[str, Tensor]], path: Path) -> None:
    total = sum(num_bytes(each) for shard in shards.values() for each in shard.values())
    places = {name: file for file, shard in shards.items() for name in shard}
    content = {"metadata": {"total_size": total}, "weight_map": dict(sorted(places.items()))}
    with path.open("w", encoding="utf-8") as opened:
        json.dump(content, opened, indent=2)
        opened.flush()
        os.fsync(opened.fileno())
