"""What the offload engine asks of a place that holds state, whichever place it is.

Optimizer state is cut into chunks of at most ``CHUNK_NUMEL`` elements: large enough that a disk
moves one at full speed, small enough that a few of them in flight are little memory. A chunk is
the master parameter followed by the optimizer's moments, flat, fp32, each of the same length.

Parameters are kept a second time, in the dtype that they are computed in, for all-gathers.

``AccessTrace`` is the order in which a step asks for shards: recorded in one step, foreseen in the
next.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence

from torch import Tensor

CHUNK_NUMEL = 8 << 20
"""100 MB of parameter and two moments; half of it costs a disk 15 to 20 % of its speed."""


class _Store(ABC):
    """What is kept in a tier, and how it ends."""

    @abstractmethod
    def flush(self) -> None:
        """Return once everything written is on its medium.

        Raises:
            OffloadError: The first error of a transfer that nobody has been told yet.
        """

    @abstractmethod
    def close(self) -> None:
        """Free memory and files. Nothing else may be called afterwards, but ``close`` again."""

    @abstractmethod
    def bytes_by_place(self) -> dict[str, int]:
        """What the store takes now, by ``"device"``, ``"host"`` and ``"disk"``."""


class StateStore(_Store):
    """Flat fp32 optimizer state by chunk: the master parameter first, then the moments.

    One thread at a time creates, acquires and releases. A chunk is acquired once, then released,
    before it is acquired again.
    """

    @abstractmethod
    def create(self, chunk: int, tensors: Sequence[Tensor]) -> None:
        """Store the initial values of a new chunk: flat, fp32, of equal length."""

    @abstractmethod
    def prefetch(self, chunk: int) -> None:
        """Say that the chunk will be acquired soon. A hint: it never blocks."""

    @abstractmethod
    def acquire(self, chunk: int) -> tuple[Tensor, ...]:
        """The chunk's tensors, flat, fp32 and writable until ``release``; blocks until read.

        Raises:
            OffloadError: When the chunk could not be read, or is not what was written.
        """

    @abstractmethod
    def release(self, chunk: int, *, is_dirty: bool, defers_write: bool = False) -> None:
        """Give the tensors back.

        Args:
            chunk: What was acquired.
            is_dirty: They were changed, and are to be written back.
            defers_write: Not before another chunk is used, or all is flushed: for whoever changes
                a chunk one parameter after the other.
        """


class ParameterStore(_Store):
    """Shards of parameters in the dtype they are computed in, by index, for all-gathers."""

    @abstractmethod
    def create(self, index: int, value: Tensor) -> None:
        """Store a new shard: flat, padded to the size that all-gathers take, in its dtype."""

    @abstractmethod
    def begin_step(self) -> None:
        """All shards are as new as the last optimizer step: reading ahead may start again.

        Nothing is read ahead past the last ``get`` of a step, for it would be older than the
        optimizer step that is still to come.
        """

    @abstractmethod
    def get(self, index: int) -> Tensor:
        """The shard on the compute device, flat, valid until ``release``; blocks until read.

        Raises:
            OffloadError: When the shard could not be read, or is not what was written.
        """

    @abstractmethod
    def release(self, index: int) -> None:
        """Give the shard back, once the work submitted so far on the current stream is done."""

    def get_part(self, index: int, start: int, stop: int) -> Tensor:
        """A stretch of a shard on the compute device, flat, to keep.

        For layers that are gathered in tiles. A store that can, takes no more of the device's
        memory than the stretch.
        """
        part = self.get(index)[start:stop].clone()
        self.release(index)
        return part

    @abstractmethod
    def put(self, index: int, value: Tensor) -> None:
        """Replace a shard after a step. ``value`` is flat, of any float dtype, and copied."""


MAX_RECORDED = 1 << 16
"""A step with a validation epoch in it asks for ever; what comes later would be foreseen badly."""


class AccessTrace:
    """Foresees requests by what was asked in the step before, from wherever the step now stands.

    A step that takes another way is found again at the next request that the recorded one knows;
    until then too much or too little is foreseen, which costs time and nothing else.
    """

    def __init__(self) -> None:
        self._order: list[int] = []
        self._recording: list[int] = []
        self._position = 0
        self._last: int | None = None

    def begin_step(self) -> None:
        """Take what was asked since the last call as what will be asked from now on."""
        if self._recording and len(self._recording) < MAX_RECORDED:
            self._order = self._recording
        self._recording = []
        self._position = 0
        self._last = None

    def note(self, index: int) -> None:
        """A shard is asked for."""
        if len(self._recording) < MAX_RECORDED:
            self._recording.append(index)
        if not self._is_at(index):
            self._find(index)
        elif self._position < len(self._order):
            self._position += 1
        self._last = index

    def upcoming(self) -> Iterator[int]:
        """The next requests, up to the end of the step, each shard once."""
        seen = set()
        for at in range(self._position, len(self._order)):
            index = self._order[at]
            if index not in seen:
                seen.add(index)
                yield index

    def _is_at(self, index: int) -> bool:
        return self._position < len(self._order) and self._order[self._position] == index

    def _find(self, index: int) -> None:
        """Go to where the last two requests follow one another, else to the first of this one.

        Forward, then backward ask for each shard in another neighbourhood, so the pair tells them
        apart; a second forward pass, of validation or of the next micro-batch, begins again.
        """
        order, last = self._order, self._last
        pairs = (at for at in range(1, len(order)) if order[at] == index and order[at - 1] == last)
        later = next((at for at in pairs if at >= self._position), None)
        if later is not None:
            self._position = later + 1
        elif index in order:
            self._position = order.index(index) + 1
