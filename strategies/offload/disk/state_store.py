"""Optimizer state on disk, in a ring of buffers around the chunk that is being stepped."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from typing_extensions import override

from boltmesh.errors import OffloadError
from boltmesh.strategies.offload.disk.swap_file import Extent, Swap
from boltmesh.strategies.offload.disk.transfer import Ticket, TransferWaiter
from boltmesh.strategies.offload.host_memory import allocate_host, round_up
from boltmesh.strategies.offload.store_api import StateStore

NUM_BUFFERS = 4
"""One is stepped, one written, two read ahead. Three cost up to 7 % of the time, two 15 to 20 %."""


@dataclass(frozen=True)
class _StoredChunk:
    extent: Extent
    numel: int
    num_tensors: int

    def cut(self, buffer: Tensor) -> tuple[Tensor, ...]:
        """Return the chunk's tensors in a buffer, fp32 ``(numel,)``, each page-aligned."""
        size, pitch = 4 * self.numel, round_up(4 * self.numel)
        starts = range(0, self.num_tensors * pitch, pitch)
        return tuple(buffer[start : start + size].view(torch.float32) for start in starts)


@dataclass
class _Held:
    """A chunk in a buffer: unchanged, being read or written, or newer than the disk."""

    buffer: Tensor
    is_empty: bool = True
    is_moving: bool = False
    is_acquired: bool = False
    is_wanted: bool = False
    """Read ahead and not acquired since: its buffer is reused only if no other is idle."""
    is_deferred: bool = False
    """Newer than the disk, and not being written yet."""
    is_unverified: bool = False
    """Read, and not yet compared with the checksums of what was written."""

    @property
    def is_idle(self) -> bool:
        return not (self.is_moving or self.is_acquired or self.is_deferred)


