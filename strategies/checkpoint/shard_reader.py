"""Reads tensors of a directory of shards, independently of the ranks that wrote them.

Reading is not collective: each rank reads the pieces that overlap its part, one at a time.

``Placeholder`` is a tensor of a checkpoint that is not in memory yet. It has the shape and dtype of
the full tensor and no elements. ``parameter.copy_(placeholder)``, as ``load_state_dict`` calls it,
fills the part of the parameter that this rank holds. So hooks of torch and of users around
loading run as usual, and no rank holds a full tensor.
"""

import io
import pickle
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from typing_extensions import override

from boltmesh.errors import BoltMeshError, CheckpointError
from boltmesh.strategies.checkpoint.chunks import (
    DimDivision,
    OffloadedChunk,
    TensorPart,
    narrow,
    own_chunks,
    own_part,
)
from boltmesh.strategies.checkpoint.manifest import checksum_start
from boltmesh.strategies.checkpoint.safe_load import safe_load
from boltmesh.strategies.checkpoint.shard_writer import CHECKSUM
from boltmesh.strategies.checkpoint.storage.folder import Folder
from boltmesh.strategies.torch_compat.tensors import is_composite

_TORCH_NAMES = {
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.distributed.checkpoint.metadata": {
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
    "torch.serialization": {"_get_layout"},
}


@contextmanager
def refusing_nonsense(place: object) -> Iterator[None]:
    """Context that raises errors due to a checkpoint's contents as errors that name it.

    Raises:
        CheckpointError: If its contents contradict each other.
    """
    try:
        yield
    except (BoltMeshError, torch.OutOfMemoryError):
        raise
    except (
        ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError,
        ValueError,
    ) as error:  # fmt: skip
        reason = "".join(each if each.isprintable() else "?" for each in str(error)[:200])
        raise CheckpointError(
            f"{place} has contents that contradict each other ({type(error).__name__}: {reason}). "
            f"Take another checkpoint."
        ) from error


class ShardReader:
    """The tensors of one directory.

    Args:
        folder: The folder of the files of a complete directory.
        save: Id of the save, see ``manifest.checksum_start``.
        metadata: The content of its ``.metadata``.

    Raises:
        CheckpointError: If the metadata were not written by boltmesh.
    """

    def __init__(self, folder: Folder, save: str, metadata: bytes) -> None:
        self._folder = folder
        self._save = save
        self._metadata = _parse(folder, metadata)

    def paths(self) -> dict[str, tuple[str, ...]]:
        """Return each tensor's name in the directory, and the keys under which it was saved."""
        with refusing_nonsense(self._folder):
            return {
                name: tuple(map(str, keys)) for name, keys in self._metadata.planner_data.items()
            }

    def size_and_dtype(self, name: str) -> tuple[torch.Size, torch.dtype]:
        """Return size and dtype of the full tensor."""
        entry = self._entry(name)
        return entry.size, entry.properties.dtype

    def read_into(self, name: str, destination: Tensor) -> None:
        """Fill this rank's part of ``destination``, which has the full tensor's shape. Local."""
        part = own_part(destination)
        chunks = [each for each in own_chunks(destination) if 0 not in each.whole.sizes]
        if not chunks:
            return
        value = part
        if isinstance(part, OffloadedChunk):
            value = torch.empty(part.shape, dtype=part.dtype)
        for chunk, offsets in chunks:
            self._fill(name, narrow(value, offsets, chunk.sizes), chunk)
        if isinstance(part, OffloadedChunk):
            part.write(value)

    def pieces(self) -> list[MetadataIndex]:
        """Return all pieces of all tensors, in the order in which they are stored."""
        places = self._metadata.storage_data
        with refusing_nonsense(self._folder):
            return sorted(
                places, key=lambda index: (places[index].relative_path, places[index].offset)
            )

    def check(self, index: MetadataIndex) -> None:
        """Compare the checksum of a piece.

        Raises:
            CheckpointError: If the bytes are not those that were written.
            OSError: If they cannot be read.
        """
        with refusing_nonsense(self._folder):
            self._read(index)

    def _entry(self, name: str) -> TensorStorageMetadata:
        with refusing_nonsense(self._folder):
            entry = self._metadata.state_dict_metadata[name]
            assert isinstance(entry, TensorStorageMetadata), f"{name!r} is no tensor"
        return entry

    def _fill(self, name: str, part: Tensor, chunk: ChunkStorageMetadata) -> None:
        with refusing_nonsense(self._folder):
            for item in create_read_items_for_chunk_list(name, self._entry(name), [chunk]):
                piece = narrow(self._piece(item.storage_index), item.storage_offsets, item.lengths)
                narrow(part, item.dest_offsets, item.lengths).copy_(piece)

    def _piece(self, index: MetadataIndex) -> Tensor:
        piece: Tensor = safe_load(self._read(index), f"{self._folder}: {index.fqn}")
        return piece

    def _read(self, index: MetadataIndex) -> io.BytesIO:
        """Return the bytes of one piece, after a check of its checksum."""
        where = self._metadata.storage_data.get(index)
        if where is None:
            raise CheckpointError(
                f"{self._folder} does not hold what this rank loads of {index.fqn!r}: ranks with "
                f"other shards have written it. Start with the options of that run, or delete it."
            )
        name = Path(where.relative_path).name
        # Bytes without another reference are sliced without a copy.
        stream = io.BytesIO(self._folder.read(name, where.offset, where.length + CHECKSUM.size))
        with stream.getbuffer() as stored:
            end = bytes(stored[where.length :])
            start = checksum_start(self._save, name, where.offset)
            is_whole = len(end) == CHECKSUM.size and (
                CHECKSUM.unpack(end)[0] == zlib.crc32(stored[: where.length], start)
            )
        stream.truncate(where.length)
        if not is_whole:
            other = ", or is of another save" if self._save else ""
            raise CheckpointError(
                f"{self._folder}/{name} was damaged after it was written{other}: the checksum of "
                f"{index.fqn!r} is wrong. Resume from another checkpoint."
            )
        return stream


