"""Shards on a disk between the wrapping of a unit and the optimizers that say how to keep them.

A model that is built unit by unit never is in memory as a whole: each unit's shards leave it
before the next unit is made. They are read back bucket by bucket when the engine takes them over.
"""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor
from typing_extensions import override

from boltmesh.strategies.offload import stores
from boltmesh.strategies.offload.bucket_layout import ShardedParam
from boltmesh.strategies.offload.disk.swap_file import Swap
from boltmesh.strategies.offload.host_memory import allocate_host
from boltmesh.strategies.offload.shard_tensor import GatheredSource, OffloadedShard
from boltmesh.strategies.torch_compat.tensors import local_tensor
from boltmesh.telemetry.writer.null_recorder import NullRecorder
from boltmesh.telemetry.writer.recorder import Recorder

CPU = torch.device("cpu")

NUM_THREADS = 2
"""For each direction: each takes a stack, beside those of the file that follows."""


class StagingFile:
    """A file for shards that nobody steps yet. It goes with the last shard that is parked in it.

    Args:
        folder: Where to make the file. It grows with what is parked.
        device: Where the model is computed.
        rank: Whose file it is, for messages.
        recorder: Is told of transfers.
    """

    def __init__(
        self,
        folder: Path | str,
        *,
        device: torch.device,
        rank: int = 0,
        recorder: Recorder | NullRecorder | None = None,
    ) -> None:
        self._device = device
        self._swap = Swap(folder, rank=rank, recorder=recorder, num_threads=NUM_THREADS)

    def park(self, held: Sequence[ShardedParam]) -> None:
        """Write shards to the disk and let something without memory stand for them.

        Small ones stay where they are.

        Raises:
            OffloadError: When the disk is full or fails.
        """
        for each in held:
            if each.padded_numel < max(1, stores.SMALL_NUMEL):
                continue
            value = each.value()
            source = _StagedSource(self._swap, each, value.dtype, self._device)
            source.write(value)
            local = local_tensor(each.parameter)
            shard = OffloadedShard.of(source, tuple(local.shape), value.dtype, self._device)
            each.replace(shard, shard.shell(each.padded_numel))


class _StagedSource(GatheredSource):
    """One parked shard."""

    def __init__(
        self, swap: Swap, held: ShardedParam, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.name = held.name
        self._swap = swap
        self._shape = tuple(local_tensor(held.parameter).shape)
        self._padded_shape = held.padded_shape
        self._dtype = dtype
        self._compute_dtype = held.compute_dtype
        self._device = device
        num_bytes = self._numel * dtype.itemsize
        self._extent = swap.allocate(f"the parked {held.name}", num_bytes)

    @property
    def _numel(self) -> int:
        return torch.Size(self._shape).numel()

    @override
    def read(self) -> Tensor:
        buffer = allocate_host(self._extent.num_bytes, device=CPU)
        self._swap.read(self._extent, buffer).wait()
        return self._cut(buffer).view(self._shape)

    @override
    def write(self, value: Tensor) -> None:
        buffer = allocate_host(self._extent.num_bytes, device=CPU)
        self._cut(buffer).copy_(value.detach().reshape(-1))
        self._swap.write(self._extent, buffer).wait()

    @override
    def fetch(self) -> Tensor:
        padded = torch.zeros(self._padded_shape, dtype=self._compute_dtype, device=self._device)
        padded.view(-1)[: self._numel].copy_(self.read().view(-1))
        return padded

    @override
    def release(self) -> None:
        """What ``fetch`` gave is the caller's own."""

    def _cut(self, buffer: Tensor) -> Tensor:
        return buffer[: self._numel * self._dtype.itemsize].view(self._dtype)