class DiskStateStore(TransferWaiter, StateStore):
    """Chunks in the rank's swap file; at most ``num_buffers`` in memory, page-locked for CUDA.

    A chunk has at most one place in memory, so it can be prefetched, acquired and released in any
    order: ``acquire`` always returns what was released last. Reads ahead begin as soon as a
    buffer's write is done, on the thread that finished it. Several threads may hold different
    chunks, fewer than ``num_buffers`` together.

    The acquiring thread computes the checksums, before it gets the chunk and when it releases it.
    If the transfer threads did so, they would move less and wait for each other: the step would
    take up to 15 % longer.

    The first error of any transfer is raised by every later call except ``close``: state that did
    not reach the disk completely is never returned.
    """

    def __init__(self, swap: Swap, *, device: torch.device, num_buffers: int = NUM_BUFFERS) -> None:
        super().__init__()
        assert num_buffers >= 2
        self._swap = swap
        self._device = device
        self._num_buffers = num_buffers
        self._chunks: dict[int, _StoredChunk] = {}
        self._held: dict[int, _Held] = {}  # the least recently used first
        self._hints: deque[int] = deque()
        self._buffer_bytes = 0
        swap.share()

    @staticmethod
    def bytes_of(numel: int, num_tensors: int) -> int:
        """Return the bytes of the file that a chunk occupies."""
        return num_tensors * round_up(4 * numel)

    @override
    def create(self, chunk: int, tensors: Sequence[Tensor]) -> None:
        assert chunk not in self._chunks
        numel, count = tensors[0].numel(), len(tensors)
        extent = self._swap.allocate(
            f"chunk {chunk} of the optimizer state", self.bytes_of(numel, count)
        )
        made = _StoredChunk(extent, numel, count)
        with self.changed:
            self._buffer_bytes = max(self._buffer_bytes, extent.num_bytes)
            self._chunks[chunk] = made
            self._write_deferred(but=chunk)
            held = self._await_place(chunk)
            for part, value in zip(made.cut(held.buffer), tensors, strict=True):
                part.copy_(value)
            self._write(chunk, held)

    @override
    def prefetch(self, chunk: int) -> None:
        with self.changed:
            self.raise_error()
            self._write_deferred(but=chunk)
            if chunk not in self._hints:
                self._hints.append(chunk)
            self._follow_hints()

    @override
    def acquire(self, chunk: int) -> tuple[Tensor, ...]:
        with self.changed:
            self.raise_error()
            self._write_deferred(but=chunk)
            if chunk in self._hints:
                self._hints.remove(chunk)
            held = self._await_place(chunk)
            assert not held.is_acquired, f"chunk {chunk} is acquired already"
            # From now on, so that the buffer is not reused while this thread waits.
            held.is_acquired, held.is_wanted = True, False
            if held.is_empty:
                self._read(chunk, held)
            self.wait_until(lambda: not held.is_moving)
            self._follow_hints()
            made = self._chunks[chunk]
        if held.is_unverified:  # no other thread uses the chunk while it is acquired
            self._verify(made.extent, held)
        return made.cut(held.buffer)

    def _verify(self, extent: Extent, held: _Held) -> None:
        try:
            self._swap.verify(extent, held.buffer[: extent.num_bytes])
        except OffloadError as error:
            with self.changed:
                self.error = self.error or error
                self.changed.notify_all()
                self.raise_error()
        held.is_unverified = False

    @override
    def release(self, chunk: int, *, is_dirty: bool, defers_write: bool = False) -> None:
        with self.changed:
            held = self._held.pop(chunk)
            assert held.is_acquired, f"chunk {chunk} is not acquired"
            self._held[chunk] = held  # the most recently used now
            extent = self._chunks[chunk].extent
        if is_dirty and not defers_write:
            self._swap.seal(extent, held.buffer[: extent.num_bytes])
        with self.changed:
            held.is_acquired = False
            if is_dirty and self.error is None:
                held.is_deferred = defers_write
                if not defers_write:
                    self._write(chunk, held, is_sealed=True)
            self.raise_error()
            self._follow_hints()
            self.changed.notify_all()

    @override
    def flush(self) -> None:
        with self.changed:
            self._write_deferred()
            self.wait_until(lambda: not any(held.is_moving for held in self._held.values()))
        self._swap.sync()

    @override
    def close(self) -> None:
        with self.changed:
            if self._is_closed:
                return
            self._is_closed = True
            self._hints.clear()
            while any(held.is_moving for held in self._held.values()):
                self.changed.wait()
            self._held.clear()
        self._swap.unshare()

    @override
    def bytes_by_place(self) -> dict[str, int]:
        with self.changed:
            return {
                "device": 0,
                "host": sum(held.buffer.numel() for held in self._held.values()),
                "disk": sum(chunk.extent.num_bytes for chunk in self._chunks.values()),
            }

    def _follow_hints(self) -> None:
        """Begin to read prefetched chunks in order, as far as buffers are free."""
        while self._hints:
            chunk = self._hints[0]
            held = self._held.get(chunk)
            if held is None:
                buffer = self._free_buffer(spare_wanted=True)
                if buffer is None:
                    return
                held = self._held[chunk] = _Held(buffer, is_wanted=True)
                self._read(chunk, held)
            held.is_wanted = not held.is_acquired
            self._hints.popleft()

    def _await_place(self, chunk: int) -> _Held:
        """Return the chunk's place in memory, or else an empty one as soon as one is free.

        While this waits, another thread may read the chunk ahead.
        """

        def has_place() -> bool:
            if chunk not in self._held:
                buffer = self._free_buffer(spare_wanted=True)
                if buffer is None:
                    buffer = self._free_buffer(spare_wanted=False)
                if buffer is not None:
                    self._held[chunk] = _Held(buffer)
            return chunk in self._held

        self.wait_until(has_place)
        return self._held[chunk]

    def _free_buffer(self, *, spare_wanted: bool) -> Tensor | None:
        """Return an unused buffer: a new one while there are too few, else the oldest."""
        if len(self._held) < self._num_buffers:
            return allocate_host(self._buffer_bytes, device=self._device)
        held_by_age = list(self._held.items())
        # Among chunks read ahead, the last one is needed last.
        for chunk, held in held_by_age if spare_wanted else reversed(held_by_age):
            if held.is_idle and not (held.is_wanted and spare_wanted):
                del self._held[chunk]
                if held.buffer.numel() >= self._buffer_bytes:
                    return held.buffer
                return allocate_host(self._buffer_bytes, device=self._device)
        assert not all(held.is_acquired for held in self._held.values()), (
            f"{self._num_buffers} chunks are acquired and none was released"
        )
        return None

    def _write_deferred(self, *, but: int | None = None) -> None:
        for chunk, held in self._held.items():
            if held.is_deferred and not held.is_acquired and chunk != but:
                held.is_deferred = False
                self._write(chunk, held)

    def _read(self, chunk: int, held: _Held) -> None:
        held.is_unverified = True
        self._move(partial(self._swap.read, is_verified=False), chunk, held)

    def _write(self, chunk: int, held: _Held, *, is_sealed: bool = False) -> None:
        self._move(partial(self._swap.write, is_sealed=is_sealed), chunk, held)

    def _move(self, transfer: Callable[..., Ticket], chunk: int, held: _Held) -> None:
        extent = self._chunks[chunk].extent
        held.is_moving, held.is_empty = True, False

        def finish() -> None:
            held.is_moving = False
            if self.error is None and not self._is_closed:
                self._follow_hints()

        on_done = partial(self.finish_transfer, finish)
        transfer(extent, held.buffer[: extent.num_bytes], on_done=on_done)
