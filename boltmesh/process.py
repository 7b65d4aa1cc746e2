"""Processes: which one it is, how one ended, how one ends at once, or with its parent."""

import contextlib
import ctypes
import functools
import os
import re
import select
import signal
import socket
import sys
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


class ProcessId(NamedTuple):
    """A process among those of all machines that share a file system."""

    machine: str
    """Checksum of the host's name, its boot and the process namespace: of a container, its own."""
    pid: int
    started: int
    """When it started, so that another process with its pid is not taken for it; 0 if unknown."""

    @classmethod
    def own(cls) -> "ProcessId":
        """Return the id of this process."""
        return cls.of(os.getpid())

    @classmethod
    def of(cls, pid: int) -> "ProcessId":
        """Return the id of a process of this machine that lives."""
        return cls(_machine(), pid, start_ticks(pid) or 0)

    def has_ended(self) -> bool | None:
        """Whether it has ended; None if it ran on another machine, or before a reboot."""
        if self.machine != _machine():
            return None
        started = start_ticks(self.pid)
        return started is None or (started != self.started and 0 not in {started, self.started})


def _machine() -> str:
    parts = [socket.gethostname()]
    with contextlib.suppress(OSError):
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii"))
        parts.append(os.readlink("/proc/self/ns/pid"))
    return f"{zlib.crc32(' '.join(parts).encode()):08x}"


def start_ticks(pid: int) -> int | None:
    """Return when a process started, in clock ticks since boot; 0 if unknown, None if it has ended.

    Source: field 22 of ``/proc/PID/stat``, https://man7.org/linux/man-pages/man5/proc_pid_stat.5.html.
    """
    if not Path("/proc/self/stat").exists():
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return None
        except PermissionError:
            pass
        return 0
    try:
        # The name, in parentheses, may hold anything.
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    except OSError:  # of another user, where /proc hides these
        return 0
    return None if fields[0] in {b"Z", b"X"} else int(fields[19])


def describe_exit(code: int) -> str:
    """An exit code of ``subprocess`` in words: ``was killed by signal 9 (SIGKILL)``."""
    if code >= 0:
        return f"exited with code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = "unknown"
    return f"was killed by signal {-code} ({name})"


INVISIBLE = r"\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb"
"""Line separators, and marks that are invisible or change the direction, for a class of a regex."""

_CONTROL = re.compile(rf"[\x00-\x08\x0b-\x1f\x7f-\x9f{INVISIBLE}]")
"""Control characters except tab and line feed, and invisible marks."""


def without_control(text: str) -> str:
    """Return text that cannot steer a terminal, and that UTF-8 can encode.

    Texts of errors hold what a file, a config or a peer has sent.
    """
    return encodable(_CONTROL.sub("?", text))


def encodable(text: str) -> str:
    r"""Return text that UTF-8 can encode: a lone surrogate becomes ``\udcff`` in letters.

    Names of files with other bytes have them, and so have errors about such files.
    """
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def write_stderr(text: str) -> None:
    """Write to stderr past Python's buffers, which a signal handler may have interrupted."""
    with contextlib.suppress(BrokenPipeError):
        os.write(2, without_control(text).encode())


def outlive_readers() -> None:
    """Continue without output when the reader of a pipe ends: Ctrl-C ends ``| tee`` as well."""
    for stream in {sys.stdout, sys.stderr} - {None}:
        for name in ("write", "flush"):
            setattr(stream, name, _without_reader(stream, getattr(stream, name)))


def _without_reader(stream: Any, method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def call(*args: Any) -> Any:
        try:
            return method(*args)
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
            return method(*args)

    return call


def end_process(code: int, message: str = "") -> NoReturn:
    """End this process now. The only place of boltmesh that calls ``os._exit``.

    From any thread and from a signal handler: nothing is unwound and no lock is taken, because the
    main thread may hang in a collective that never completes.

    Args:
        code: Exit code.
        message: One line for stderr, without ``boltmesh:``; empty for none.
    """
    if message:
        write_stderr(f"boltmesh: {message}\n")
    os._exit(code)


def end_with_parent() -> None:
    """Make the kernel kill this process when the thread that started it ends (Linux only).

    A rank whose launcher was killed would wait in a collective until its timeout.
    """
    if not sys.platform.startswith("linux"):
        return
    parent = os.getppid()
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before prctl took effect
        os.kill(os.getpid(), signal.SIGKILL)


def wait_for_end_of_parent() -> None:
    """Return when the process that started this one has ended; for a thread to wait in."""
    parent = os.getppid()
    if hasattr(os, "pidfd_open"):
        try:
            descriptor = os.pidfd_open(parent)
        except OSError:  # an old kernel, or the parent ended already
            pass
        else:
            select.select([descriptor], [], [])
            os.close(descriptor)
            return
    while os.getppid() == parent:
        time.sleep(0.5)
