"""Stores in memory: optimizer state and shards of parameters, on the host or the compute device.

Shards are in the dtype that they are computed in. ``ParameterCopies`` copies stepped parameters
from their chunks to the stores that all-gathers read.
"""

import threading
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from typing_extensions import override

from boltmesh.strategies.offload.buckets import Bucket, BucketChunk, Slot
from boltmesh.strategies.offload.host_memory import HostArena
from boltmesh.strategies.offload.store_api import AccessTrace, ParameterStore, StateStore
from boltmesh.strategies.offload.streams import CopyStream, DeviceRing, wait_on_stream
from boltmesh.strategies.offload.update_rule import PieceGradient
from boltmesh.strategies.torch_compat.tensors import event_on_stream
from boltmesh.telemetry.writer.null_recorder import NullRecorder
from boltmesh.telemetry.writer.recorder import Recorder


class _MemoryStore(StateStore):
    """State that is stepped where it is stored: ``acquire`` and ``release`` cost nothing."""

    def __init__(self) -> None:
        self.chunks: dict[int, tuple[Tensor, ...]] = {}

    @override
    def prefetch(self, chunk: int) -> None:
        pass

    @override
    def acquire(self, chunk: int) -> tuple[Tensor, ...]:
        return self.chunks[chunk]

    @override
    def release(self, chunk: int, *, is_dirty: bool, defers_write: bool = False) -> None:
        pass

    @override
    def flush(self) -> None:
        pass

    @override
    def close(self) -> None:
        self.chunks.clear()


class HostStore(_MemoryStore):
    """Optimizer state in host memory, page-locked where the compute device is a GPU."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._arena = HostArena(device)

    def reserve(self, num_bytes: int) -> None:
        """Allocate for the chunks that are created next, sized by ``bytes_of``."""
        self._arena.reserve(num_bytes)

    @staticmethod
    def bytes_of(numel: int, num_tensors: int) -> int:
        """Return the bytes that a chunk of ``num_tensors`` fp32 tensors occupies."""
        return num_tensors * HostArena.bytes_of(4 * numel)

    @override
    def create(self, chunk: int, tensors: Sequence[Tensor]) -> None:
        stored = tuple(self._arena.take(each.numel(), torch.float32) for each in tensors)
        for here, initial in zip(stored, tensors, strict=True):
            here.copy_(initial)
        self.chunks[chunk] = stored

    @override
    def close(self) -> None:
        super().close()
        self._arena = HostArena(self._arena.device)

    @override
    def bytes_by_place(self) -> dict[str, int]:
        return {"host": self._arena.num_bytes}


class DeviceStore(_MemoryStore):
    """Optimizer state that ``offload_fraction`` leaves on the compute device."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device

    @override
    def create(self, chunk: int, tensors: Sequence[Tensor]) -> None:
        self.chunks[chunk] = tuple(
            torch.empty(each.shape, dtype=torch.float32, device=self._device).copy_(each)
            for each in tensors
        )

    @override
    def bytes_by_place(self) -> dict[str, int]:
        tensors = (each for chunk in self.chunks.values() for each in chunk)
        return {"device": sum(each.nbytes for each in tensors)}


RING_UNITS = 3
"""Units that fit into the device ring: one in use, one that FSDP2 gathers early, one read ahead."""


class MemoryParameterStore(ParameterStore):
    """A store that accepts a part of a shard: one from each stepped chunk that holds some of it."""

    @abstractmethod
    def put_part(self, index: int, start: int, value: Tensor) -> torch.Event | None:
        """Replace a range of a shard by ``value``: ``(num_elements,)``, any float dtype.

        Returns:
            An event after which ``value`` may be overwritten; None where it may be at once.
        """

    @override
    def put(self, index: int, value: Tensor) -> None:
        copied = self.put_part(index, 0, value)
        if copied is not None:
            copied.synchronize()


class DeviceParameterStore(MemoryParameterStore):
    """Shards that stay on the compute device while their optimizer state is elsewhere."""

    def __init__(
        self, device: torch.device, *, recorder: Recorder | NullRecorder | None = None
    ) -> None:
        self._device = device
        self._lane = CopyStream(device, recorder)
        self._shards: dict[int, Tensor] = {}
        self._read: dict[int, torch.Event | None] = {}
        self._written: dict[int, torch.Event | None] = {}

    @override
    def create(self, index: int, value: Tensor) -> None:
        self._shards[index] = value.to(self._device, copy=True)

    @override
    def begin_step(self) -> None:
        pass

    @override
    def get(self, index: int) -> Tensor:
        wait_on_stream(self._device, self._written.get(index))
        return self._shards[index]

    @override
    def release(self, index: int) -> None:
        self._read[index] = event_on_stream(self._device)

    @override
    def put_part(self, index: int, start: int, value: Tensor) -> torch.Event | None:
        here = self._shards[index][start : start + value.numel()]
        # State that is also on the device was just submitted on this thread's stream.
        stepped = None if value.device.type == "cpu" else event_on_stream(self._device)
        with self._lane.after(self._read.get(index), stepped):
            # Copied as it is and narrowed on the device: narrowing on the host costs it more of
            # its bandwidth than the bus has to spare.
            if value.device.type == "cpu":
                with self._lane.meter.copy("read", value.nbytes):
                    value = value.to(self._device, non_blocking=True)
            here.copy_(value)
            self._written[index] = event_on_stream(self._device)
        return self._written[index]

    @override
    def flush(self) -> None:
        self._lane.synchronize()

    @override
    def close(self) -> None:
        self._shards.clear()

    @override
    def bytes_by_place(self) -> dict[str, int]:
        return {"device": sum(each.nbytes for each in self._shards.values())}


