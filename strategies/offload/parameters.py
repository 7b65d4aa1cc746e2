"""Shards of parameters in memory, in the dtype they are computed in."""

import threading
from abc import abstractmethod
from collections.abc import Callable

import torch
from torch import Tensor
from typing_extensions import override

from boltmesh.strategies.offload.arena import HostArena
from boltmesh.strategies.offload.lanes import CopyLane, event_on_stream, wait_on_stream
from boltmesh.strategies.offload.order import AccessOrder
from boltmesh.strategies.offload.tiers import ParameterStore
from boltmesh.telemetry.recording.recorder import NullRecorder, Recorder

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
        self._lane = CopyLane(device, recorder)
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
        self._lane = CopyLane(device, recorder)
        self._order = AccessOrder()
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
