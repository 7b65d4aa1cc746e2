"""Writes the safetensors format one tensor at a time.

The library's writers want every tensor of a file in memory. The format is a header of JSON that
says where each tensor lies, and their elements, https://huggingface.co/docs/safetensors.
"""

import json
import os
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from boltmesh.conversion.source import as_bytes
from boltmesh.errors import ConfigError

DTYPES = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16",
    "I64": "int64", "I32": "int32", "I16": "int16", "I8": "int8",
    "U64": "uint64", "U32": "uint32", "U16": "uint16", "U8": "uint8",
    "BOOL": "bool", "C64": "complex64",
    "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "F8_E8M0": "float8_e8m0fnu",
}  # fmt: skip
"""Names of the format, and torch's."""

METADATA: dict[str, str] = {"format": "pt"}
"""What Hugging Face's loaders ask for."""

_HEADER_ALIGNMENT_BYTES = 8


def check_dtypes(tensors: Mapping[str, Tensor]) -> None:
    """Look whether the format has them all.

    Raises:
        ConfigError: When it lacks one.
    """
    names = _names_by_dtype()
    for name, each in tensors.items():
        if each.dtype not in names or each.layout != torch.strided:
            raise ConfigError(
                f"{name} has dtype {each.dtype} and layout {each.layout}, for which safetensors "
                f"has no name. Export to a .ckpt file instead."
            )


def write_safetensors(
    tensors: Mapping[str, Tensor],
    path: Path,
    *,
    metadata: Mapping[str, str],
    load: Callable[[Tensor, str], Tensor],
    progress: Callable[[int], Any],
) -> None:
    """Write a file and flush it to its medium.

    Args:
        tensors: By name; may be placeholders.
        path: The file to be.
        metadata: Strings for the header.
        load: Gives the elements of a tensor: contiguous, on the CPU.
        progress: Called with the number of bytes of each tensor that has been written.
    """
    # The widest first, so that each lies at a multiple of its elements' size.
    names = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    kinds = _names_by_dtype()
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    end = 0
    for name in names:
        start, end = end, end + num_bytes(tensors[name])
        header[name] = {
            "dtype": kinds[tensors[name].dtype],
            "shape": list(tensors[name].shape),
            "data_offsets": [start, end],
        }
    written = json.dumps(header, separators=(",", ":")).encode()
    written += b" " * (-len(written) % _HEADER_ALIGNMENT_BYTES)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(written)))
        file.write(written)
        for name in names:
            value = load(tensors[name], name)
            file.write(as_bytes(value))
            progress(value.nbytes)
            del value  # before the next one is loaded
        file.flush()
        os.fsync(file.fileno())


def num_bytes(tensor: Tensor) -> int:
    """Of all elements of a tensor, also of one that is not loaded."""
    return tensor.numel() * tensor.element_size()


def _names_by_dtype() -> dict[torch.dtype, str]:
    return {getattr(torch, each): name for name, each in DTYPES.items() if hasattr(torch, each)}
