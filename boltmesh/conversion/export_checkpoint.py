"""``boltmesh export``: a checkpoint for programs that know nothing of boltmesh.

``find_prefix`` compares names of parameters in a LightningModule and in the model that it holds.
``write_adapters`` writes what ``PeftModel.from_pretrained`` loads.

``write_lightning_file`` makes one file of a directory of shards, which plain Lightning loads and
resumes from: optimizer state by number instead of by name, in torch's file format, one tensor at a
time. ``torch.save`` wants every tensor in memory before it writes the first. Its format does not:
an archive without compression whose ``data.pkl`` names each tensor's elements, which are a record
of their own, https://docs.pytorch.org/docs/stable/notes/serialization.html. Here the pickle is
written from tensors that may be placeholders, and each record from the value that is loaded for it.
(``torch.serialization.skip_data`` leaves room for the elements as well, but writes no checksums of
what is filled in later: other readers of archives take such a file for damaged.)
"""

import os
import pickle
import sys
import warnings
import zipfile
from collections.abc import Callable, Iterable, Mapping
from io import BytesIO
from math import prod
from pathlib import Path
from typing import IO, Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from typing_extensions import override

from boltmesh.conversion.safetensors_files import (
    METADATA,
    SUFFIX,
    as_on_the_hub,
    check_dtypes,
    config_file,
    num_bytes,
    write_model,
    write_safetensors,
)
from boltmesh.conversion.source import as_bytes, identity, load_value, open_checkpoint, tensors_of
from boltmesh.conversion.writing import check_target, written_whole
from boltmesh.errors import ConfigError
from boltmesh.strategies.checkpoint.adapters import PEFT, TRAINABLE_ONLY
from boltmesh.strategies.checkpoint.directory import OPTIMIZERS
from boltmesh.strategies.checkpoint.optimizer_state import PARAMS, PENDING, is_named
from boltmesh.strategies.checkpoint.shard_reader import Placeholder
from boltmesh.strategies.checkpoint.storage.addresses import is_file
from boltmesh.strategies.torch_compat.files import storage_class
from boltmesh.tui import units


def numbered_state(saved: Mapping[str, Any]) -> dict[str, Any]:
    """The state of one optimizer as its ``state_dict()`` would be in one process.

    torch counts the parameters through all groups; the names are stored in that order. Gradients
    that a run had not applied yet are no state of an optimizer, and are left out.
    """
    if not is_named(saved):
        return dict(saved)
    numbers: dict[str, int] = {}
    for group in saved["param_groups"]:
        for name in group[PARAMS]:
            numbers.setdefault(name, len(numbers))
    groups = [
        {**group, PARAMS: [numbers[name] for name in group[PARAMS]]}
        for group in saved["param_groups"]
    ]
    states = saved["state"]
    if any(PENDING in each for each in states.values()):
        warnings.warn(
            "The checkpoint holds a gradient that was not applied yet, as schedule="
            "'pipedream_2bw' leaves one. It is left out.",
            stacklevel=2,
        )
    state = {
        numbers[name]: {key: value for key, value in each.items() if key != PENDING}
        for name, each in states.items()
    }
    return {"state": dict(sorted(state.items())), "param_groups": groups}


ALIGNMENT_BYTES = 64
"""Alignment of each tensor's elements in the file, as in torch's own, for readers that map them."""

_FOLDER = "archive"
_LOCAL_HEADER_BYTES = 30
_LARGE_FILE_BYTES = 20
"""Bytes that zipfile adds to the header of a record that may be larger than 4 GiB."""
_PADDING = b"FB"
"""The extra field by which torch's own files are aligned."""


class _Elements(NamedTuple):
    """Stands for a tensor's elements in the pickle."""

    kind: type
    key: str
    length: int


