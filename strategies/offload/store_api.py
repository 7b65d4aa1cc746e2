"""Interfaces of the stores that hold offloaded state: memory, device or disk.

Optimizer state is cut into chunks of at most ``CHUNK_NUMEL`` elements: large enough that a disk
moves one at full speed, small enough that a few of them in flight take little memory. A chunk is
the master parameter followed by the optimizer's moments: flat fp32 tensors of equal length.

Parameters are stored a second time, in the dtype that they are computed in, for all-gathers.

``AccessTrace`` records the order in which a step reads shards, and predicts that of the next step.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence

from torch import Tensor

CHUNK_NUMEL = 8 << 20
"""100 MB of parameter and two moments; half of it costs a disk 15 to 20 % of its speed."""


class _Store(ABC):
    """Base of both kinds of store: flush, close, and memory use."""

    @abstractmethod
    def flush(self) -> None:
        """Return once everything written is on its medium.

        Raises:
            OffloadError: The first error of a transfer that has not been raised yet.
        """

    @abstractmethod
    def close(self) -> None:
        """Free memory and files. Only ``close`` may be called again afterwards."""

    @abstractmethod
    def bytes_by_place(self) -> dict[str, int]:
        """Return the bytes in use now, by ``"device"``, ``"host"`` and ``"disk"``."""


class StateStore(_Store):
    """Flat fp32 optimizer state by chunk: the master parameter first, then the moments.

    One thread at a time creates, acquires and releases. A chunk is acquired once, then released,
    before it is acquired again.
    """

    @abstractmethod
    def create(self, chunk: int, tensors: Sequence[Tensor]) -> None:
        """Store a new chunk's initial values: fp32 tensors of shape ``(chunk_numel,)``."""

    @abstractmethod
    def prefetch(self, chunk: int) -> None:
        """Announce that the chunk will be acquired soon. A hint: it never blocks."""

    @abstractmethod
    def acquire(self, chunk: int) -> tuple[Tensor, ...]:
        """Return the chunk's tensors, fp32 ``(chunk_numel,)``; blocks until they are read.

        They are writable until ``release``.

        Raises:
            OffloadError: When the chunk could not be read, or is not what was written.
        """

    @abstractmethod
    def release(self, chunk: int, *, is_dirty: bool, defers_write: bool = False) -> None:
        """End the use of the tensors that ``acquire`` returned.

        Args:
            chunk: The acquired chunk.
            is_dirty: Whether the tensors were changed and must be written back.
            defers_write: Delay the write until another chunk is used or ``flush`` is called: for
                callers that change a chunk one parameter at a time.
        """


class ParameterStore(_Store):
    """Shards of parameters in the dtype they are computed in, by index, for all-gathers."""

    @abstractmethod
    def create(self, index: int, value: Tensor) -> None:
        """Store a new shard, shape ``(padded_numel,)``, in the dtype that it is computed in.

        ``padded_numel`` is what an all-gather takes from every rank.
        """

    @abstractmethod
    def begin_step(self) -> None:
        """Allow reading ahead again: all shards are as new as the last optimizer step.

        Nothing is read ahead past the last ``get`` of a step: it would be older than the coming
        optimizer step.
        """

    @abstractmethod
    def get(self, index: int) -> Tensor:
        """Return a shard on the compute device, ``(padded_numel,)``; blocks until it is read.

        It is valid until ``release``.

        Raises:
            OffloadError: When the shard could not be read, or is not what was written.
        """

    @abstractmethod
    def release(self, index: int) -> None:
        """Free the shard once the work submitted so far on the current stream is done."""

    def get_part(self, index: int, start: int, stop: int) -> Tensor:
        """Return a copy of elements ``start:stop`` of a shard, on the compute device.

        For layers that are gathered in tiles. Subclasses may need no more device memory than the
        result, shape ``(stop - start,)``.
        """
        part = self.get(index)[start:stop].clone()
        self.release(index)
        return part

    @abstractmethod
    def put(self, index: int, value: Tensor) -> None:
        """Replace a shard by a copy of ``value``: ``(padded_numel,)``, any float dtype."""


MAX_RECORDED = 1 << 16
"""Limit of the trace: a step that includes a validation epoch is too long to predict."""


class AccessTrace:
    """Predicts the next requests from the trace of the previous step and the position in it.

    When a step departs from the trace, the position is found again at the next request that the
    trace contains. A wrong prediction costs time, never correctness.
    """

    def __init__(self) -> None:
        self._order: list[int] = []
        self._recording: list[int] = []
        self._position = 0
        self._last: int | None = None

    def begin_step(self) -> None:
        """Predict the requests of the coming step from those since the last call."""
        if self._recording and len(self._recording) < MAX_RECORDED:
            self._order = self._recording
        self._recording = []
        self._position = 0
        self._last = None

    def note(self, index: int) -> None:
        """Record a request for shard ``index``."""
        if len(self._recording) < MAX_RECORDED:
            self._recording.append(index)
        if not self._is_at(index):
            self._find(index)
        elif self._position < len(self._order):
            self._position += 1
        self._last = index

    def upcoming(self) -> Iterator[int]:
        """Yield the next requests, up to the end of the step, each shard once."""
        seen = set()
        for at in range(self._position, len(self._order)):
            index = self._order[at]
            if index not in seen:
                seen.add(index)
                yield index

    def _is_at(self, index: int) -> bool:
        return self._position < len(self._order) and self._order[self._position] == index

    def _find(self, index: int) -> None:
        """Move to where the last two requests are adjacent, else to the first of this one.

        Forward and backward passes request a shard after different ones, so the pair identifies
        the position; a second forward pass (validation, the next micro-batch) starts over.
        """
        order, last = self._order, self._last
        pairs = (at for at in range(1, len(order)) if order[at] == index and order[at - 1] == last)
        later = next((at for at in pairs if at >= self._position), None)
        if later is not None:
            self._position = later + 1
        elif index in order:
            self._position = order.index(index) + 1
