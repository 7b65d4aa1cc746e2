"""When each chunk was computed, on the clock of the host.

``HostSpans`` asks the clock. ``DeviceSpans``, for CUDA, asks the device: events are recorded on the
current stream around each chunk, kept in a pool, and read two steps later, once the last of them
has passed. Nothing synchronises.
"""

import time
from collections import deque
from collections.abc import Callable
from typing import Any, Final, NamedTuple

import torch
from typing_extensions import override

from boltmesh.strategies.pipeline.executor.program import Action

OnChunk = Callable[[int, int, str, int, int], None]
"""Called with stage, microbatch, kind, and start and end on the monotonic clock in ns."""

_KEPT_OFFSETS: Final = 16
_STEPS_LATER: Final = 2


def build_spans(device: torch.device, on_chunk: OnChunk | None) -> "Spans":
    """Return what measures on this device; without ``on_chunk`` nothing is measured."""
    if on_chunk is None:
        return NoSpans()
    return DeviceSpans(on_chunk) if device.type == "cuda" else HostSpans(on_chunk)


class NoSpans:
    """Measures nothing."""

    def begin(self) -> Any:
        """Take the start of a chunk."""

    def end(self, action: Action, start: Any) -> None:
        """Take its end."""

    def end_step(self) -> None:
        """Close the step."""


class HostSpans(NoSpans):
    """Measures chunks that are computed by the host itself."""

    def __init__(self, on_chunk: OnChunk) -> None:
        self._on_chunk = on_chunk

    @override
    def begin(self) -> int:
        return time.monotonic_ns()

    @override
    def end(self, action: Action, start: int) -> None:
        self._on_chunk(action.stage, action.microbatch, action.kind, start, time.monotonic_ns())


class _Mark(NamedTuple):
    event: Any
    host_ns: int


class _Chunk(NamedTuple):
    action: Action
    start: _Mark
    end: _Mark


class DeviceSpans(NoSpans):
    """Measures chunks that run on a device behind the host.

    An event passes no earlier than the host records it. So the device's clock is behind the
    host's by at least what lies between the two for any event, and by exactly that for one that
    met an idle stream, of which a pipeline has some in every step: the largest of the last steps
    is taken.

    Args:
        on_chunk: Told of each chunk, two steps late.
        make_event: Makes what has ``record``, ``query`` and ``elapsed_time`` in ms.
    """

    def __init__(self, on_chunk: OnChunk, make_event: Callable[[], Any] | None = None) -> None:
        self._on_chunk = on_chunk
        self._make_event = make_event or _cuda_event
        self._pool: list[Any] = []
        self._chunks: list[_Chunk] = []
        self._steps: deque[list[_Chunk]] = deque()
        self._anchor: tuple[Any, int] | None = None
        """An event, and when it passed on the device's clock, which begins with the first."""
        self._offsets: deque[int] = deque(maxlen=_KEPT_OFFSETS)

    @override
    def begin(self) -> _Mark:
        return self._mark()

    @override
    def end(self, action: Action, start: _Mark) -> None:
        self._chunks.append(_Chunk(action, start, self._mark()))

    @override
    def end_step(self) -> None:
        self._steps.append(self._chunks)
        self._chunks = []
        while len(self._steps) > _STEPS_LATER and self._has_passed(self._steps[0]):
            self._read(self._steps.popleft())

    def _mark(self) -> _Mark:
        event = self._pool.pop() if self._pool else self._make_event()
        host_ns = time.monotonic_ns()
        event.record()
        return _Mark(event, host_ns)

    @staticmethod
    def _has_passed(chunks: list[_Chunk]) -> bool:
        return all(chunk.end.event.query() for chunk in chunks[-1:])

    def _read(self, chunks: list[_Chunk]) -> None:
        """Tell of a step that has passed, and use its events again."""
        if not chunks:
            return
        first = chunks[0].start.event
        # From step to step: the milliseconds between far events have too few digits.
        begin_ns = 0
        if self._anchor is not None:
            begin_ns = self._anchor[1] + _elapsed_ns(self._anchor[0], first)
            self._pool.append(self._anchor[0])
        self._anchor = (first, begin_ns)
        times = [
            (
                begin_ns + _elapsed_ns(first, chunk.start.event),
                begin_ns + _elapsed_ns(first, chunk.end.event),
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


Spans = NoSpans


def _cuda_event() -> Any:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def _elapsed_ns(start: Any, end: Any) -> int:
    return max(0, int(start.elapsed_time(end) * 1e6))
