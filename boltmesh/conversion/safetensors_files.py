"""Writes and reads the safetensors format one tensor at a time.

The library's writers want every tensor of a file in memory. The format is a header of JSON that
says where each tensor lies, and their elements, https://huggingface.co/docs/safetensors.

A model as Hugging Face stores it is one file, or a folder with several and an index. The Hub may
have other names and shapes of its tensors than the model has in memory: ``as_on_the_hub``.
"""

import json
import math
import os
import shutil
import struct
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from boltmesh.configs.advice import first_line
from boltmesh.conversion.source import as_bytes, load_value, second_names
from boltmesh.conversion.writing import written_whole
from boltmesh.errors import ConfigError

DTYPES = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16",
    "I64": "int64", "I32": "int32", "I16": "int16", "I8": "int8",
    "U64": "uint64", "U32": "uint32", "U16": "uint16", "U8": "uint8",
    "BOOL": "bool", "C64": "complex64",
    "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "F8_E8M0": "float8_e8m0fnu",
}  # fmt: skip
"""Names of the format, and torch's."""

CONFIG = "config.json"
"""Configuration of a model in a folder of Hugging Face."""

METADATA: dict[str, str] = {"format": "pt"}
"""Metadata that Hugging Face's loaders require."""

_HEADER_ALIGNMENT_BYTES = 8
_LENGTH = struct.Struct("<Q")
_MAX_HEADER_BYTES = 100_000_000

CRC32 = "boltmesh_crc32"
"""Key of the metadata: checksum of the header, with zeros in its place, and of all elements."""
_NO_CRC32 = "0" * 8


def check_dtypes(tensors: Mapping[str, Tensor]) -> None:
    """Check that the format has all of these dtypes.

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
    header: dict[str, Any] = {"__metadata__": {**metadata, CRC32: _NO_CRC32}}
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
    crc32 = zlib.crc32(written)
    with path.open("wb") as file:
        file.write(_LENGTH.pack(len(written)))
        file.write(written)
        for name in names:
            value = load(tensors[name], name)
            elements = as_bytes(value)
            file.write(elements)
            crc32 = zlib.crc32(elements, crc32)
            progress(value.nbytes)
            del value, elements  # before the next one is loaded
        file.seek(_LENGTH.size)
        file.write(_with_crc32(written, f"{crc32:08x}"))
        file.flush()
        os.fsync(file.fileno())


def _with_crc32(header: bytes, value: str) -> bytes:
    """Replace the checksum in a header by another text of eight characters."""
    before, key, after = header.partition(f'"{CRC32}":"'.encode())
    return before + key + value.encode() + after[len(value) :]


def find_damage(path: Path) -> str | None:
    """Why a file is not as ``write_safetensors`` wrote it, in words; None if it is. Reads all.

    Raises:
        OSError: It cannot be read.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(_LENGTH.size)
        length = _LENGTH.unpack(start)[0] if len(start) == _LENGTH.size else size
        if length > min(size - _LENGTH.size, _MAX_HEADER_BYTES):
            return "its header is not there or damaged"
        written = file.read(length)
        try:
            header = json.loads(written)
            expected = (header.pop("__metadata__", None) or {}).get(CRC32)
            end = max((each["data_offsets"][1] for each in header.values()), default=0)
            is_long_enough = end == size - _LENGTH.size - length
            is_consistent = _lie_one_after_another(header)
        except (ValueError, KeyError, IndexError, TypeError, AttributeError, RecursionError):
            return "its header is damaged"
        if not is_long_enough:
            return f"it has {size:,} bytes instead of {end + _LENGTH.size + length:,}"
        if not isinstance(expected, str):
            return "it has no checksum, so that nothing can be said about its values"
        crc32 = zlib.crc32(_with_crc32(written, _NO_CRC32))
        while piece := file.read(1 << 20):
            crc32 = zlib.crc32(piece, crc32)
    if not is_consistent:
        return "its header contradicts itself"
    return None if expected == f"{crc32:08x}" else "its checksum is wrong"


def _lie_one_after_another(header: Mapping[str, Any]) -> bool:
    """Whether the tensors of a header fill the file, each with the bytes that its shape needs."""
    at = 0
    for each in sorted(header.values(), key=lambda each: list(each["data_offsets"])):
        (start, end), shape = each["data_offsets"], each["shape"]
        width = getattr(torch, DTYPES[each["dtype"]]).itemsize
        if start != at or end - start != math.prod(shape) * width or min(shape, default=0) < 0:
            return False
        at = end
    return True


def num_bytes(tensor: Tensor) -> int:
    """Return the bytes of all elements of a tensor, also of one that is not loaded."""
    return tensor.numel() * tensor.element_size()


