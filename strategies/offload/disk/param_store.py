"""Shards of parameters on disk, read ahead in the order of the previous step.

``StoredShard`` is a shard's place on the disk, ``HeldShard`` its place in memory.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from typing_extensions import override

from boltmesh.strategies.offload.disk.swap_file import Extent, Swap
from boltmesh.strategies.offload.disk.transfer import CPU, TransferWaiter
from boltmesh.strategies.offload.host_memory import RangeAllocator, allocate_host, round_up
from boltmesh.strategies.offload.store_api import AccessTrace, ParameterStore
from boltmesh.strategies.offload.streams import DeviceCopy, copy_stream


@dataclass(frozen=True)
class StoredShard:
    """A shard on the disk."""

    extent: Extent
    num_bytes: int
    dtype: torch.dtype

    def cut(self, buffer: Tensor) -> Tensor:
        """Return the shard within a ``uint8`` buffer, ``(numel,)`` in its dtype."""
        return buffer[: self.num_bytes].view(self.dtype)


@dataclass
class HeldShard:
    """A shard in memory."""

    buffer: Tensor
    is_reading: bool = False
    is_writing: bool = False
    is_changing: bool = False
    num_users: int = 0
    copy: DeviceCopy | None = None

    @property
    def is_idle(self) -> bool:
        """Whether the memory may be used for another shard."""
        is_busy = self.is_reading or self.is_writing or self.is_changing or self.num_users > 0
        return not is_busy and (self.copy is None or self.copy.is_host_free)

    def drop_copy(self) -> None:
        """Free the copy on the accelerator, if there is one."""
        if self.copy is not None:
            self.copy.drop()


WINDOW_BYTES = 64 << 20
"""Default size of the window: what a disk that reads 3.5 GB/s reads in about 20 ms."""


class DiskParameterStore(TransferWaiter, ParameterStore):
    """Shards in the rank's swap file; those in use and the next ones are in memory.

    The first step reads on demand and records the order; later steps read ahead as many shards as
    fit into ``window_bytes``, and copy them to the accelerator, if any, as soon as they are read.
    Shards stay in memory until others need the room, so one that is requested again soon, as at the
    turn from forward to backward, is not read again.

    ``get`` and ``release`` are called by the computing thread; ``put`` may be called by another.
    The first error of any transfer is raised by every later call except ``close``.

    Args:
        swap: The rank's file; closed with the last store that uses it.
        device: Compute device.
        window_bytes: Host memory for shards, and as much device memory on an accelerator. A shard
            that does not fit gets memory of its own while it is in use.
        is_current: Whether no step of a shard is pending; others are not read ahead. It must not
            call this store.
    """

    def __init__(
        self,
        swap: Swap,
        *,
        device: torch.device,
        window_bytes: int = WINDOW_BYTES,
        is_current: Callable[[int], bool] = lambda _: True,
    ) -> None:
        super().__init__()
        self.misses = 0
        """Shards that were not read in time."""
        self._swap = swap
        self._device = device
        self._stream = copy_stream(device)
        self._window_bytes = window_bytes
        self._is_current = is_current
        self._arena: RangeAllocator | None = None
        self._shards: dict[int, StoredShard] = {}
        self._held: dict[int, HeldShard] = {}  # the least recently used first
        self._order = AccessTrace()
        self._in_parts: set[int] = set()  # never whole on the device
        self._window: dict[int, int] = {}  # the next shards, by how soon, from 0 on
        swap.share()

    @staticmethod
    def bytes_of(numel: int, dtype: torch.dtype) -> int:
        """Return the bytes of the file that a shard occupies."""
        return round_up(numel * dtype.itemsize)

    @override
    def create(self, index: int, value: Tensor) -> None:
        assert index not in self._shards
        assert self._arena is None, "shards are created before the first one is used"
        self.raise_error()
        num_bytes = value.numel() * value.element_size()
        extent = self._swap.allocate(f"parameter shard {index}", num_bytes)
        shard = self._shards[index] = StoredShard(extent, num_bytes, value.dtype)
        buffer = allocate_host(extent.num_bytes, device=CPU)
        shard.cut(buffer).copy_(value.detach().view(-1))
        self._swap.write(extent, buffer).wait()

    @override
    def begin_step(self) -> None:
        with self.changed:
            self.raise_error()
            self._order.begin_step()
            self._read_ahead()

    @override
    def get(self, index: int) -> Tensor:
        with self.changed:
            return self._copy(index, self._use(index)).value()

    @override
    def get_part(self, index: int, start: int, stop: int) -> Tensor:
        with self.changed:
            self._in_parts.add(index)
            held = self._use(index)
        try:
            # ``to`` waits for the copy, so the memory may be reused as soon as it returns.
            stored = self._shards[index].cut(held.buffer)
            return stored[start:stop].to(self._device, copy=True)
        finally:
            self.release(index)

    def _use(self, index: int) -> HeldShard:
        """Become a user of a shard and wait until it is in memory. The lock is held."""
        self.raise_error()
        self._order.note(index)
        # Before it counts as a user: ``put`` waits until a shard has no users.
        self.wait_until(lambda: not (index in self._held and self._held[index].is_changing))
        held = self._held.get(index)
        if held is None:
            self.misses += 1
            held = self._hold(index, device=self._device)
            self._read(index, held, is_urgent=True)
        held.num_users += 1
        self._read_ahead()
        self.wait_until(lambda: not held.is_reading)
        return held

    @override
    def release(self, index: int) -> None:
        with self.changed:
            held = self._held.pop(index)
            assert held.num_users > 0, f"parameter shard {index} is not in use"
            self._held[index] = held  # the most recently used now
            held.num_users -= 1
            if held.num_users == 0 and index not in self._window:
                held.drop_copy()
            self._drop_extras()
            self._read_ahead()
            self.changed.notify_all()

    @override
    def put(self, index: int, value: Tensor) -> None:
        shard = self._shards[index]
        with self.changed:
            self.raise_error()
            # Memory of its own is only written to the disk: it need not be page-locked.
            held = self._held.get(index) or self._hold(
                index, device=CPU, num_spared=len(self._window)
            )
            held.is_changing = True  # the memory may be neither reused nor read
            self.wait_until(lambda: not (held.is_reading or held.is_writing or held.num_users))
        # Outside of the lock, so that the computing thread can use other shards meanwhile.
        if held.copy is not None:
            held.copy.wait_for_host()
            held.copy = None
        shard.cut(held.buffer).copy_(value.detach().view(-1))
        with self.changed:
            held.is_changing = False
            self._write(index, held)
            self.changed.notify_all()

    @override
    def flush(self) -> None:
        with self.changed:
            self.wait_until(lambda: not any(held.is_writing for held in self._held.values()))
        self._swap.sync()

    @override
    def close(self) -> None:
        with self.changed:
            if self._is_closed:
                return
            self._is_closed = True
            while any(held.is_reading or held.is_writing for held in self._held.values()):
                self.changed.wait()
            for held in self._held.values():
                held.drop_copy()
            self._held.clear()
            self._arena = None
        self._swap.unshare()

    @override
    def bytes_by_place(self) -> dict[str, int]:
        with self.changed:
            arena = self._arena.num_bytes if self._arena is not None else 0
            held = self._held.values()
            return {
                "device": sum(each.copy.num_device_bytes for each in held if each.copy),
                "host": arena + sum(each.buffer.numel() for each in held if self._is_extra(each)),
                "disk": sum(shard.extent.num_bytes for shard in self._shards.values()),
            }

    def _read_ahead(self) -> None:
        """Begin to read the next shards, as far as the window reaches and memory is free."""
        if self.error is not None or self._is_closed:
            return
        self._window = {index: at for at, index in enumerate(self._next_shards())}
        for index, at in self._window.items():
            held = self._held.get(index)
            if held is None:
                if not self._is_current(index):
                    return
                room = self._shards[index].extent.num_bytes
                # Sooner shards stay; later ones may be evicted where free room is fragmented.
                buffer = self._free_buffer(room, num_spared=at)
                if buffer is None:
                    return
                held = self._held[index] = HeldShard(buffer)
                self._read(index, held, is_urgent=False)
            elif not (held.is_reading or held.is_changing or index in self._in_parts):
                self._copy(index, held)

    def _next_shards(self) -> Iterator[int]:
        total = 0
        for index in self._order.upcoming():
            total += self._shards[index].extent.num_bytes
            if total > self._window_bytes:
                return
            yield index

    def _hold(self, index: int, *, device: torch.device, num_spared: int = 0) -> HeldShard:
        """Return memory for a shard that is needed now; its own where the arena has no room."""
        num_bytes = self._shards[index].extent.num_bytes
        buffer = self._free_buffer(num_bytes, num_spared=num_spared)
        if buffer is None:
            buffer = allocate_host(num_bytes, device=device)
        held = self._held[index] = HeldShard(buffer)
        return held

    def _free_buffer(self, num_bytes: int, *, num_spared: int) -> Tensor | None:
        """Return room in the arena, evicting shards needed last, but none of the next few."""
        if self._arena is None:
            total = sum(shard.extent.num_bytes for shard in self._shards.values())
            size = min(total, self._window_bytes)
            self._arena = RangeAllocator(allocate_host(size, device=self._device))
        buffer = self._arena.take(num_bytes)
        if buffer is not None or num_bytes > self._arena.num_bytes:
            return buffer
        unforeseen = [index for index in self._held if index not in self._window]
        foreseen = [index for index, at in reversed(self._window.items()) if at >= num_spared]
        for index in (*unforeseen, *foreseen):
            held = self._held.get(index)
            if held is None or not held.is_idle or self._is_extra(held):
                continue
            del self._held[index]
            self._arena.give_back(held.buffer)
            buffer = self._arena.take(num_bytes)
            if buffer is not None:
                break
        return buffer

    def _drop_extras(self) -> None:
        """Free memory outside of the arena as soon as it is idle."""
        for index, held in list(self._held.items()):
            if held.is_idle and self._is_extra(held):
                del self._held[index]

    def _is_extra(self, held: HeldShard) -> bool:
        return self._arena is None or not self._arena.owns(held.buffer)

    def _copy(self, index: int, held: HeldShard) -> DeviceCopy:
        if held.copy is None or not held.copy.has_value:
            held.copy = DeviceCopy(self._shards[index].cut(held.buffer), self._stream)
        return held.copy

    def _read(self, index: int, held: HeldShard, *, is_urgent: bool) -> None:
        def finish() -> None:
            held.is_reading = False
            if index not in self._in_parts:
                self._copy(index, held)

        held.is_reading = True
        self._swap.read(
            self._shards[index].extent,
            held.buffer,
            is_urgent=is_urgent,
            on_done=partial(self.finish_transfer, finish),
        )

    def _write(self, index: int, held: HeldShard) -> None:
        def finish() -> None:
            held.is_writing = False
            self._drop_extras()
            self._read_ahead()  # written shards can be evicted again

        held.is_writing = True
        self._swap.write(
            self._shards[index].extent, held.buffer, on_done=partial(self.finish_transfer, finish)
        )
