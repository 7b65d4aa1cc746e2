"""Opens the stores that a layout needs, each sized for what it will hold."""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from boltmesh.strategies.offload.buckets import Bucket, BucketChunk, Slot
from boltmesh.strategies.offload.chunk_placement import plan_places
from boltmesh.strategies.offload.disk.param_store import WINDOW_BYTES, DiskParameterStore
from boltmesh.strategies.offload.disk.preflight import DiskLoad, DiskReport, measure_disk
from boltmesh.strategies.offload.disk.state_store import NUM_BUFFERS, DiskStateStore
from boltmesh.strategies.offload.disk.swap_file import Swap
from boltmesh.strategies.offload.host_memory import HostArena
from boltmesh.strategies.offload.memory_stores import (
    RING_UNITS,
    DeviceParameterStore,
    DeviceStore,
    HostParameterStore,
    HostStore,
)
from boltmesh.strategies.offload.store_api import CHUNK_NUMEL, ParameterStore, StateStore
from boltmesh.strategies.offload.streams import aligned
from boltmesh.telemetry.writer.null_recorder import NullRecorder
from boltmesh.telemetry.writer.recorder import Recorder

SMALL_NUMEL = 1 << 16
"""A shard of fewer elements stays on the device: to fetch it takes longer than it is worth."""


@dataclass(frozen=True)
class OffloadPlan:
    """Where to keep what.

    Attributes:
        shares: Of the optimizer state, by ``"host"`` and ``"disk"``; the rest stays on the device.
        parameters: Where the shards that are gathered live: ``"cpu"``, ``"nvme"`` or, with None,
            on the device.
        path: A folder for the swap file.
    """

    shares: Mapping[str, float]
    parameters: str | None = None
    path: str | Path | None = None


@dataclass
class OpenStores:
    """The stores of one layout."""

    states: dict[str, StateStore] = field(default_factory=dict)
    parameters: list[ParameterStore] = field(default_factory=list)
    of_slot: dict[Slot, ParameterStore] = field(default_factory=dict)
    swap: Swap | None = None
    disk: DiskReport | None = None

    def reserve(self, bucket: Bucket, num_tensors: int) -> None:
        """Allocate host memory for what a bucket puts there.

        Bucket by bucket, as they leave where they were: the host never has all of it twice.
        """
        state = self.states.get("host")
        if isinstance(state, HostStore):
            on_host = [chunk for chunk in bucket.chunks if chunk.store is state]
            state.reserve(sum(HostStore.bytes_of(each.numel, num_tensors) for each in on_host))
        for store in self.parameters:
            if isinstance(store, HostParameterStore):
                slots = [slot for slot in bucket.slots if self.of_slot[slot] is store]
                sizes = [slot.padded_numel * slot.dtype.itemsize for slot in slots]
                store.reserve(sum(map(HostArena.bytes_of, sizes)))

    def close(self) -> None:
        """Close all of them."""
        for state in self.states.values():
            state.close()
        for parameters in self.parameters:
            parameters.close()


def place_chunks(
    buckets: Sequence[Bucket],
    num_tensors: Mapping[Bucket, int],
    plan: OffloadPlan,
    first_number: int = 0,
) -> None:
    """Cut buckets, given in the order of the forward pass, and say where each chunk lives."""
    chunks: list[BucketChunk] = []
    for bucket in buckets:
        bucket.cut(first_number, CHUNK_NUMEL)
        first_number += len(bucket.chunks)
        chunks.extend(bucket.chunks)
    arriving = chunks[::-1]
    sizes = [chunk.numel * num_tensors[chunk.bucket] for chunk in arriving]
    for chunk, place in zip(arriving, plan_places(sizes, plan.shares), strict=True):
        chunk.place = place


def num_buffers(numels: Sequence[int]) -> int:
    """How many chunks a disk's ring holds: as many bytes as with chunks of full size.

    Units may be smaller than a chunk, and a few small transfers do not fill a disk's queue. But
    no more than a sixteenth of the state: who offloads to a disk is short of memory.
    """
    enough = NUM_BUFFERS * CHUNK_NUMEL // max(numels)
    return max(NUM_BUFFERS, min(enough, len(numels) // 16))


def open_stores(
    buckets: Sequence[Bucket],
    num_tensors: Mapping[Bucket, int],
    plan: OffloadPlan,
    *,
    device: torch.device,
    rank: int,
    recorder: Recorder | NullRecorder,
    is_current: Callable[[int], bool],
) -> OpenStores:
    """Open what placed buckets need, empty.

    Raises:
        OffloadError: When there is not that much memory or disk.
    """
    chunks = [chunk for bucket in buckets for chunk in bucket.chunks]
    slots = [slot for bucket in buckets for slot in bucket.slots]
    large = [slot for slot in slots if plan.parameters and slot.padded_numel >= SMALL_NUMEL]
    stores = OpenStores()
    sizes = {
        place: [(c.numel, num_tensors[c.bucket]) for c in chunks if c.place == place]
        for place in ("device", "host", "disk")
    }
    if sizes["disk"] or (large and plan.parameters == "nvme"):
        assert plan.path is not None
        state_bytes = sum(DiskStateStore.bytes_of(*size) for size in sizes["disk"])
        copy_bytes = _copy_bytes(large) if plan.parameters == "nvme" else 0
        load = DiskLoad(
            step_read_bytes=state_bytes,
            step_write_bytes=state_bytes + copy_bytes,
            numel=sum(numel for numel, _ in sizes["disk"]),
            gather_bytes=copy_bytes,
        )
        stores.swap = Swap(
            os.fspath(plan.path),
            state_bytes + copy_bytes,
            rank=rank,
            recorder=recorder,
            device=device,
        )
        stores.disk = measure_disk(stores.swap, load)
    if sizes["host"]:
        stores.states["host"] = HostStore(device)
    if sizes["device"]:
        stores.states["device"] = DeviceStore(device)
    if sizes["disk"]:
        assert stores.swap is not None
        stores.states["disk"] = DiskStateStore(
            stores.swap, device=device, num_buffers=num_buffers([n for n, _ in sizes["disk"]])
        )
    for chunk in chunks:
        chunk.store = stores.states[chunk.place]
    resident = DeviceParameterStore(device, recorder=recorder)
    stores.parameters = [resident]
    away: ParameterStore = resident
    if large and plan.parameters == "nvme":
        assert stores.swap is not None
        # Three units: one that is gathered, one that FSDP2 gathers early, one that is read ahead.
        is_large = set(large)
        largest = max(_copy_bytes([s for s in b.slots if s in is_large]) for b in buckets)
        away = DiskParameterStore(
            stores.swap,
            device=device,
            window_bytes=max(min(WINDOW_BYTES, _copy_bytes(large) // 4), 3 * largest),
            is_current=is_current,
        )
    elif large:
        is_large = set(large)
        sizes_of = [
            [s.padded_numel * s.dtype.itemsize for s in bucket.slots if s in is_large]
            for bucket in buckets
        ]
        units = [sum(map(aligned, each)) for each in sizes_of]
        away = HostParameterStore(
            device,
            ring_bytes=min(sum(units), RING_UNITS * max(units)),
            is_current=is_current,
            recorder=recorder,
        )
    if away is not resident:
        stores.parameters.append(away)
    is_away = set(large)
    stores.of_slot = {slot: away if slot in is_away else resident for slot in slots}
    return stores


def _copy_bytes(slots: Sequence[Slot]) -> int:
    return sum(DiskParameterStore.bytes_of(slot.padded_numel, slot.dtype) for slot in slots)