class _TensorPickler(pickle.Pickler):
    """Pickles as ``torch.save`` does, and remembers the tensors whose elements are to follow."""

    def __init__(self, file: IO[bytes]) -> None:
        super().__init__(file, protocol=2)  # torch's
        self.tensors: list[Tensor] = []
        self._keys: dict[tuple[Any, ...], str] = {}

    @override
    def persistent_id(self, obj: Any) -> Any:
        if isinstance(obj, _Elements):
            return "storage", obj.kind, obj.key, "cpu", obj.length
        if torch.is_storage(obj):
            raise ConfigError(
                "The checkpoint holds a bare storage, or a quantized tensor, and cannot be "
                "written tensor by tensor. Keep plain tensors in it."
            )
        return None

    @override
    def reducer_override(self, obj: Any) -> Any:
        if type(obj) not in {Tensor, Placeholder} or obj.layout != torch.strided:
            return NotImplemented
        if obj.is_quantized:
            return NotImplemented
        key = self._keys.setdefault(identity(obj), str(len(self._keys)))
        if int(key) == len(self.tensors):
            self.tensors.append(obj)
        # torch describes how a tensor of this type is rebuilt; arguments hold the differences.
        example: Any = torch.empty((), dtype=obj.dtype)
        function, arguments = example.__reduce_ex__(2)
        elements = _Elements(storage_class(arguments[0]), key, _storage_length(obj, arguments[0]))
        shape = tuple(obj.shape)
        return function, (elements, 0, shape, _strides(shape), obj.requires_grad, *arguments[5:])


def write_archive(
    value: Any, file: IO[bytes], *, load: Callable[[Tensor], Tensor], progress: Callable[[int], Any]
) -> None:
    """Write ``value`` so that ``torch.load`` reads it, with one tensor in memory at a time.

    Args:
        value: Anything that ``torch.save`` takes; tensors may be placeholders.
        file: Open, at its beginning.
        load: Gives the elements of a tensor: contiguous, on the CPU.
        progress: Called with the number of bytes of each tensor that has been written.
    """
    pickled = BytesIO()
    pickler = _TensorPickler(pickled)
    pickler.dump(value)
    with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
        _write_record(archive, file, "data.pkl", pickled.getvalue())
        _write_record(archive, file, "byteorder", sys.byteorder.encode())
        for key, tensor in enumerate(pickler.tensors):
            elements = load(tensor)
            _write_record(archive, file, f"data/{key}", as_bytes(elements))
            progress(elements.nbytes)
            del elements  # before the next one is loaded
        _write_record(archive, file, "version", b"3\n")


def _write_record(
    archive: zipfile.ZipFile, file: IO[bytes], name: str, data: "bytes | memoryview"
) -> None:
    record = zipfile.ZipInfo(f"{_FOLDER}/{name}")
    start = file.tell() + _LOCAL_HEADER_BYTES + len(record.filename) + _LARGE_FILE_BYTES
    padding = -(start + 4) % ALIGNMENT_BYTES
    record.extra = _PADDING + padding.to_bytes(2, "little") + bytes(padding)
    with archive.open(record, "w", force_zip64=True) as opened:
        opened.write(data)


def _storage_length(tensor: Tensor, storage: Any) -> int:
    """Elements of the storage, which is in bytes where torch has no class for the dtype."""
    is_typed = isinstance(storage, torch.TypedStorage)
    return tensor.numel() * (1 if is_typed else tensor.element_size())


