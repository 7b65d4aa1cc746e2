"""The dashboard beside a real training of two ranks: attach, detach, and see a rank die."""

import contextlib
import fcntl
import json
import os
import pty
import select
import signal
import struct
import subprocess
import termios
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.forked_python import ForkedPython
from tests.tui.training import BOLTMESH, global_step, run_training, wait_for

pytestmark = [pytest.mark.ranks, pytest.mark.slow]


@pytest.fixture
def training(tmp_path: Path) -> Iterator[ForkedPython]:
    with run_training(tmp_path) as process:
        yield process


def _top(*options: str) -> str:
    command = [*BOLTMESH, "top", *options]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout


class Terminal:
    """A terminal of 120 x 35 cells that runs a command and keeps what it prints."""

    def __init__(self, command: list[str]) -> None:
        self.pid, self._file = pty.fork()
        if self.pid == 0:
            os.environ["TERM"] = "xterm-256color"
            os.execv(command[0], command)
        fcntl.ioctl(self._file, termios.TIOCSWINSZ, struct.pack("HHHH", 35, 120, 0, 0))
        self.printed = b""

    def read_until(self, text: str, *, timeout_s: float = 300.0) -> None:
        deadline = time.monotonic() + timeout_s
        while text.encode() not in self.printed:
            assert time.monotonic() < deadline, f"no {text!r} on the screen: {self.printed!r}"
            if select.select([self._file], [], [], 0.1)[0]:
                self.printed += os.read(self._file, 65536)

    def press(self, key: str) -> None:
        os.write(self._file, key.encode())

    def wait(self) -> int:
        """Read to the end and return the exit code."""
        with contextlib.suppress(OSError):
            while data := os.read(self._file, 65536):
                self.printed += data
        os.close(self._file)
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


def test_watching_leaves_the_job_alone_and_sees_it_die(
    training: ForkedPython,
) -> None:
    document: dict[str, Any] = json.loads(_top("--once", "--json"))
    assert document["state"] == "running"
    assert document["strategy"] == "DDPStrategy"
    pids = {rank["pid"] for rank in document["ranks"]}
    processes = [device for device in document["devices"] if device["kind"] == "process"]
    assert {process["pid"] for process in processes} == pids
    assert all(process["utilization_percent"] is not None for process in processes)
    assert "  as expected " in _top("--once")

    terminal = Terminal([*BOLTMESH, "top"])
    terminal.read_until("DDPStrategy")
    terminal.read_until("running")
    for digit, words in (
        ("2", "recent steps"),
        ("3", "difference"),
        ("4", "waits"),  # no pipeline, so no stage waits for another
        ("5", "processes"),
        ("6", "memory"),
        ("7", "collectives by group"),
        ("1", "samples/s"),
    ):
        terminal.printed = b""
        terminal.press(digit)
        terminal.read_until(words)
    terminal.press("m")
    terminal.press("q")
    assert terminal.wait() == 0
    assert f"detached from {document['id']}".encode() in terminal.printed

    before = global_step()
    wait_for(lambda: global_step() > before + 3, "steps after the dashboard has left")
    assert training.poll() is None

    terminal = Terminal([*BOLTMESH, "top", document["id"][:4]])
    terminal.read_until("running")
    os.kill(document["ranks"][1]["pid"], signal.SIGKILL)
    # Only cells that change are sent, so single words are looked for.
    terminal.read_until("SIGKILL")
    assert training.wait(60) != 0
    terminal.press("q")
    assert terminal.wait() == 0
    assert b"detached" not in terminal.printed

    text = _top("--once")
    assert "crashed: rank 1 was killed by SIGKILL" in " ".join(text.split())
    assert "dead" in text
