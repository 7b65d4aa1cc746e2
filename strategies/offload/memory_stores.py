"""Shards of parameters in memory, in the dtype they are computed in.

State in memory: on the host, or kept on the compute device.

Carries stepped parameters from their chunks to the stores that all-gathers read.
"""

import threading
from abc import abstractmethod
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from typing_extensions import override

from boltmesh.strategies.offload.access_trace import AccessTrace
from boltmesh.strategies.offload.buckets import Bucket, BucketChunk, Slot
from boltmesh.strategies.offload.host_memory import HostArena
from boltmesh.strategies.offload.store_api import ParameterStore, StateStore
from boltmesh.strategies.offload.streams import CopyStream, event_on_stream, wait_on_stream
from boltmesh.strategies.offload.update_rule import PieceGradient
from boltmesh.telemetry.writer.null_recorder import NullRecorder
from boltmesh.telemetry.writer.recorder import Recorder


class _MemoryStore(StateStore):
    """State that is stepped where it is kept, so acquiring and releasing are free."""

    def __init__(self) -> None:
        self._chunks: dict[int, tuple[Tensor, ...]] = {}

    @override
    def prefetch(self, chunk: int) -> None:
        pass

    @override
    def acquire(self, chunk: int) -> tuple[Tensor, ...]:
        return self._chunks[chunk]

    @override
    def release(self, chunk: int, *, is_dirty: bool, defers_write: bool = False) -> None:
        pass

    @override
    def flush(self) -> None:
        pass

    @override
    def close(self) -> None:
        self._chunks.clear()


class HostStore(_MemoryStore):
    """Optimizer state in host memory."""

    def __init__(self, device: torch.device, num_bytes: int = 0) -> None:
        """Keep state for steps on the host.

        Args:
            device: Where the model is computed. On CUDA the memory is locked for copies to it.
            num_bytes: What is to be stored, by ``bytes_of``.
        """
        super().__init__()
        self._arena = HostArena(device, num_bytes)

    @staticmethod
    def bytes_of(numel: int, num_tensors: int) -> int:
        """What a chunk takes, for whoever sizes the memory."""
        return num_tensors * HostArena.bytes_of(4 * numel)

    @override
    def create(self, chunk: int, tensors: Sequence[Tensor]) -> None:
        stored = tuple(self._arena.take(each.numel(), torch.float32) for each in tensors)
        for here, initial in zip(stored, tensors, strict=True):
            here.copy_(initial)
        self._chunks[chunk] = stored

    @override
    def close(self) -> None:
        super().close()
        self._arena = HostArena(self._arena.device)

    @override
    def bytes_by_place(self) -> dict[str, int]:
        return {"host": self._arena.num_bytes}


