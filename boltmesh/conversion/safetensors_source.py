"""Reads a safetensors file, or a folder of them, without loading their tensors."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from boltmesh.conversion.safetensors_folder import INDEX, SINGLE, SUFFIX
from boltmesh.errors import ConfigError


@dataclass
class StoredModel:
    """The tensors of a model, mapped, and other names that some of them have."""

    tensors: dict[str, Tensor]
    aliases: dict[str, str]


def is_safetensors(path: Path) -> bool:
    """Whether this is a file of the format, or a folder that has some."""
    if path.is_dir():
        return any(path.glob(f"*{SUFFIX}")) or (path / INDEX).is_file()
    return path.suffix == SUFFIX


def open_safetensors(path: Path) -> StoredModel:
    """Map the tensors of a file, or of all files of a folder.

    Raises:
        ConfigError: When the library is missing, a file is damaged or not there, or two files
            have a tensor of one name.
    """
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError as error:
        raise ConfigError(
            "Reading safetensors needs the package of that name. Install it: "
            "pip install 'boltmesh[safetensors]'."
        ) from error
    model = StoredModel({}, {})
    for file in _files(path):
        try:
            with safe_open(file, framework="pt", device="cpu") as opened:
                notes: dict[str, str] = opened.metadata() or {}
                found = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
        except (SafetensorError, OSError) as error:
            raise ConfigError(f"{file} cannot be read: {error}") from error
        if twice := sorted(found.keys() & model.tensors.keys()):
            raise ConfigError(f"{path} has {twice[0]} in more than one file. Remove the old files.")
        model.tensors |= found
        model.aliases |= {name: kept for name, kept in notes.items() if kept in found}
    if not model.tensors:
        raise ConfigError(f"{path} has no tensors.")
    return model


def _files(path: Path) -> list[Path]:
    """Those of the index where there is one, so that a file that is missing is missed."""
    if not path.is_dir():
        if not path.is_file():
            raise ConfigError(f"{path} does not exist.")
        return [path]
    if (path / SINGLE).is_file():
        return [path / SINGLE]
    if not (path / INDEX).is_file():
        return sorted(path.glob(f"*{SUFFIX}"))
    try:
        content: Any = json.loads((path / INDEX).read_text(encoding="utf-8"))
        files = [path / name for name in sorted(set(content["weight_map"].values()))]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{path / INDEX} cannot be read: {error}") from error
    for each in files:
        if each.parent != path or not each.is_file():
            raise ConfigError(f"{path / INDEX} names {each.name}, which is not there.")
    return files