@dataclass
class _DeviceShard:
    """A shard that was copied to the device."""

    value: Tensor
    copied: torch.Event | None
    part: Tensor | None
    """Its part of the ring; None where the value has memory of its own."""
    read: torch.Event | None = None
    """Passes when the device has finished its last read of the value so far."""
    is_in_use: bool = False


class HostParameterStore(MemoryParameterStore):
    """Shards in host memory; on an accelerator they are copied to it ahead of their use.

    Args:
        device: Compute device.
        ring_bytes: Device memory for copies of shards. A shard that is needed while the ring is
            full gets memory of its own.
        is_current: Whether no step of a shard is pending; others are not read ahead.
        recorder: Counts copies to the device.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        ring_bytes: int = 0,
        is_current: Callable[[int], bool] = lambda _: True,
        recorder: Recorder | NullRecorder | None = None,
    ) -> None:
        self._arena = HostArena(device)
        self._device = device
        self._is_on_host = device.type == "cpu"
        self._is_current = is_current
        self._lane = CopyStream(device, recorder)
        self._order = AccessTrace()
        self._shards: dict[int, Tensor] = {}
        self._ahead: dict[int, _DeviceShard] = {}
        self._outdated: dict[int, _DeviceShard] = {}
        """Shards that were replaced on the host while their device copy was in use."""
        self._copied: dict[int, torch.Event | None] = {}
        self._ring_bytes = ring_bytes
        self._ring: DeviceRing | None = None
        self._lock = threading.Lock()

    def reserve(self, num_bytes: int) -> None:
        """Allocate for the shards created next, sized by ``HostArena.bytes_of``."""
        self._arena.reserve(num_bytes)

    @override
    def create(self, index: int, value: Tensor) -> None:
        self._shards[index] = self._arena.take(value.numel(), value.dtype)
        self._shards[index].copy_(value)

    @override
    def begin_step(self) -> None:
        with self._lock:
            self._order.begin_step()

    @override
    def get(self, index: int) -> Tensor:
        if self._is_on_host:
            return self._shards[index]
        with self._lock:
            self._order.note(index)
            shard = self._ahead.get(index) or self._copy(index, is_ahead=False)
            assert shard is not None
            shard.is_in_use = True
            for following in self._order.upcoming():
                if not self._is_current(following):
                    break
                if following not in self._ahead and self._copy(following, is_ahead=True) is None:
                    break
        wait_on_stream(self._device, shard.copied)
        return shard.value

    @override
    def get_part(self, index: int, start: int, stop: int) -> Tensor:
        # ``to`` waits for the copy, so the shard may be replaced as soon as it returns.
        return self._shards[index][start:stop].to(self._device, copy=True)

    def _copy(self, index: int, *, is_ahead: bool) -> _DeviceShard | None:
        """Copy a shard to the device; None where a read-ahead finds no room in the ring."""
        here = self._shards[index]
        if self._ring is None:
            self._ring = DeviceRing(
                torch.empty(self._ring_bytes, dtype=torch.uint8, device=self._device)
            )
            # The ring's memory was freed by work of the stream that allocated it.
            with self._lane.after(event_on_stream(self._device)):
                pass
        taken = self._ring.take(here.nbytes)
        if taken is None and is_ahead:
            return None
        part, events = taken or (None, [])
        with self._lane.after(*events):
            with self._lane.meter.copy("read", here.nbytes):
                if part is None:
                    value = here.to(self._device, non_blocking=True)
                else:
                    value = part[: here.nbytes].view(here.dtype)
                    value.copy_(here, non_blocking=True)
            event = event_on_stream(self._device)
        shard = self._ahead[index] = _DeviceShard(value, event, part)
        self._copied[index] = event
        return shard

    @override
    def release(self, index: int) -> None:
        if self._is_on_host:
            return
        with self._lock:
            shard = self._outdated.pop(index, None)
            if shard is None:
                shard = self._ahead.get(index)
                if shard is None:
                    return
                shard.is_in_use, shard.read = False, event_on_stream(self._device)
                if self._is_needed_soon(index):
                    return
                del self._ahead[index]
            shard.read = event_on_stream(self._device)
            self._free(shard)

    def _is_needed_soon(self, index: int) -> bool:
        """Whether a shard is requested again before the ring is full of others."""
        num_bytes = 0
        for following in self._order.upcoming():
            if following == index:
                return True
            num_bytes += self._shards[following].nbytes
            if RING_UNITS * num_bytes > self._ring_bytes:  # a unit is read ahead already
                break
        return False

    def _free(self, shard: _DeviceShard) -> None:
        if shard.part is not None:
            assert self._ring is not None
            self._ring.give_back(shard.part, shard.read or shard.copied)
        else:  # Its memory belongs to the copy stream, and is in use on the current one.
            shard.value.record_stream(torch.accelerator.current_stream(self._device))

    @override
    def put_part(self, index: int, start: int, value: Tensor) -> torch.Event | None:
        with self._lock:
            shard = self._ahead.pop(index, None)
            if shard is not None and shard.is_in_use:
                self._outdated[index] = shard
            elif shard is not None:
                self._free(shard)
            copied = self._copied.pop(index, None)
        if copied is not None:
            copied.synchronize()
        self._shards[index][start : start + value.numel()].copy_(value)
        return None

    @override
    def flush(self) -> None:
        pass

    @override
    def close(self) -> None:
        self._ahead.clear()
        self._outdated.clear()
        self._ring = None
        self._shards.clear()
        self._arena = HostArena(self._device)

    @override
    def bytes_by_place(self) -> dict[str, int]:
        ring = self._ring.num_bytes if self._ring is not None else 0
        own = sum(each.value.nbytes for each in list(self._ahead.values()) if each.part is None)
        return {"host": self._arena.num_bytes, "device": ring + own}


class ParameterCopies:
    """Copies stepped parameters to the store that holds each one's compute copy."""

    def __init__(self) -> None:
        self.stores: dict[Slot, ParameterStore] = {}
        self._in_flight: dict[BucketChunk, list[torch.Event]] = {}
        """Copies in flight that read a chunk's state in host memory."""
        self._staged: dict[Slot, tuple[Tensor, set[int]]] = {}

    def is_written_once(self, bucket: Bucket) -> bool:
        """Whether each chunk must be stepped exactly once per step.

        A store that only takes whole shards gets a shard that spans several chunks when the last
        of them has been stepped.
        """
        return any(self._is_staged(bucket, slot) for slot in bucket.slots)

    def wait(self, chunk: BucketChunk) -> None:
        """Return when the state of a chunk may be written."""
        for each in self._in_flight.pop(chunk, ()):
            each.synchronize()

    def wait_for_all(self) -> None:
        """Return when the state of any chunk may be written or freed."""
        for chunk in list(self._in_flight):
            self.wait(chunk)

    def update(self, chunk: BucketChunk, values: Tensor, pieces: Sequence[PieceGradient]) -> None:
        """Copy the stepped parameters of a chunk to their stores.

        State on the host does not change until the chunk is stepped again, so its copies run
        beside the next chunk's step: call ``wait`` before writing to it. State in other places may
        be reused at once.

        Args:
            chunk: The chunk.
            values: Its first tensor, the master parameters: fp32 ``(chunk_numel,)``.
            pieces: The ranges that were stepped.
        """
        copied: list[torch.Event | None] = []
        for each in pieces:
            slot, start, stop = each.piece.slot, each.piece.start, each.piece.stop
            store = self.stores[slot]
            part = values[start - chunk.start : stop - chunk.start]
            if isinstance(store, MemoryParameterStore):
                copied.append(store.put_part(slot.index, start - slot.offset, part))
            elif self._is_staged(chunk.bucket, slot):
                self._stage(chunk, slot, start, part)
            else:
                begin = slot.offset - chunk.start
                store.put(slot.index, values[begin : begin + slot.padded_numel])
        self._in_flight[chunk] = [each for each in copied if each is not None]
        if chunk.place != "host":
            self.wait(chunk)

    def _is_staged(self, bucket: Bucket, slot: Slot) -> bool:
        # Including padding, which may reach into a chunk that holds nothing else of the slot.
        first = bucket.chunks_of(slot)[:1]
        is_whole = all(slot.offset + slot.padded_numel <= chunk.stop for chunk in first)
        return not is_whole and not isinstance(self.stores[slot], MemoryParameterStore)

    def _stage(self, chunk: BucketChunk, slot: Slot, start: int, part: Tensor) -> None:
        if slot not in self._staged:
            self._staged[slot] = torch.zeros(slot.padded_numel, dtype=slot.dtype), set()
        whole, done = self._staged[slot]
        begin = start - slot.offset
        whole[begin : begin + part.numel()].copy_(part)
        done.add(chunk.number)
        if len(done) == len(chunk.bucket.chunks_of(slot)):
            self.stores[slot].put(slot.index, whole)
            del self._staged[slot]