def _parse(folder: Folder, data: bytes) -> Metadata:
    try:
        metadata = _MetadataUnpickler(io.BytesIO(data)).load()
        is_ours = isinstance(metadata, Metadata) and isinstance(metadata.planner_data, dict)
    except Exception as error:
        # A foreign pickle may raise any error.
        raise CheckpointError(f"{folder} has a .metadata that cannot be read: {error}") from error
    if not is_ours:
        raise CheckpointError(f"{folder} has a .metadata that boltmesh has not written.")
    assert isinstance(metadata, Metadata)
    return metadata


class _MetadataUnpickler(pickle.Unpickler):  # noqa: S301 - it is what makes it safe
    """Only builds the classes of torch's metadata: another pickle could execute any code."""

    @override
    def find_class(self, module_name: str, global_name: str, /) -> Any:
        if global_name in _TORCH_NAMES.get(module_name, ()):
            return super().find_class(module_name, global_name)
        if module_name == "torch" and (
            global_name == "Size" or isinstance(getattr(torch, global_name, None), torch.dtype)
        ):
            return super().find_class(module_name, global_name)
        raise pickle.UnpicklingError(f"{module_name}.{global_name} has no place in it")


class Placeholder(Tensor):
    """Stands for a stored tensor in a checkpoint's dictionary. Hooks may rename it or drop it."""

    filler: Callable[[Tensor], None]
    """Writes the value to a tensor; tensors computed from a placeholder do not have it."""

    @staticmethod
    def of(size: torch.Size, dtype: torch.dtype, fill: Callable[[Tensor], None]) -> "Placeholder":
        """Return a placeholder; ``fill`` writes its value to a tensor of shape ``size``."""
        made = torch.empty(size, dtype=dtype, device="meta").as_subclass(Placeholder)
        made.filler = fill
        return made

    def fill(self, destination: Tensor) -> None:
        """Write this rank's part of the value to ``destination``, which has the same shape.

        Raises:
            CheckpointError: If this was computed from a placeholder and so has no value.
        """
        if not hasattr(self, "filler"):
            raise CheckpointError(
                "on_load_checkpoint has computed something from a tensor of a checkpoint whose "
                "values are not loaded yet. Call load() on the tensor to get its whole value."
            )
        with torch.no_grad():
            self.filler(destination)

    def load(self) -> Tensor:
        """Return the full value on the CPU, for hooks that read it."""
        value = torch.empty(self.shape, dtype=self.dtype)
        self.fill(value)
        return value

    @classmethod
    @override
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is Tensor.copy_ and not isinstance(args[0], Placeholder):
            args[1].fill(args[0])
            return args[0]
        return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]

    @override
    def __deepcopy__(self, memo: dict[int, Any]) -> "Placeholder":
        return self  # it is immutable


def stored(reader: ShardReader, name: str) -> Placeholder:
    """Return the placeholder of a tensor in a directory of shards."""
    return Placeholder.of(
        *reader.size_and_dtype(name), lambda destination: reader.read_into(name, destination)
    )


def held(value: Any) -> Any:
    """Return a placeholder for a tensor that every rank holds in full; other values unchanged."""

    def fill(destination: Tensor) -> None:
        part = own_part(destination)
        chunks = [each for each in own_chunks(destination) if 0 not in each.whole.sizes]
        if not isinstance(part, OffloadedChunk):
            for chunk, offsets in chunks:
                own = narrow(value, chunk.offsets, chunk.sizes)
                narrow(part, offsets, chunk.sizes).copy_(own)
        elif len(chunks) == 1:
            part.write(narrow(value, chunks[0].whole.offsets, chunks[0].whole.sizes))
        elif chunks:
            kept = torch.empty(part.shape, dtype=part.dtype)
            for chunk, offsets in chunks:
                own = narrow(value, chunk.offsets, chunk.sizes)
                narrow(kept, offsets, chunk.sizes).copy_(own)
            part.write(kept)

    if isinstance(value, Placeholder) or not isinstance(value, Tensor) or is_composite(value):
        return value
    return Placeholder.of(value.shape, value.dtype, fill)


def divided(value: Any, division: DimDivision, name: str) -> Any:
    """Return a placeholder for this rank's part of a full tensor; a one-element tensor unchanged.

    Args:
        value: A full tensor or placeholder of a checkpoint, of ``division.shape``.
        division: Its division. The placeholder has ``division.local_shape``.
        name: Name of the tensor, for messages.

    Raises:
        CheckpointError: If the value does not have the full shape.
    """
    if not isinstance(value, Tensor) or (value.numel() <= 1 and value.shape != division.shape):
        return value
    if value.shape != division.shape:
        raise CheckpointError(
            f"{name} has the shape {tuple(value.shape)} in the checkpoint and "
            f"{tuple(division.shape)} in the model. Load it into the model that it was made with."
        )
    source = held(value)

    def fill(destination: Tensor) -> None:
        source.fill(TensorPart.of(destination, division))

    return Placeholder.of(division.local_shape, value.dtype, fill)


def passed_over(value: Any) -> Any:
    """Return a placeholder that loads nothing, for a tensor that this rank does not hold."""

    def fill(destination: Tensor) -> None:
        pass

    return Placeholder.of(value.shape, value.dtype, fill) if isinstance(value, Tensor) else value
