"""Reads tensors of a directory of shards, whichever ranks have written which parts of them.

Reading needs no other rank: each takes what its own part overlaps, one piece at a time.
"""

import io
import pickle
import zlib
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

from boltmesh.errors import CheckpointError
from boltmesh.strategies.checkpoint.folders.folder import Folder
from boltmesh.strategies.checkpoint.pieces import KeptElsewhere, narrow, own_chunks, own_part
from boltmesh.strategies.checkpoint.safe_load import safe_load
from boltmesh.strategies.checkpoint.shard_writer import CHECKSUM

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


class ShardReader:
    """The tensors of one directory.

    Args:
        folder: Where the files of a complete directory lie.
        metadata: The content of its ``.metadata``.

    Raises:
        CheckpointError: When the metadata is not what boltmesh writes.
    """

    def __init__(self, folder: Folder, metadata: bytes) -> None:
        self._folder = folder
        self._metadata = _parse(folder, metadata)

    def paths(self) -> dict[str, tuple[str, ...]]:
        """Each tensor's name in the directory, and the keys under which it was saved."""
        return {name: tuple(map(str, keys)) for name, keys in self._metadata.planner_data.items()}

    def size_and_dtype(self, name: str) -> tuple[torch.Size, torch.dtype]:
        """Of the whole tensor."""
        entry = self._entry(name)
        return entry.size, entry.properties.dtype

    def read_into(self, name: str, destination: Tensor) -> None:
        """Fill this rank's part of ``destination``, which has the shape of the stored tensor."""
        part = own_part(destination)
        chunks = [each for each in own_chunks(destination) if 0 not in each.whole.sizes]
        if not chunks:
            return
        value = part
        if isinstance(part, KeptElsewhere):
            value = torch.empty(part.shape, dtype=part.dtype)
        for chunk, offsets in chunks:
            self._fill(name, narrow(value, offsets, chunk.sizes), chunk)
        if isinstance(part, KeptElsewhere):
            part.write(value)

    def _entry(self, name: str) -> TensorStorageMetadata:
        entry = self._metadata.state_dict_metadata[name]
        assert isinstance(entry, TensorStorageMetadata)
        return entry

    def _fill(self, name: str, part: Tensor, chunk: ChunkStorageMetadata) -> None:
        for item in create_read_items_for_chunk_list(name, self._entry(name), [chunk]):
            piece = narrow(self._piece(item.storage_index), item.storage_offsets, item.lengths)
            narrow(part, item.dest_offsets, item.lengths).copy_(piece)

    def _piece(self, index: MetadataIndex) -> Tensor:
        where = self._metadata.storage_data[index]
        name = Path(where.relative_path).name
        # A stream of bytes that nobody else holds is cut without a copy.
        stream = io.BytesIO(self._folder.read(name, where.offset, where.length + CHECKSUM.size))
        with stream.getbuffer() as stored:
            end = bytes(stored[where.length :])
            is_whole = len(end) == CHECKSUM.size and (
                CHECKSUM.unpack(end)[0] == zlib.crc32(stored[: where.length])
            )
        if not is_whole:
            raise CheckpointError(
                f"{self._folder}/{name} was damaged after it was written: the checksum of "
                f"{index.fqn!r} is wrong. Resume from another checkpoint."
            )
        stream.truncate(where.length)
        piece: Tensor = safe_load(stream, f"{self._folder}/{name}")
        return piece


def _parse(folder: Folder, data: bytes) -> Metadata:
    try:
        metadata = _MetadataUnpickler(io.BytesIO(data)).load()
        is_ours = isinstance(metadata, Metadata) and isinstance(metadata.planner_data, dict)
    except Exception as error:
        # Whatever a foreign pickle makes the machine stumble over.
        raise CheckpointError(f"{folder} has a .metadata that cannot be read: {error}") from error
    if not is_ours:
        raise CheckpointError(f"{folder} has a .metadata that boltmesh has not written.")
    assert isinstance(metadata, Metadata)
    return metadata


class _MetadataUnpickler(pickle.Unpickler):  # noqa: S301 - it is what makes it safe
    """Makes what torch's metadata consists of, and nothing else: a pickle could run any code."""

    @override
    def find_class(self, module_name: str, global_name: str, /) -> Any:
        if global_name in _TORCH_NAMES.get(module_name, ()):
            return super().find_class(module_name, global_name)
        if module_name == "torch" and (
            global_name == "Size" or isinstance(getattr(torch, global_name, None), torch.dtype)
        ):
            return super().find_class(module_name, global_name)
        raise pickle.UnpicklingError(f"{module_name}.{global_name} has no place in it")
