"""Times of each chunk, and the bubble: the idle share of a run over the ranks of a pipeline.

``HostChunkTimer`` reads the clock of the host. ``DeviceChunkTimer``, for CUDA, reads events that
are recorded on the current stream around each chunk, kept in a pool, and read two steps later,
once the last of them has completed. It does not synchronise.

The bubble is idle time over the common window of all ranks, from the first start to the last end
of a chunk on any of them, averaged over the ranks. Each rank sends its start, end and busy time
with a message that the next run sends anyway, so all ranks know the bubble one run late.

Ranks of one host share a clock. Ranks of several hosts count from the end of the run before, which
is the same moment on all, so that differences between clocks do not matter.
"""

import socket
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
from torch.distributed import ProcessGroup

from boltmesh.schedule_sim import Action
from boltmesh.strategies.object_collectives import gather_objects
from boltmesh.telemetry.writer.device import elapsed_ns

OnChunk = Callable[[int, int, str, int, int], None]
"""Called with stage, microbatch, kind, and start and end on the monotonic clock in ns."""

OnStep = Callable[[int, int, int, int], None]
"""Called with a step's number, its first start, last end, and computation time, in ns."""

DEVICE_STEPS_LATER: Final = 2
"""Number of steps after which the events of a step are read."""

_KEPT_OFFSETS: Final = 16


class HostChunkTimer:
    """Measures chunks that the host computes.

    Args:
        on_chunk: Called for each chunk.
        on_step: Called for each step with chunks, after all of its chunks.
    """

    def __init__(self, on_chunk: OnChunk, on_step: OnStep) -> None:
        self._on_chunk = on_chunk
        self._on_step = on_step
        self._first_ns = self._last_ns = self._busy_ns = 0

    def begin(self) -> int:
        """Return a mark of the start of a chunk."""
        return time.monotonic_ns()

    def end(self, action: Action, start: int) -> None:
        """Record the end of a chunk that began at the mark ``start``."""
        end = self._last_ns = time.monotonic_ns()
        self._first_ns = self._first_ns or start
        self._busy_ns += end - start
        self._on_chunk(action.stage, action.microbatch, action.kind, start, end)

    def end_step(self, number: int) -> None:
        """End the step of this number."""
        if self._first_ns:
            self._on_step(number, self._first_ns, self._last_ns, self._busy_ns)
        self._first_ns = self._last_ns = self._busy_ns = 0


class _Mark(NamedTuple):
    event: Any
    host_ns: int


class _Chunk(NamedTuple):
    action: Action
    start: _Mark
    end: _Mark


class DeviceChunkTimer:
    """Measures chunks that run asynchronously on a device; see ``HostChunkTimer``.

    An event completes no earlier than the host records it. So the offset of the host's clock from
    the device's is at least the difference of the two times of any event, and exactly that of an
    event on an idle stream, of which a pipeline has some in every step. The offset is the largest
    difference in the last steps.

    Args:
        on_chunk: Called for each chunk, two steps late.
        on_step: Called for each step, two steps late.
        make_event: Makes events with ``record``, ``query`` and ``elapsed_time`` in ms.
    """

    def __init__(
        self,
        on_chunk: OnChunk,
        on_step: OnStep,
        make_event: Callable[[], Any] | None = None,
    ) -> None:
        self._on_chunk = on_chunk
        self._on_step = on_step
        self._make_event = make_event or _cuda_event
        self._pool: list[Any] = []
        self._chunks: list[_Chunk] = []
        self._steps: deque[tuple[int, list[_Chunk]]] = deque()
        self._anchor: tuple[Any, int] | None = None
        """An event, and its time on the device's clock, which starts at the first event, in ns."""
        self._offsets: deque[int] = deque(maxlen=_KEPT_OFFSETS)

    def begin(self) -> _Mark:
        """Return a mark of the start of a chunk."""
        return self._mark()

    def end(self, action: Action, start: _Mark) -> None:
        """Record the end of a chunk that began at the mark ``start``."""
        self._chunks.append(_Chunk(action, start, self._mark()))

    def end_step(self, number: int) -> None:
        """End the step of this number."""

        def has_passed(chunks: list[_Chunk]) -> bool:
            return all(chunk.end.event.query() for chunk in chunks[-1:])

        self._steps.append((number, self._chunks))
        self._chunks = []
        while len(self._steps) > DEVICE_STEPS_LATER and has_passed(self._steps[0][1]):
            self._read(*self._steps.popleft())

    def _mark(self) -> _Mark:
        event = self._pool.pop() if self._pool else self._make_event()
        host_ns = time.monotonic_ns()
        event.record()
        return _Mark(event, host_ns)

    def _read(self, number: int, chunks: list[_Chunk]) -> None:
        """Report a completed step, and return its events to the pool."""
        if not chunks:
            return
        first = chunks[0].start.event
        # From step to step: the time between distant events, in ms as fp32, is too inexact.
        begin_ns = 0
        if self._anchor is not None:
            begin_ns = self._anchor[1] + elapsed_ns(self._anchor[0], first)
            self._pool.append(self._anchor[0])
        self._anchor = (first, begin_ns)
        times = [
            (
                begin_ns + elapsed_ns(first, chunk.start.event),
                begin_ns + elapsed_ns(first, chunk.end.event),
            )
            for chunk in chunks
        ]
        self._offsets.append(
            max(
                max(chunk.start.host_ns - start, chunk.end.host_ns - end)
                for chunk, (start, end) in zip(chunks, times, strict=True)
            )
        )
        offset = max(self._offsets)
        for chunk, (start, end) in zip(chunks, times, strict=True):
            action = chunk.action
            self._on_chunk(
                action.stage, action.microbatch, action.kind, start + offset, end + offset
            )
            self._pool += (
                [chunk.end.event]
                if chunk.start.event is first
                else [chunk.start.event, chunk.end.event]
            )
        busy = sum(end - start for start, end in times)
        self._on_step(number, times[0][0] + offset, times[-1][1] + offset, busy)


