"""Opens the stores that a layout needs, sized for their content."""

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from boltmesh.strategies.offload.buckets import Bucket, BucketChunk, Slot
from boltmesh.strategies.offload.chunk_placement import plan_places
from boltmesh.strategies.offload.disk.param_store import WINDOW_BYTES, DiskParameterStore
from boltmesh.strategies.offload.disk.preflight import (
    LEAST_BYTES,
    DiskLoad,
    DiskReport,
    measure_disk,
)
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
"""Smaller shards stay on the device: fetching them costs more time than their memory is worth."""


@dataclass(frozen=True)
class OffloadPlan:
    """Where optimizer state and parameters are stored.

    Attributes:
        shares: Fractions of the optimizer state on ``"host"`` and ``"disk"``; the rest stays on
            the device.
        parameters: Where the shards for all-gathers are stored: ``"cpu"``, ``"nvme"``, or None for
            the device.
        path: Folder for the swap file.
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
        """Allocate the host memory that a bucket needs.

        Called bucket by bucket while they are moved, so the host never holds all state twice.
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
        """Close all stores."""
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
    """Cut buckets, given in the order of the forward pass, and set the place of each chunk."""
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
    """Return how many chunks a disk's ring holds: as many bytes as with full-size chunks.

    Units may be smaller than a chunk, and a few small transfers do not fill a disk's queue. At
    most a sixteenth of the chunks, since disk offload means that memory is short.
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
    """Open the empty stores that placed buckets need.

    Raises:
        OffloadError: When memory or disk space is insufficient.
    """
    chunks = [chunk for bucket in buckets for chunk in bucket.chunks]
    slots = [slot for bucket in buckets for slot in bucket.slots]
    away = {slot for slot in slots if plan.parameters and slot.padded_numel >= SMALL_NUMEL}
    on_disk = [(each.numel, num_tensors[each.bucket]) for each in chunks if each.place == "disk"]
    stores = OpenStores()
    if on_disk or (away and plan.parameters == "nvme"):
        assert plan.path is not None
        state_bytes = sum(DiskStateStore.bytes_of(*size) for size in on_disk)
        copy_bytes = _copy_bytes(away) if plan.parameters == "nvme" else 0
        load = DiskLoad(
            step_read_bytes=state_bytes,
            step_write_bytes=state_bytes + copy_bytes,
            numel=sum(numel for numel, _ in on_disk),
            gather_bytes=copy_bytes,
        )
        stores.swap = Swap(
            os.fspath(plan.path),
            max(state_bytes + copy_bytes, LEAST_BYTES),
            rank=rank,
            recorder=recorder,
            device=device,
        )
        stores.disk = measure_disk(stores.swap, load)
    places = {chunk.place for chunk in chunks}
    if "host" in places:
        stores.states["host"] = HostStore(device)
    if "device" in places:
        stores.states["device"] = DeviceStore(device)
    if on_disk:
        assert stores.swap is not None
        stores.states["disk"] = DiskStateStore(
            stores.swap, device=device, num_buffers=num_buffers([numel for numel, _ in on_disk])
        )
    for chunk in chunks:
        chunk.store = stores.states[chunk.place]
    store: ParameterStore = DeviceParameterStore(device, recorder=recorder)
    stores.parameters = [store]
    stores.of_slot = dict.fromkeys(slots, store)
    if away:
        units = [[slot for slot in bucket.slots if slot in away] for bucket in buckets]
        swap = stores.swap if plan.parameters == "nvme" else None
        store = _store_of_units(units, swap, device, recorder, is_current)
        stores.parameters.append(store)
        stores.of_slot |= dict.fromkeys(away, store)
    return stores


def _store_of_units(
    units: Sequence[Sequence[Slot]],
    swap: Swap | None,
    device: torch.device,
    recorder: Recorder | NullRecorder,
    is_current: Callable[[int], bool],
) -> ParameterStore:
    """Open the store for the shards of units between their gathers: on disk or in host memory."""
    if swap is not None:
        # Three units: one gathered, one that FSDP2 gathers early, one read ahead.
        sizes = [_copy_bytes(unit) for unit in units]
        window_bytes = max(min(WINDOW_BYTES, sum(sizes) // 4), 3 * max(sizes))
        return DiskParameterStore(
            swap, device=device, window_bytes=window_bytes, is_current=is_current
        )
    sizes = [
        sum(aligned(slot.padded_numel * slot.dtype.itemsize) for slot in unit) for unit in units
    ]
    return HostParameterStore(
        device,
        ring_bytes=min(sum(sizes), RING_UNITS * max(sizes)),
        is_current=is_current,
        recorder=recorder,
    )


def _copy_bytes(slots: Iterable[Slot]) -> int:
    return sum(DiskParameterStore.bytes_of(slot.padded_numel, slot.dtype) for slot in slots)