class DeviceStore(_MemoryStore):
    """Optimizer state that stays on the compute device: what ``offload_fraction`` leaves there."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device

    @override
    def create(self, chunk: int, tensors: Sequence[Tensor]) -> None:
        self._chunks[chunk] = tuple(
            torch.empty(each.shape, dtype=torch.float32, device=self._device).copy_(each)
            for each in tensors
        )

    @override
    def bytes_by_place(self) -> dict[str, int]:
        tensors = (each for chunk in self._chunks.values() for each in chunk)
        return {"device": sum(each.nbytes for each in tensors)}


NUM_AHEAD = 4
"""Shards copied to a device before they are asked for; a unit gathers several at once."""


class MemoryParameterStore(ParameterStore):
    """A store that takes a shard in parts, as the chunks that hold it are stepped."""

    @abstractmethod
    def put_part(self, index: int, start: int, value: Tensor) -> None:
        """Replace a stretch of a shard. ``value`` stays as it is until ``settle``."""

    @abstractmethod
    def settle(self) -> None:
        """Return when the values given to ``put_part`` so far may be overwritten."""

    @override
    def put(self, index: int, value: Tensor) -> None:
        self.put_part(index, 0, value)
        self.settle()

    @override
    def flush(self) -> None:
        self.settle()


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
    def put_part(self, index: int, start: int, value: Tensor) -> None:
        here = self._shards[index][start : start + value.numel()]
        # State that is on the device too has just been submitted on this thread's stream.
        stepped = None if value.device.type == "cpu" else event_on_stream(self._device)
        with self._lane.after(self._read.get(index), stepped):
            # Copied as it is and narrowed on the device: narrowing on the host costs it more of
            # its bandwidth than the bus has to spare.
            if value.device.type == "cpu":
                with self._lane.meter.copy("read", value.nbytes):
                    value = value.to(self._device, non_blocking=True)
            here.copy_(value)
            self._written[index] = event_on_stream(self._device)

    @override
    def settle(self) -> None:
        self._lane.synchronize()

    @override
    def close(self) -> None:
        self._shards.clear()

    @override
    def bytes_by_place(self) -> dict[str, int]:
        return {"device": sum(each.nbytes for each in self._shards.values())}


class HostParameterStore(MemoryParameterStore):
    """Shards in host memory; on an accelerator they are copied to it ahead of their use.

    Args:
        device: Where the model is computed.
        num_bytes: What is to be stored, as ``HostArena.bytes_of`` counts it.
        is_current: Whether a shard has been through the last step: others are not read ahead.
        recorder: Is told of copies to the device.
    """

    def __init__(
        self,
        device: torch.device,
        num_bytes: int = 0,
        *,
        is_current: Callable[[int], bool] = lambda _: True,
        recorder: Recorder | NullRecorder | None = None,
    ) -> None:
        self._arena = HostArena(device, num_bytes)
        self._device = device
        self._is_current = is_current
        self._lane = CopyStream(device, recorder)
        self._order = AccessTrace()
        self._shards: dict[int, Tensor] = {}
        self._ahead: dict[int, tuple[Tensor, torch.Event | None]] = {}
        self._copied: dict[int, torch.Event | None] = {}
        self._lock = threading.Lock()

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
        if self._device.type == "cpu":
            return self._shards[index]
        with self._lock:
            self._order.note(index)
            if index not in self._ahead:
                self._copy(index)
            shard, event = self._ahead[index]
            for following in self._order.upcoming():
                if len(self._ahead) > NUM_AHEAD or not self._is_current(following):
                    break
                if following not in self._ahead:
                    self._copy(following)
        wait_on_stream(self._device, event)
        return shard

    @override
    def get_part(self, index: int, start: int, stop: int) -> Tensor:
        # Waits for the copy, so nobody has to wait for it before the shard is replaced.
        return self._shards[index][start:stop].to(self._device, copy=True)

    def _copy(self, index: int) -> None:
        with self._lane.after(None):
            with self._lane.meter.copy("read", self._shards[index].nbytes):
                shard = self._shards[index].to(self._device, non_blocking=True)
            event = event_on_stream(self._device)
        self._ahead[index] = shard, event
        self._copied[index] = event

    @override
    def release(self, index: int) -> None:
        if self._device.type == "cpu":
            return
        with self._lock:
            soon = [each for each, _ in zip(self._order.upcoming(), range(NUM_AHEAD), strict=False)]
            if index not in soon and index in self._ahead:
                # Its memory belongs to the copying stream, and is in use on this one.
                shard, _ = self._ahead.pop(index)
                shard.record_stream(torch.accelerator.current_stream(self._device))

    @override
    def put_part(self, index: int, start: int, value: Tensor) -> None:
        with self._lock:
            self._ahead.pop(index, None)
            copied = self._copied.pop(index, None)
        if copied is not None:
            copied.synchronize()
        self._shards[index][start : start + value.numel()].copy_(value)

    @override
    def settle(self) -> None:
        pass

    @override
    def close(self) -> None:
        self._ahead.clear()
        self._shards.clear()
        self._arena = HostArena(self._device)

    @override
    def bytes_by_place(self) -> dict[str, int]:
        ahead = sum(shard.nbytes for shard, _ in list(self._ahead.values()))
        return {"host": self._arena.num_bytes, "device": ahead}


class ParameterCopies:
    """Knows which store has the compute copy of which parameter."""

    def __init__(self) -> None:
        self.stores: dict[Slot, ParameterStore] = {}
        self._staged: dict[Slot, tuple[Tensor, set[int]]] = {}

    def is_written_once(self, bucket: Bucket) -> bool:
        """Whether each chunk must be stepped exactly once a step.

        A store that takes whole shards only gets one that several chunks hold when the last of
        them has been stepped.
        """
        return any(self._is_staged(bucket, slot) for slot in bucket.slots)

    def update(self, chunk: BucketChunk, values: Tensor, pieces: Sequence[PieceGradient]) -> None:
        """Copy the parameters that were stepped out of a chunk, which may be reused afterwards.

        Args:
            chunk: The chunk.
            values: Its first tensor.
            pieces: What was stepped.
        """
        used: set[MemoryParameterStore] = set()
        for each in pieces:
            slot, start, stop = each.piece.slot, each.piece.start, each.piece.stop
            store = self.stores[slot]
            part = values[start - chunk.start : stop - chunk.start]
            if isinstance(store, MemoryParameterStore):
                store.put_part(slot.index, start - slot.offset, part)
                used.add(store)
            elif self._is_staged(chunk.bucket, slot):
                self._stage(chunk, slot, start, part)
            else:
                begin = slot.offset - chunk.start
                store.put(slot.index, values[begin : begin + slot.padded_numel])
        for store in used:
            store.settle()

    def _is_staged(self, bucket: Bucket, slot: Slot) -> bool:
        # With its padding, which may reach into a chunk that holds nothing else of it.
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