def _cuda_event() -> Any:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


ChunkTimer = HostChunkTimer | DeviceChunkTimer


def build_spans(device: torch.device, on_chunk: OnChunk, on_step: OnStep) -> ChunkTimer:
    """Return the timer for a device."""
    if device.type == "cuda":
        return DeviceChunkTimer(on_chunk, on_step)
    return HostChunkTimer(on_chunk, on_step)


MEAN_RUNS: Final = 256
"""Number of runs in the mean: as many as the dashboard's ring holds with 16 chunks each."""

FIGURES: Final = 3
"""Number of figures that each rank sends: first start, last end and busy time, in ns."""


class BubbleMeter:
    """Computes the bubble of runs. Made collectively over the group.

    Args:
        group: The ranks of the pipeline, on the CPU; None for a single rank.
        device: Device of the chunks.
    """

    def __init__(self, group: ProcessGroup | None, device: torch.device) -> None:
        self._shares: deque[float] = deque(maxlen=MEAN_RUNS)
        self.number = 0
        """Number of the current run, from 1."""
        self._rank, self._size = (0, 1) if group is None else (group.rank(), group.size())
        # Events of a device are read when a later run ends, and sent when the next one begins.
        self._delay = 1 + (DEVICE_STEPS_LATER if device.type == "cuda" else 0)
        self._shares_clock = group is None or _is_one_host(group)
        self._origin_ns: int | None = 0 if self._shares_clock else None
        self._origins: dict[int, int | None] = {}
        """Origin of the clock of each run that is still to be sent."""
        self._own: dict[int, tuple[int, int, int]] = {}
        self._is_asked = False

    @property
    def bubble(self) -> float | None:
        """Mean over the newest whole runs that all ranks have reported; 0 to 1."""
        return sum(self._shares) / len(self._shares) if self._shares else None

    def begin(self, *, is_whole: bool) -> list[int]:
        """Begin a run; return this rank's figures of an earlier one.

        Returns:
            ``FIGURES`` numbers for each rank, to be summed over the ranks: zeros for other ranks,
            and if unknown.
        """
        self.number += 1
        if is_whole:
            self._origins[self.number] = self._origin_ns
        reported = self.number - self._delay
        self._is_asked = self._origins.pop(reported, None) is not None
        figures = [0] * (FIGURES * self._size)
        own = self._own.pop(reported, None)
        if own is not None and self._is_asked:
            figures[FIGURES * self._rank : FIGURES * (self._rank + 1)] = own
        return figures

    def take_figures(self, figures: Sequence[int]) -> None:
        """Add a run that all ranks have reported, from the sums of their figures."""
        starts, ends, busy = (figures[at::FIGURES] for at in range(FIGURES))
        # A device may be too far behind for its events to be read; then the run is left out.
        if self._is_asked and all(ends) and max(ends) > min(starts):
            window = max(ends) - min(starts)
            self._shares.append(max(0.0, 1 - sum(busy) / (len(busy) * window)))

    def measured(self, number: int, start_ns: int, end_ns: int, busy_ns: int) -> None:
        """Take this rank's times of a run, in ns of its own clock."""
        origin = self._origins.get(number)
        if origin is not None:
            self._own[number] = (start_ns - origin, end_ns - origin, busy_ns)

    def note_sync_point(self) -> None:
        """Set the origin of the clock, at a moment when all ranks are at the same point."""
        if not self._shares_clock:
            self._origin_ns = time.monotonic_ns()


def _is_one_host(group: ProcessGroup) -> bool:
    """Whether all ranks read the same monotonic clock. Collective."""
    return len(set(gather_objects(_clock(), group))) == 1


def _clock() -> str:
    """Name the clock of this host; containers of one host have different host names."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii")
    except OSError:
        return socket.gethostname()
