"""The only module of the package that unpickles a checkpoint.

It always uses ``weights_only=True``: torch then builds tensors, plain containers and classes that
``torch.serialization.add_safe_globals`` allows, and calls nothing else that a file names.
"""

import re
import warnings
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

import torch
from torch.serialization import get_unsafe_globals_in_checkpoint

from boltmesh.errors import CheckpointError, ConfigError, UnsafeCheckpointError

_GLOBAL = re.compile(r"GLOBAL (\S+)")
"""Finds a name in torch's refusal of a file."""
_ADVICE = re.compile(r"weights[_ ]only|torch\.load|option", re.IGNORECASE)
"""Finds lines of torch's errors that advise unsafe loading."""
_HOW_TO_ALLOW = (
    "classes that you trust can be allowed by torch.serialization.add_safe_globals([...]) in the "
    "file of your model"
)


def safe_load(
    source: Path | IO[bytes], name: object, *, is_mapped: bool = False, map_location: Any = "cpu"
) -> Any:
    """Unpickle a file of ``torch.save`` without executing code that it names.

    Args:
        source: A path, or an open file that can seek.
        name: Its path or address, for errors.
        is_mapped: Leave tensors on the disk until they are read; ``source`` must be a path.
        map_location: As for ``torch.load``.

    Raises:
        UnsafeCheckpointError: If loading it needs classes or functions that are not allowed.
        CheckpointError: If it is damaged, or not a file of ``torch.save``.
        OSError: If it cannot be read.
    """
    try:
        with warnings.catch_warnings():
            # Warnings about foreign formats, which end in an error below.
            warnings.simplefilter("ignore", UserWarning)
            return torch.load(source, map_location=map_location, weights_only=True, mmap=is_mapped)
    except OSError:
        raise
    except Exception as error:
        # A damaged or foreign pickle makes the unpickler fail with errors of any class.
        text = str(error)
        if names := _unsafe_names(source, text):
            raise UnsafeCheckpointError(_refusal(name, names, text)) from error
        lines = [line.strip() for line in text.splitlines()]
        reason = next((line for line in lines if line and not _ADVICE.search(line)), "")
        raise CheckpointError(
            f"{name} cannot be loaded: it is damaged, or was not written by torch.save "
            f"({_printable(f'{type(error).__name__}: {reason}'.removesuffix(': '))}). "
            f"Resume from another checkpoint."
        ) from error


def check_weights_only(weights_only: bool | None, place: object) -> None:
    """Refuse ``weights_only=False``, which the Trainer passes on. None means True.

    Raises:
        ConfigError: If it is False.
    """
    if weights_only is False:
        raise ConfigError(
            f"weights_only=False was given for {place}, and boltmesh never runs the code of a "
            f"checkpoint. Leave weights_only out; {_HOW_TO_ALLOW}."
        )


def _unsafe_names(source: Path | IO[bytes], text: str) -> list[str]:
    """Return the names of disallowed functions and classes in a file, without loading it."""
    with suppress(Exception):  # not a zip file, or a damaged one
        if not isinstance(source, Path):
            source.seek(0)
        if unsafe := get_unsafe_globals_in_checkpoint(source):
            return sorted(unsafe)
    return _GLOBAL.findall(text)[:1]


def _refusal(name: object, names: list[str], text: str) -> str:
    more = f" and {len(names) - 4} more" if len(names) > 5 else ""
    shown = _printable(", ".join(names[: 4 if more else 5])) + more
    refused = f"{name} was not loaded, because loading it could run code: it names {shown}."
    if "is blocked" in text:
        return f"{refused} No checkpoint needs that; give one that you trust."
    return (
        f"{refused} Save plain values alone, among the hyper-parameters as well; {_HOW_TO_ALLOW}."
    )


def _printable(text: str) -> str:
    """Replace characters that are not printable, such as terminal control sequences; cut off."""
    return "".join(each if each.isprintable() else "?" for each in text)[:300]
