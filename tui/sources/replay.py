"""A recording as a source: the same observations again, at any place and at any speed.

The file is scanned once for the times of its frames. From then on a look decodes the frames since
the last one, or, after a jump, from the nearest place before the new one where decoding can begin:
a key frame, or a frame at which the decoder was kept.
"""

import bisect
import copy
import os
import stat
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple

import msgspec

from boltmesh.errors import ConfigError, TelemetryError
from boltmesh.tui.sources.frames import (
    FrameDecoder,
    FrameScanner,
    VersionError,
    read_frame,
    read_magic,
)
from boltmesh.tui.sources.live import Observation

KEEP_EVERY = 16
MAX_KEPT = 12
"""A kept decoder shares nearly all of its observation with its neighbours."""

SPEEDS = (0.5, 1.0, 2.0, 4.0, 8.0, 16.0)


class _RecordedFrame(NamedTuple):
    time: float
    offset: int
    is_key: bool


class ReplaySource:
    """Plays a file that ``boltmesh record`` wrote.

    Its clock is its own: it does not advance while paused, and stops at the last frame. The methods
    may be called from another thread than the one that reads.

    Args:
        path: The recording.
        clock: Seconds that only go forward; what the recording's own clock is driven by.
        is_playing: Whether its clock runs from the beginning.

    Raises:
        ConfigError: The file cannot be read, is no recording, or has no frame.
    """

    def __init__(
        self,
        path: Path,
        *,
        clock: Callable[[], float] = time.monotonic,
        is_playing: bool = True,
    ) -> None:
        self.path = path
        self.note: str | None = None
        """Why the recording ends where it does, where that is not its true end."""
        self._frames: list[_RecordedFrame] = []
        self._times: list[float] = []
        self._file = _open(path)
        try:
            self._scan()
        except BaseException:
            self._file.close()
            raise
        self._lock = threading.Lock()
        self._clock = clock
        self._checked = clock()
        self._place = self._times[0]
        self._speed = 1.0
        self._is_playing = is_playing
        self._decoder = FrameDecoder()
        self._kept: dict[int, FrameDecoder] = {}
        self._at: int | None = None
        self._seen: Observation | None = None

    def read(self) -> Observation:
        """Return the observation at the recording's clock.

        ``is_rewound`` is set where it is earlier than what the last call returned.
        """
        with self._lock:
            self._advance()
            target = bisect.bisect_right(self._times, self._place) - 1
            return self._decode(max(0, target))

    def close(self) -> None:
        """Close the file."""
        with self._lock:
            self._file.close()

    def span(self) -> tuple[float, float]:
        """Return the wall clock of the first and of the last frame."""
        return self._times[0], self._times[-1]

    @property
    def num_frames(self) -> int:
        """How many looks it holds."""
        return len(self._frames)

    @property
    def position(self) -> float:
        """The recording's clock: wall clock of the moment that is shown."""
        with self._lock:
            self._advance()
            return self._place

    @property
    def is_at_end(self) -> bool:
        """Whether the last frame is shown."""
        return self.position >= self.span()[1]

    @property
    def is_playing(self) -> bool:
        """Whether the clock runs."""
        return self._is_playing

    @property
    def speed(self) -> float:
        """How many recorded seconds pass in one."""
        return self._speed

    @speed.setter
    def speed(self, speed: float) -> None:
        with self._lock:
            self._advance()
            self._speed = min(max(speed, SPEEDS[0]), SPEEDS[-1])

    def play(self) -> None:
        """Let the clock run; from the beginning, if it is at the end."""
        with self._lock:
            self._advance()
            if self._place >= self._times[-1]:
                self._place = self._times[0]
            self._is_playing = True

    def pause(self) -> None:
        """Stop the clock."""
        with self._lock:
            self._advance()
            self._is_playing = False

    def seek(self, time: float) -> None:
        """Set the clock to a moment of the recording, or to the nearer of its ends."""
        first, last = self.span()
        with self._lock:
            self._advance()
            self._place = min(max(time, first), last)

    def step(self, by: int) -> None:
        """Pause, and go ``by`` frames forward, or backward where it is negative."""
        with self._lock:
            self._advance()
            self._is_playing = False
            here = bisect.bisect_right(self._times, self._place) - 1
            there = min(max(here + by, 0), len(self._frames) - 1)
            self._place = self._frames[there].time

    def frames(self, *, until: float | None = None) -> Iterator[Observation]:
        """Yield the observation of each frame, from the one at the clock on; waits for nothing.

        Args:
            until: Time of the last one; None: the end.
        """
        self.step(0)
        last = self.span()[1] if until is None else until
        while True:
            yield self.read()
            if self.is_at_end:
                return
            self.step(1)
            if self.position > last:
                return

    def _advance(self) -> None:
        now = self._clock()
        if self._is_playing:
            passed = (now - self._checked) * self._speed
            self._place = min(self._place + passed, self._times[-1])
        self._checked = now

    def _decode(self, target: int) -> Observation:
        """Return a frame, by way of the frames that it builds on."""
        before = self._at
        if self._seen is not None and before == target:
            return self._seen if not self._seen.is_rewound else self._without_rewind()
        is_rewound = before is not None and target < before
        first = self._begin(target)
        try:
            for number in range(first, target + 1):
                self._file.seek(self._frames[number].offset)
                payload = read_frame(self._file)
                assert payload is not None, "the scan has seen it"
                self._seen = self._decoder.decode(payload)
                self._at = number
                self._keep(number)
        except TelemetryError as error:
            return self._cut(number, error)
        assert self._seen is not None
        if is_rewound:
            self._seen = msgspec.structs.replace(self._seen, is_rewound=True)
        return self._seen

    def _begin(self, target: int) -> int:
        """Return the frame to decode first, and have the decoder be where it follows on."""
        key = target
        while not self._frames[key].is_key:
            key -= 1
        places = dict(self._kept)
        if self._at is not None:
            places[self._at] = self._decoder
        here = max((each for each in places if key <= each < target), default=None)
        if here is None:
            return key
        if here != self._at:
            self._decoder = copy.copy(places[here])
        return here + 1

    def _keep(self, number: int) -> None:
        if number % KEEP_EVERY == 0:
            self._kept.pop(number, None)
            self._kept[number] = copy.copy(self._decoder)
            if len(self._kept) > MAX_KEPT:
                del self._kept[next(iter(self._kept))]

    def _without_rewind(self) -> Observation:
        assert self._seen is not None
        self._seen = msgspec.structs.replace(self._seen, is_rewound=False)
        return self._seen

    def _cut(self, number: int, error: TelemetryError) -> Observation:
        """End the recording before a frame whose bytes are whole but whose content is invalid."""
        self._at, self._seen, self._decoder = None, None, FrameDecoder()
        self._kept.clear()
        self._end_at(number, str(error))
        self._place = min(self._place, self._times[-1])
        return self._decode(len(self._frames) - 1)

    def _end_at(self, number: int, reason: str) -> None:
        del self._frames[number:], self._times[number:]
        if not self._frames:
            raise ConfigError(f"{self.path} holds no frame that can be read: {reason}")
        shown = f"{number:,} frame{'s' if number > 1 else ''}"
        self.note = f"the recording is played up to {shown}: {reason}"

    def _scan(self) -> None:
        """Find the frames; the first that is torn or damaged ends the recording."""
        file, scanner = self._file, FrameScanner()
        try:
            read_magic(file)
        except VersionError as error:
            raise ConfigError(f"{self.path}: {error}") from error
        except TelemetryError as error:
            raise ConfigError(
                f"{self.path} is no recording. Make one with 'boltmesh record FILE'."
            ) from error
        reason = "it ends before the first."
        try:
            while True:
                offset = file.tell()
                payload = read_frame(file)
                if payload is None:
                    break
                moment, is_key = scanner.scan(payload)
                # A clock that was set back while it was recorded lets time stand still here.
                moment = max(moment, self._times[-1] if self._times else moment)
                self._frames.append(_RecordedFrame(moment, offset, is_key))
                self._times.append(moment)
        except TelemetryError as error:
            reason = str(error)
            self._end_at(len(self._frames), reason)
        if not self._frames:
            self._end_at(0, reason)


def _open(path: Path) -> BinaryIO:
    try:
        # A pipe without a writer would wait here for ever.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}.") from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise ConfigError(f"{path} is no plain file. Name one that 'boltmesh record' wrote.")
    return open(descriptor, "rb")
