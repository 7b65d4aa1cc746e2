"""``boltmesh record``: writes a job's telemetry to a file for ``boltmesh top --replay``.

The file holds frames (``frames.py``). Each frame is written whole before the next look, so the file
of a recorder that was killed plays up to its last frame. From time to time a frame holds the whole
state, and a replay can start there.

``boltmesh stream``: the same frames on stdout, for a viewer at the other end of a pipe. It opens no
port and reads nothing but the end of stdin. An error is a frame too, so that the viewer can tell it
from trouble with the connection.
"""

import contextlib
import io
import os
import select
import shlex
import socket
import stat
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, BinaryIO, Final

from boltmesh.errors import BoltMeshError, ConfigError, TelemetryError
from boltmesh.tui.commands import targets
from boltmesh.tui.commands.console import as_exit_code, narrate
from boltmesh.tui.sources.frames import (
    FrameEncoder,
    Hello,
    encode_error,
    encode_hello,
    encode_jobs,
    magic_line,
    write_frame,
)
from boltmesh.tui.sources.live import LiveSource, Observation, Source

if TYPE_CHECKING:
    from typing_extensions import Self


def record(
    job: str | None,
    file: Path,
    *,
    interval_s: float = 1.0,
    for_s: float | None = None,
    force: bool = False,
    run_dir: Path | None = None,
) -> int:
    """Keep a job's telemetry in a file for ``top --replay``; return the exit code.

    Ends with the job, if it is not started again, after ``for_s`` seconds or with Ctrl-C, which is
    no failure.
    """
    with (
        as_exit_code() as exit_code,
        contextlib.closing(targets.open_source(job, demo=False, place=run_dir)) as source,
        RecordingWriter(file, has_force=force) as recording,
    ):
        with contextlib.suppress(KeyboardInterrupt):
            record_source(
                source,
                recording,
                interval_s=interval_s,
                for_s=for_s,
                on_begin=lambda: narrate(
                    f"recording into {file}; Ctrl-C ends it, the job goes on."
                ),
            )
        if recording.num_frames:
            narrate(
                f"{file}: {recording.summary()} "
                f"See it with: boltmesh top --replay {shlex.quote(str(file))}"
            )
    return exit_code()


MIN_BETWEEN_KEYS = 60
MAX_BETWEEN_KEYS = 600
"""Frames from one key frame to the next. Within these limits the next one comes when the frames
between have become as large as a key frame, so that key frames never have most of the file."""


class RecordingWriter:
    """A file that grows by one frame a call; use it as a context.

    The file is the user's alone (mode 0600), for it holds what the job's files hold. What was
    there before stays until the first frame of the new recording is written.

    Args:
        path: Where it goes.
        has_force: Replace a file that is there.

    Raises:
        ConfigError: The file exists, or cannot be made.
    """

    def __init__(self, path: Path, *, has_force: bool = False) -> None:
        self.path = path
        self.num_frames = 0
        self.num_bytes = 0
        self._encoder = FrameEncoder()
        self._key_bytes = 0
        self._frames_since_key = 0
        self._bytes_since_key = 0
        _check_target(path, has_force=has_force)
        self._written_to = path
        if has_force:
            self._written_to = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        self._file = _create(self._written_to)

    def __enter__(self) -> "Self":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._file.close()
        if self.num_frames == 0:
            self._written_to.unlink(missing_ok=True)

    def add(self, seen: Observation) -> None:
        """Write one more frame, whole.

        Raises:
            TelemetryError: It cannot be written; the file ends with the frame before it.
        """
        is_key = self._needs_key()
        payload = self._encoder.encode(seen, is_key=is_key)
        frame = io.BytesIO(magic_line() if self.num_frames == 0 else b"")
        frame.seek(0, os.SEEK_END)
        try:
            write_frame(frame, payload)
            # The bytes, not the buffer: the traceback of an error keeps the view, and a stream that
            # is collected together with a view of its buffer cannot be closed.
            _write_all(self._file, memoryview(frame.getvalue()))
        except (OSError, TelemetryError) as error:
            self._drop_torn_frame()
            reason = error.strerror if isinstance(error, OSError) else str(error)
            raise TelemetryError(
                f"{self.path} cannot be written: {reason}. {self.summary()}"
            ) from error
        if self.num_frames == 0 and self._written_to != self.path:
            self._written_to.replace(self.path)
            self._written_to = self.path
        if is_key:
            self._key_bytes, self._bytes_since_key, self._frames_since_key = len(payload), 0, 0
        else:
            self._bytes_since_key += len(payload)
            self._frames_since_key += 1
        self.num_frames += 1
        self.num_bytes = self._file.tell()

    def summary(self) -> str:
        """Describe the content of the file in one sentence."""
        frames = f"{self.num_frames:,} frame{'' if self.num_frames == 1 else 's'}"
        return f"It has {frames}, {self.num_bytes:,} bytes."

    def _needs_key(self) -> bool:
        if self.num_frames == 0 or self._frames_since_key >= MAX_BETWEEN_KEYS:
            return True
        has_grown = self._bytes_since_key >= self._key_bytes
        return has_grown and self._frames_since_key >= MIN_BETWEEN_KEYS

    def _drop_torn_frame(self) -> None:
        with contextlib.suppress(OSError):
            self._file.truncate(self.num_bytes)
            self._file.seek(self.num_bytes)


