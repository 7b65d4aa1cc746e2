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

OnStep = Callable[[int, int, int, int], None]
"""Called with a step's number, its first start and last end, and how long it computed, in ns."""

DEVICE_STEPS_LATER: Final = 2
"""How many steps later a device is asked."""

_KEPT_OFFSETS: Final = 16


def build_spans(device: torch.device, on_chunk: OnChunk, on_step: OnStep) -> "Spans":
    """Return what measures on this device."""
    spans = DeviceSpans if device.type == "cuda" else HostSpans
    return spans(on_chunk, on_step)


class Spans:
    """What is common to both clocks.

    Args:
        on_chunk: Told of each chunk.
        on_step: Told of each step when all of its chunks were told; not of one without any.
    """

    def __init__(self, on_chunk: OnChunk, on_step: OnStep = lambda *_: None) -> None:
        self._on_chunk = on_chunk
        self._on_step = on_step

    def begin(self) -> Any:
        """Take the start of a chunk."""
        raise NotImplementedError

    def end(self, action: Action, start: Any) -> None:
        """Take its end."""
        raise NotImplementedError

    def end_step(self, number: int = 0) -> None:
        """Close the step of this number."""
        raise NotImplementedError


class HostSpans(Spans):
    """Measures chunks that are computed by the host itself."""

    def __init__(self, on_chunk: OnChunk, on_step: OnStep = lambda *_: None) -> None:
        super().__init__(on_chunk, on_step)
        self._first_ns = self._last_ns = self._busy_ns = 0

    @override
    def begin(self) -> int:
        return time.monotonic_ns()

    @override
    def end(self, action: Action, start: int) -> None:
        end = self._last_ns = time.monotonic_ns()
        self._first_ns = self._first_ns or start
        self._busy_ns += end - start
        self._on_chunk(action.stage, action.microbatch, action.kind, start, end)

    @override
    def end_step(self, number: int = 0) -> None:
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


class DeviceSpans(Spans):
    """Measures chunks that run on a device behind the host.

    An event passes no earlier than the host records it. So the device's clock is behind the
    host's by at least what lies between the two for any event, and by exactly that for one that
    met an idle stream, of which a pipeline has some in every step: the largest of the last steps
    is taken.

    Args:
        on_chunk: Told of each chunk, two steps late.
        on_step: Told of each step, as late.
        make_event: Makes what has ``record``, ``query`` and ``elapsed_time`` in ms.
    """

    def __init__(
        self,
        on_chunk: OnChunk,
        on_step: OnStep = lambda *_: None,
        make_event: Callable[[], Any] | None = None,
    ) -> None:
        super().__init__(on_chunk, on_step)
        self._make_event = make_event or _cuda_event
        self._pool: list[Any] = []
        self._chunks: list[_Chunk] = []
        self._steps: deque[tuple[int, list[_Chunk]]] = deque()
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
    def end_step(self, number: int = 0) -> None:
        self._steps.append((number, self._chunks))
        self._chunks = []
        while len(self._steps) > DEVICE_STEPS_LATER and self._has_passed(self._steps[0][1]):
            self._read(*self._steps.popleft())

    def _mark(self) -> _Mark:
        event = self._pool.pop() if self._pool else self._make_event()
        host_ns = time.monotonic_ns()
        event.record()
        return _Mark(event, host_ns)

    @staticmethod
    def _has_passed(chunks: list[_Chunk]) -> bool:
        return all(chunk.end.event.query() for chunk in chunks[-1:])

    def _read(self, number: int, chunks: list[_Chunk]) -> None:
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
        busy = sum(end - start for start, end in times)
        self._on_step(number, times[0][0] + offset, times[-1][1] + offset, busy)


def _cuda_event() -> Any:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def _elapsed_ns(start: Any, end: Any) -> int:
    return max(0, int(start.elapsed_time(end) * 1e6))