def _strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides of a contiguous tensor."""
    return tuple(prod(max(1, each) for each in shape[at + 1 :]) for at in range(len(shape)))


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


ADAPTER_WEIGHTS = "adapter_model.safetensors"
ADAPTER_CONFIG = "adapter_config.json"
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
                tensors,
                folder / ADAPTER_WEIGHTS,
                metadata=METADATA,
                load=load_value,
                progress=progress,
            )
            with (folder / ADAPTER_CONFIG).open("w", encoding="utf-8") as opened:
                opened.write(configs[adapter])
                opened.flush()
                os.fsync(opened.fileno())
            total = sum(num_bytes(each) for each in tensors.values())
            where = target if adapter == DEFAULT else target / adapter
            lines.append(f"{where}: {len(tensors)} tensors of the adapter, {total:,} bytes")
    return lines


T = TypeVar("T")


def find_prefix(names: Iterable[str]) -> str:
    """The attribute of the LightningModule that holds its model, with a point behind it.

    It is known if the module has parameters and buffers in one attribute only.

    Raises:
        ConfigError: When there are several.
    """
    counts: dict[str, int] = {}
    for name in names:
        first, point, _ = name.partition(".")
        key = first + point
        counts[key] = counts.get(key, 0) + 1
    if len(counts) == 1:
        (found,) = counts
        if found.endswith("."):
            return found
    found = ", ".join(f"{key} ({count})" for key, count in sorted(counts.items())[:6])
    raise ConfigError(
        f"The tensors of the model are ambiguous: names begin with {found}. Set --prefix '' to "
        f"keep all names as they are, or the prefix to remove, such as --prefix "
        f"{_likeliest(counts)}"
    )


def take_off(tensors: Mapping[str, T], prefix: str) -> dict[str, T]:
    """Return the tensors whose names begin with a prefix, by the rest of their names.

    Raises:
        ConfigError: When there are none.
    """
    kept = {
        name.removeprefix(prefix): each for name, each in tensors.items() if name.startswith(prefix)
    }
    kept.pop("", None)
    if not kept:
        first = next(iter(tensors), "none")
        raise ConfigError(
            f"No tensor has a name that begins with {prefix!r}; the first one is {first}."
        )
    return kept


def _likeliest(counts: Mapping[str, int]) -> str:
    attributes = [each for each in counts if each.endswith(".")]
    return max(attributes, key=lambda each: (counts[each], each), default="''")


LIGHTNING_SUFFIX = ".ckpt"
FOREIGN_SUFFIXES = {".pt", ".pth", ".bin"}
DEFAULT_SHARD_BYTES = 5_000_000_000

Progress = Callable[[int], Any]
Counted = Callable[[int], Progress]
"""Receives the total number of bytes; returns the function that is called with finished ones."""


def export(
    source: str | Path,
    target: str | Path,
    *,
    prefix: str | None,
    max_shard_bytes: int | None,
    force: bool,
    counted: Counted,
    is_for_peft: bool = False,
    hugging_face: Path | None = None,
) -> list[str]:
    """Write ``target`` from a checkpoint; return the lines to show.

    Args:
        source: A directory of shards, by its path or address, or for safetensors also a Lightning
            file.
        target: ``.ckpt`` for a Lightning file, ``.safetensors`` for one file of the weights, else
            a folder of the weights.
        prefix: Prefix to remove from the names for safetensors; None finds it.
        max_shard_bytes: Most bytes of a file in a folder.
        force: Replace what is at ``target``.
        counted: Shows how far it is.
        is_for_peft: Write the adapters of peft alone, into a folder.
        hugging_face: A config.json, or a folder with one: write a folder that ``from_pretrained``
            loads, under the names of the model's files on the Hub. Holds all tensors in memory.

    Raises:
        ConfigError: When something given is wrong.
        CheckpointError: When it could not be written.
    """
    if not isinstance(target, Path):
        raise ConfigError(
            f"{target} is on a remote file system, and what is exported is written to a local disk "
            f"alone. Name a path, and copy the result."
        )
    is_folder = target.suffix not in {LIGHTNING_SUFFIX, SUFFIX}
    _refuse_contradictions(target, prefix, max_shard_bytes, is_folder, is_for_peft, hugging_face)
    check_target(target, source, force=force)
    checkpoint = open_checkpoint(source)
    if is_for_peft:
        adapters = adapters_of(checkpoint, source)
        total = sum(_total(each.values()) for each in adapters.values())
        return write_adapters(checkpoint, adapters, target, progress=counted(total))
    if target.suffix == LIGHTNING_SUFFIX:
        if is_file(source):
            raise ConfigError(f"{source} is a Lightning file as it is: copy it.")
        return _export_file(checkpoint, target, counted)
    return _export_weights(
        checkpoint,
        target,
        prefix=prefix,
        max_shard_bytes=(max_shard_bytes or DEFAULT_SHARD_BYTES) if is_folder else None,
        counted=counted,
        config=None if hugging_face is None else config_file(hugging_face),
    )


def _refuse_contradictions(
    target: Path,
    prefix: str | None,
    max_shard_bytes: int | None,
    is_folder: bool,
    is_for_peft: bool,
    hugging_face: Path | None,
) -> None:
    """Refuse options that are not for this kind of target.

    Raises:
        ConfigError: With the option to leave out.
    """
    if target.suffix in FOREIGN_SUFFIXES:
        raise ConfigError(
            f"{target.name} is to be a file of a kind that is not written. End its name in .ckpt "
            f"for a Lightning file or in .safetensors, or name a folder for safetensors."
        )
    if not is_folder and max_shard_bytes is not None:
        raise ConfigError(
            f"{target.name} is one file, and --max-shard-size divides a folder. Say --to FOLDER."
        )
    if target.suffix == LIGHTNING_SUFFIX and prefix is not None:
        raise ConfigError(
            "A Lightning file keeps the names of the LightningModule. Leave --prefix out, or say "
            "--to FOLDER for safetensors."
        )
    if is_for_peft and (not is_folder or prefix is not None or max_shard_bytes is not None):
        raise ConfigError(
            "--peft writes a folder with names of peft's own. Say --to FOLDER, and leave --prefix "
            "and --max-shard-size out."
        )
    if hugging_face is not None and (not is_folder or is_for_peft):
        raise ConfigError("--hf writes a folder. Say --to FOLDER, and leave --peft out.")


def _export_weights(
    checkpoint: Mapping[str, Any],
    target: Path,
    *,
    prefix: str | None,
    max_shard_bytes: int | None,
    counted: Counted,
    config: Path | None,
) -> list[str]:
    """Write the weights as safetensors: one file, or a folder if ``max_shard_bytes`` is given."""
    tensors = tensors_of(checkpoint)
    found = find_prefix(tensors) if prefix is None else prefix
    model = take_off(tensors, found)
    left_out = [name for name in tensors if not name.startswith(found)]
    if config is not None:
        model = as_on_the_hub(model, config)
    total = _total(model.values())
    aliases = write_model(
        model, target, max_shard_bytes=max_shard_bytes, progress=counted(total), config=config
    )
    lines = [f"{target}: {len(model) - len(aliases)} tensors, {units.traffic(total)}"]
    if found:
        lines.append(f"names: without {found!r}")
    lines += [f"tied: {name} is {kept}, written once" for name, kept in aliases.items()]
    if frozen := checkpoint.get(TRAINABLE_ONLY):
        lines.append(f"not there: {len(frozen)} frozen parameters, which the checkpoint leaves out")
    if left_out:
        lines.append(f"left out: {len(left_out)} tensors elsewhere, such as {left_out[0]}")
    return lines


def _export_file(checkpoint: Mapping[str, Any], target: Path, counted: Counted) -> list[str]:
    total = _total(_all_tensors(checkpoint))
    write_lightning_file(checkpoint, target, progress=counted(total))
    parts = [f"{len(tensors_of(checkpoint))} tensors of the model"]
    if states := checkpoint.get("optimizer_states"):
        parts.append(f"{len(states)} optimizer{'s' if len(states) > 1 else ''}")
    if frozen := checkpoint.get(TRAINABLE_ONLY):
        parts.append(f"without {len(frozen)} frozen parameters")
    if "loops" in checkpoint:
        parts.append(f"step {checkpoint.get('global_step', 0)}")
    return [f"{target}: {', '.join(parts)}, {units.traffic(total)}"]


def _all_tensors(value: Any) -> list[Tensor]:
    """Return every tensor of nested dictionaries and lists."""
    found: list[Tensor] = []
    stack = [value]
    while stack:
        each = stack.pop()
        if isinstance(each, Tensor):
            found.append(each)
        elif isinstance(each, Mapping):
            stack += each.values()
        elif isinstance(each, (list, tuple)):
            stack += each
    return found


def _total(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of tensors, each counted once."""
    return sum(num_bytes(each) for each in {id(each): each for each in tensors}.values())
