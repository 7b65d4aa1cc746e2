"""Adapters of a checkpoint as ``PeftModel.from_pretrained`` loads them."""

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from boltmesh.conversion.safetensors_files import (
    METADATA,
    check_dtypes,
    num_bytes,
    write_safetensors,
)
from boltmesh.conversion.source import load_value, tensors_of
from boltmesh.conversion.writing import written_whole
from boltmesh.errors import ConfigError
from boltmesh.strategies.checkpoint.adapters import PEFT

WEIGHTS = "adapter_model.safetensors"
CONFIG = "adapter_config.json"
DEFAULT = "default"
"""The adapter whose files are in the folder itself; others have a folder each, as in peft."""


def adapters_of(checkpoint: Mapping[str, Any], source: object) -> dict[str, dict[str, Tensor]]:
    """Return the tensors of each adapter, by the names that peft gives them.

    Args:
        checkpoint: As it was opened.
        source: Its path, for messages.

    Raises:
        ConfigError: When it has no adapters of peft, or one that peft could not name.
    """
    entries = checkpoint.get(PEFT)
    if not entries:
        raise ConfigError(
            f"{source} has no adapters of peft: its module holds no PeftModel, or an earlier "
            f"version of boltmesh wrote it. Leave --peft out."
        )
    tensors = tensors_of(checkpoint)
    found: dict[str, dict[str, Tensor]] = {}
    for entry in entries:
        adapter = entry["adapter"]
        if "problem" in entry:
            raise ConfigError(
                f"peft did not name the tensors of the adapter {adapter!r} ({entry['problem']}). "
                f"Leave --peft out, and load the weights into the module."
            )
        if adapter in found:
            raise ConfigError(
                f"{source} has several models of peft with an adapter {adapter!r}, and one folder "
                f"holds one. Leave --peft out, and load the weights into the module."
            )
        names: Mapping[str, str] = entry["names"]
        if missing := [name for name in names.values() if name not in tensors]:
            raise ConfigError(
                f"{source} lacks {missing[0]!r} of the adapter {adapter!r}, which was frozen when "
                f"training began. Export a checkpoint with all parameters."
            )
        found[adapter] = {theirs: tensors[name] for theirs, name in names.items()}
        check_dtypes(found[adapter])
    return found


def write_adapters(
    checkpoint: Mapping[str, Any],
    adapters: Mapping[str, Mapping[str, Tensor]],
    target: Path,
    *,
    progress: Callable[[int], Any],
) -> list[str]:
    """Write the folder of ``adapters_of``; return the lines to show.

    Raises:
        CheckpointError: When it could not be written.
    """
    configs = {entry["adapter"]: entry["config"] for entry in checkpoint[PEFT]}
    lines = []
    with written_whole(target) as partial:
        partial.mkdir()
        for adapter, tensors in adapters.items():
            folder = partial if adapter == DEFAULT else partial / adapter
            folder.mkdir(exist_ok=True)
            write_safetensors(
                tensors, folder / WEIGHTS, metadata=METADATA, load=load_value, progress=progress
            )
            with (folder / CONFIG).open("w", encoding="utf-8") as opened:
                opened.write(configs[adapter])
                opened.flush()
                os.fsync(opened.fileno())
            total = sum(num_bytes(each) for each in tensors.values())
            where = target if adapter == DEFAULT else target / adapter
            lines.append(f"{where}: {len(tensors)} tensors of the adapter, {total:,} bytes")
    return lines
