"""``boltmesh stream``: a job's frames on stdout, for a viewer at the other end of a pipe.

It opens no port and reads nothing but the end of stdin: whoever started it holds both ends. What
goes wrong here is a frame too, so that the viewer can tell it from trouble with the connection.
"""

import contextlib
import os
import select
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, Final

from boltmesh.errors import BoltMeshError, ConfigError
from boltmesh.tui.sources.frames import (
    FrameEncoder,
    Hello,
    encode_error,
    encode_hello,
    encode_jobs,
    magic_line,
    write_frame,
)
from boltmesh.tui.sources.live import LiveSource, Source

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
        # What a login shell wrote before may lack the end of its last line.
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
        self._poll.register(sink, 0)  # errors are told without being asked for
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
