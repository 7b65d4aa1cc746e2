"""What the launchers know of processes: how one ended, and how to end with one's parent."""

import ctypes
import os
import signal
import sys

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


def end_with_parent() -> None:
    """Ask the kernel to kill this process when the thread that started it ends (Linux only).

    A rank whose launcher was killed would wait in a collective until its timeout.
    """
    if not sys.platform.startswith("linux"):
        return
    parent = os.getppid()
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before the kernel was asked
        os.kill(os.getpid(), signal.SIGKILL)