def _names_by_dtype() -> dict[torch.dtype, str]:
    return {getattr(torch, each): name for name, each in DTYPES.items() if hasattr(torch, each)}


SUFFIX = ".safetensors"
SINGLE = f"model{SUFFIX}"
INDEX = f"model{SUFFIX}.index.json"


def write_model(
    tensors: Mapping[str, Tensor],
    target: Path,
    *,
    max_shard_bytes: int | None,
    progress: Callable[[int], Any],
    config: Path | None = None,
) -> dict[str, str]:
    """Write tensors under the names they have here. Tied ones are written once.

    The header of the file that has a tied tensor names its other names, as ``save_model`` of
    safetensors does.

    Args:
        tensors: By name; may be placeholders.
        target: The file to be, or with ``max_shard_bytes`` the folder.
        max_shard_bytes: No file holds more, unless one tensor does.
        progress: Called with the number of bytes of each tensor that has been written.
        config: The model's configuration, copied into the folder.

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
            if config is not None:
                shutil.copyfile(config, partial / CONFIG)
            shards = divide(stored, max_shard_bytes)
            names = file_names(len(shards))
            for name, shard in zip(names, shards, strict=True):
                write(shard, partial / name)
            if len(shards) > 1:
                _write_index(dict(zip(names, shards, strict=True)), partial / INDEX)
    return aliases


def divide(tensors: Mapping[str, Tensor], max_bytes: int) -> list[dict[str, Tensor]]:
    """Distribute tensors over files in their order; one that is larger has a file for itself."""
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
    """File names as those of a model of Hugging Face."""
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
    """Map the tensors of a file, or of all files of a folder; compare the checksums of exports.

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
            damage = find_damage(file) if CRC32 in notes else None
        except (SafetensorError, OSError) as error:
            raise ConfigError(f"{file} cannot be read: {error}") from error
        if damage is not None:
            raise ConfigError(f"{file} cannot be read: {damage}. Export or copy it again.")
        if twice := sorted(found.keys() & model.tensors.keys()):
            raise ConfigError(f"{path} has {twice[0]} in more than one file. Remove the old files.")
        model.tensors |= found
        model.aliases |= {name: kept for name, kept in notes.items() if kept in found}
    if not model.tensors:
        raise ConfigError(f"{path} has no tensors.")
    return model


def _files(path: Path) -> list[Path]:
    """Files of the index if there is one, so that a missing file is noticed."""
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
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ConfigError(f"{path / INDEX} cannot be read: {error}") from error
    for each in files:
        if each.parent != path or not each.is_file():
            raise ConfigError(f"{path / INDEX} names {each.name}, which is not there.")
    return files


def config_file(path: Path) -> Path:
    """Return the config.json that is meant.

    Raises:
        ConfigError: When there is none.
    """
    found = path / CONFIG if path.is_dir() else path
    if not found.is_file():
        raise ConfigError(
            f"{path} has no {CONFIG}. Write it with model.config.save_pretrained(FOLDER), and say "
            f"--hf FOLDER."
        )
    return found


def as_on_the_hub(tensors: Mapping[str, Tensor], config: Path) -> dict[str, Tensor]:
    """Return tensors under the names, and in the parts, of a Hugging Face model's own files.

    A model in memory may have several of them as one, such as the matrices of its experts.

    Args:
        tensors: By their names in memory.
        config: The model's config.json.

    Raises:
        ConfigError: When transformers is missing or knows no such model, or the model has no such
            tensors.
    """
    try:
        import transformers
        from transformers.core_model_loading import revert_weight_conversion
    except ImportError as error:
        raise ConfigError(
            "--hf needs the package transformers, 5 or newer. Install it: "
            "pip install 'boltmesh[transformers]'."
        ) from error
    try:
        read = transformers.AutoConfig.from_pretrained(config, local_files_only=True)
        kind = getattr(transformers, (read.architectures or ["none"])[0], None)
        make = transformers.AutoModelForCausalLM.from_config if kind is None else kind
        with torch.device("meta"):
            model = make(read)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{config} describes no model: {first_line(error)}.") from error
    unknown = [name for name in tensors if name not in model.state_dict()]
    if unknown:
        raise ConfigError(
            f"{type(model).__name__} of {config} has no tensor {unknown[0]!r}. Say --prefix for "
            f"what is before its names, or name the configuration of this model."
        )
    loaded = {name: load_value(each, name) for name, each in tensors.items()}
    made: dict[str, Tensor] = revert_weight_conversion(model, loaded)
    return {name: each.contiguous() for name, each in made.items()}
