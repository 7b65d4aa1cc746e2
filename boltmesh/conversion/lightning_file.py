"""One file of a directory of shards, which plain Lightning loads and resumes from.

Optimizer state as torch's optimizers keep it: parameters by number instead of by name.

Writes torch's file format one tensor at a time.

``torch.save`` wants every tensor in memory before it writes the first. Its format does not: an
archive without compression whose ``data.pkl`` names each tensor's elements, which are a record of
their own, https://docs.pytorch.org/docs/stable/notes/serialization.html. Here the pickle is
written from tensors that may be placeholders, and each record from the value that is loaded for it.

(``torch.serialization.skip_data`` leaves room for the elements as well, but writes no checksums of
what is filled in later: other readers of archives take such a file for damaged.)
"""

import os
import pickle
import sys
import warnings
import zipfile
from collections.abc import Callable, Mapping
from io import BytesIO
from math import prod
from pathlib import Path
from typing import IO, Any, NamedTuple

import torch
from torch import Tensor
from typing_extensions import override

from boltmesh.conversion.source import as_bytes, identity, load_value
from boltmesh.conversion.writing import written_whole
from boltmesh.errors import ConfigError
from boltmesh.strategies.checkpoint.directory import OPTIMIZERS
from boltmesh.strategies.checkpoint.optimizer_state import PARAMS, PENDING, is_named
from boltmesh.strategies.checkpoint.shard_reader import Placeholder
from boltmesh.strategies.torch_compat.files import storage_class


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
"""Of each tensor's elements in the file, as torch has it, for those who map it."""

_FOLDER = "archive"
_LOCAL_HEADER_BYTES = 30
_LARGE_FILE_BYTES = 20
"""What zipfile adds to the header of a record that may be larger than 4 GiB."""
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
        # torch says how a tensor of this type is made again; what differs is told by arguments.
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
    """Of a contiguous tensor."""
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
