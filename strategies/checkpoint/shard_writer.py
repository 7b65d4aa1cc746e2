"""Writes this rank's shards in the format of ``torch.distributed.checkpoint``.

torch's writer keeps every tensor that it has copied to the CPU until its file is closed: a rank's
full share of model and optimizer, which may not fit with offload. This one holds one
shard at a time. It also writes a checksum after each piece, which torch's readers ignore.
"""

import os
import pickle
import struct
from dataclasses import replace
from typing import Any, BinaryIO, cast

from torch import Tensor
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import (
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.distributed.tensor import DTensor
from torch.futures import Future
from typing_extensions import override

from boltmesh.strategies.checkpoint.chunks import (
    KeptInOrder,
    OffloadedChunk,
    Snapshot,
    TensorPart,
    narrow,
    own_chunks,
    own_part,
    split,
    within,
)
from boltmesh.strategies.checkpoint.file import SummedFile, save_into
from boltmesh.strategies.checkpoint.manifest import METADATA, Written, checksum_start
from boltmesh.strategies.checkpoint.storage.folder import Draft
from boltmesh.strategies.torch_compat.files import storage_info

CHECKSUM = struct.Struct("<I")
"""The CRC-32 of a piece, directly after it; it starts at ``manifest.checksum_start``."""

SUFFIX = ".distcp"
"""Suffix of files of shards, as in torch."""


class PiecePlanner(DefaultSavePlanner):
    """Plans a rank's shards in pieces. Ranks that hold the same shard share the work.

    The state holds only tensors; those that are neither DTensor nor ``TensorPart`` are equal on all
    ranks, or are taken from the first.

    Args:
        is_divided: Whether each of these is on one rank only, which writes it.
    """

    def __init__(self, *, is_divided: bool = False) -> None:
        super().__init__(flatten_sharded_tensors=False)
        self._is_divided = is_divided
        self._read: tuple[str, Tensor] | None = None
        """Name and value of the shard that was read last."""

    @override
    def create_local_plan(self) -> SavePlan:
        items = []
        for name, tensor in sorted(self.state_dict.items(), key=_position_of_item):
            assert isinstance(tensor, Tensor)
            writes_plain = self.is_coordinator or self._is_divided
            if is_written_here(tensor, writes_plain=writes_plain):
                items += _pieces(name, tensor, keeps_empty=writes_plain)
        self.plan = SavePlan(items, planner_data=self.mappings)
        return self.plan

    @override
    def resolve_data(self, write_item: WriteItem) -> Tensor:
        assert write_item.tensor_data is not None
        name, piece = write_item.index.fqn, write_item.tensor_data.chunk
        tensor = self.state_dict[name]
        part = own_part(tensor)
        if isinstance(part, OffloadedChunk):
            if self._read is None or self._read[0] != name:
                self._read = None  # never keep two
                self._read = (name, part.read())
            part = self._read[1]
        places = (within(chunk, piece) for chunk in own_chunks(tensor))
        offsets = next(each for each in places if each is not None)
        return narrow(part, offsets, piece.sizes)


def is_written_here(tensor: Tensor, *, writes_plain: bool) -> bool:
    """Whether this rank writes a part of a tensor.

    Args:
        tensor: A tensor of the checkpoint.
        writes_plain: Whether this rank writes tensors that are not shards.
    """
    if isinstance(tensor, Snapshot):
        return tensor.copied is not None
    kept = tensor.known()[0] if isinstance(tensor, TensorPart) else tensor
    if isinstance(kept, DTensor):
        return kept.device_mesh.get_coordinate() is not None
    return isinstance(tensor, TensorPart) or writes_plain


def in_stored_order(tensor: Tensor) -> int:
    """Return the position of a tensor in offload's storage, -1 if it is not there.

    A parameter is next to its moments.
    """
    if isinstance(tensor, Snapshot):
        return -1
    part = own_part(tensor)
    return part.position if isinstance(part, KeptInOrder) else -1


def _position_of_item(item: tuple[str, Any]) -> int:
    return in_stored_order(item[1])


def _pieces(name: str, tensor: Tensor, *, keeps_empty: bool) -> list[WriteItem]:
    chunks = [each.whole for each in own_chunks(tensor)]
    if not keeps_empty and all(0 in each.sizes for each in chunks):
        return []
    # Not read from the tensor: an offloaded one would be loaded for that.
    properties = TensorProperties(dtype=tensor.dtype, requires_grad=tensor.requires_grad)
    return [
        WriteItem(
            index=MetadataIndex(name, piece.offsets),
            type=WriteItemType.SHARD,
            tensor_data=TensorWriteData(piece, properties, tensor.size()),
        )
        for chunk in chunks
        for piece in split(chunk, tensor.element_size())
    ]


class ShardWriter(StorageWriter):
    """Writes one file of shards per rank.

    Args:
        draft: The folder, which all ranks have joined.
    """

    def __init__(self, draft: Draft) -> None:
        self._draft = draft
        self.written: dict[str, Written] = {}
        """On the first rank, after writing: all files, with sizes and checksums."""

    @override
    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        pass

    @override
    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        pass

    @override
    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    @override
    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        # The names of torch's own writer.
        return [
            replace(plan, storage_data=f"__{rank}_0{SUFFIX}") for rank, plan in enumerate(plans)
        ]

    @override
    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        results = []
        if plan.items:
            name = str(plan.storage_data)
            with self._draft.create(name) as opened:
                file = SummedFile(opened)
                for item in plan.items:
                    start = checksum_start(self._draft.save, name, file.num_bytes)
                    offset, length = _write_piece(planner, item, file, start)
                    where = storage_info(name, offset, length)
                    results.append(WriteResult(item.index, length, where))
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    @override
    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        places = {each.index: each.storage_data for rank in results for each in rank}
        metadata.version = getattr(filesystem, "CURRENT_DCP_VERSION", None)
        metadata.storage_data = places
        # Without the folder, which is renamed once it is complete.
        metadata.storage_meta = StorageMeta()
        for each in places.values():
            end = each.offset + each.length + CHECKSUM.size
            known = self.written.get(each.relative_path, Written(0, None))
            self.written[each.relative_path] = Written(max(end, known.num_bytes), None)
        with self._draft.create(METADATA) as opened:
            file = SummedFile(opened)
            pickle.dump(metadata, file)
        self.written[METADATA] = file.written()

    @classmethod
    @override
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True


def _write_piece(
    planner: SavePlanner, item: WriteItem, file: SummedFile, start: int
) -> tuple[int, int]:
    """Append a piece and its checksum; return its offset and length. No reference to it remains."""
    data = planner.resolve_data(item)
    assert isinstance(data, Tensor)
    offset = file.num_bytes
    file.crc32 = start
    save_into(_compact(data), cast("BinaryIO", file))
    length = file.num_bytes - offset
    file.write(CHECKSUM.pack(file.crc32))
    return offset, length


def _compact(part: Tensor) -> Tensor:
    """Return a tensor on the CPU whose storage has no other elements: torch saves full storages."""
    part = part.detach().cpu().contiguous()
    return part if part.untyped_storage().nbytes() == part.nbytes else part.clone()
