"""Processes: how one ended, how one ends at once, and how one ends with its parent."""

import ctypes
import os
import select
import signal
import sys
import time
from typing import NoReturn

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def describe_exit(code: int) -> str:
    """An exit code of ``subprocess`` in words: ``was killed by signal 9 (SIGKILL)``."""
    if code >= 0:
        return f"exited with code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = "unknown"
    return f"was killed by signal {-code} ({name})"


def write_stderr(text: str) -> None:
    """Write to stderr past Python's buffers, which a signal handler may have interrupted."""
    os.write(2, text.encode(errors="replace"))


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