def record_source(
    source: Source,
    recording: RecordingWriter,
    *,
    interval_s: float,
    for_s: float | None = None,
    on_begin: Callable[[], None] = lambda: None,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Add a look each interval until the job ends and is not started again, or for a while.

    A job that has ended is one frame. Looks keep their rhythm, however long one takes.

    Args:
        source: The job.
        recording: Where the looks go.
        interval_s: Time between two looks.
        for_s: Stop after this time; None: with the job.
        on_begin: Called after the first frame, where there will be others.
        clock: Seconds that only go forward.
        sleep: Waits.

    Raises:
        TelemetryError: The job can no longer be read, or the file no longer written.
        KeyboardInterrupt: The user has seen enough; the file is complete.
    """
    begin = due = clock()
    while True:
        seen = source.read()
        recording.add(seen)
        now = clock()
        due = max(due + interval_s, now)
        if seen.job.is_over or (for_s is not None and due - begin > for_s):
            return
        if recording.num_frames == 1:
            on_begin()
        sleep(due - now)


def _check_target(path: Path, *, has_force: bool) -> None:
    try:
        found = path.lstat()
    except FileNotFoundError:
        return
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}.") from error
    if not stat.S_ISREG(found.st_mode):
        raise ConfigError(f"{path} is no plain file. Name a new one.")
    if not has_force:
        raise ConfigError(f"{path} exists. Name another file, or add --force to replace it.")


def _create(path: Path) -> io.FileIO:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        descriptor = os.open(path, flags, 0o600)
    except OSError as error:
        raise ConfigError(f"{path} cannot be made: {error.strerror}.") from error
    return open(descriptor, "wb", buffering=0)  # a frame is in the file when its write returns


def _write_all(file: io.FileIO, content: memoryview) -> None:
    """Write everything; a disk that fills up takes a part first and then says so."""
    while content:
        content = content[file.write(content) :]


SECOND_LOOK_S: Final = 0.2
"""A process's CPU share is a difference of two looks: the second one is not to be waited for."""


def stream(
    job: str | None = None,
    *,
    wants_list: bool = False,
    run_dir: Path | None = None,
    interval_s: float = 1.0,
) -> int:
    """Write frames to stdout until stdin or stdout is closed; return the exit code.

    Args:
        job: As ``boltmesh top`` takes it.
        wants_list: Write one frame that lists the jobs instead, and return.
        run_dir: Where jobs keep their telemetry. None: the default of this user.
        interval_s: Time between two frames.

    Raises:
        ConfigError: Stdout is a terminal.
    """
    if sys.stdout.isatty():
        raise ConfigError(
            "'boltmesh stream' writes frames for 'boltmesh top --ssh'. "
            "Use 'boltmesh top' to see a job here."
        )
    output = sys.stdout.buffer
    try:
        # The output of a login shell may lack the end of its last line.
        output.write(b"\n" + magic_line())
        if wants_list:
            return _list_jobs(output, run_dir)
        return _follow(output, job, run_dir, interval_s)
    except (BrokenPipeError, ConnectionResetError):
        # Python would complain once more when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _list_jobs(output: BinaryIO, run_dir: Path | None) -> int:
    from boltmesh.telemetry.reader.reader import list_jobs

    with _as_frame(output) as codes:
        write_frame(output, encode_jobs(list_jobs(run_dir)))
        output.flush()
    return max(codes, default=0)


def _follow(output: BinaryIO, which: str | None, run_dir: Path | None, interval_s: float) -> int:
    from boltmesh.telemetry.reader.reader import list_jobs, open_job

    with _as_frame(output) as codes:
        job = open_job(which, run_dir)
        with contextlib.closing(LiveSource(job)) as source:
            others = [
                each.id
                for each in (list_jobs(run_dir) if which is None else ())
                if each.state == "running" and each.id != job.info.id
            ]
            hello = Hello(job.info.id, socket.gethostname(), job.info.python, tuple(others))
            write_frame(output, encode_hello(hello))
            _write_looks(output, source, interval_s)
    return max(codes, default=0)


def _write_looks(output: BinaryIO, source: Source, interval_s: float) -> None:
    encoder = FrameEncoder()
    pause = min(interval_s, SECOND_LOOK_S)
    ends = Ends(sys.stdin.fileno() if sys.stdin else None, output.fileno())
    due = time.monotonic()
    while True:
        write_frame(output, encoder.encode(source.read()))
        output.flush()
        due = max(due + pause, time.monotonic())
        if ends.wait_until(due):
            return
        pause = interval_s


@contextlib.contextmanager
def _as_frame(output: BinaryIO) -> Iterator[list[int]]:
    """Write what may be raised as a frame; gives the exit code, when there is one."""
    codes: list[int] = []
    try:
        yield codes
    except BoltMeshError as error:
        write_frame(output, encode_error(str(error)))
        output.flush()
        codes.append(error.exit_code)


class Ends:
    """The two ends of a pipe's peer: it is gone when either is closed.

    Args:
        source: Descriptor that ends with it; what can be read there is of no interest. None: there
            is none, and it counts as closed.
        sink: Descriptor that breaks with it.
    """

    def __init__(self, source: int | None, sink: int) -> None:
        self._source = source
        self._poll = select.poll()
        self._poll.register(sink, 0)  # errors are always reported
        if source is not None:
            self._poll.register(source, select.POLLIN)

    def wait_until(self, due: float) -> bool:
        """Wait until a time of the monotonic clock; return early, and True, when one is closed."""
        if self._source is None:
            return True
        while True:
            left = due - time.monotonic()
            events = self._poll.poll(max(0.0, left) * 1000)
            for descriptor, event in events:
                if descriptor != self._source or event & (select.POLLERR | select.POLLNVAL):
                    return True
                if not os.read(descriptor, 4096):
                    return True
            if left <= 0:
                return False
