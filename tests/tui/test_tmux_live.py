"""The dashboard in tmux beside a real training of two ranks: what a person at a terminal sees."""

import os
import shlex
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from boltmesh.tui.pages.registry import PAGES
from tests.support.forked_python import ForkedPython
from tests.tui.training import BOLTMESH, global_step, run_training, snapshot, wait_for

pytestmark = [
    pytest.mark.ranks,
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("tmux") is None, reason="tmux is not installed"),
]


class Viewer:
    """A tmux server of its own, in whose only window ``boltmesh top`` runs."""

    def __init__(self, folder: Path, *options: str, width: int = 120, height: int = 40) -> None:
        self._socket = str(folder / f"tmux-{time.monotonic_ns()}")
        self._exit_code = folder / f"exit-{time.monotonic_ns()}"
        viewer = shlex.join([*BOLTMESH, "top", *options])
        command = f"{viewer}; echo $? > {shlex.quote(str(self._exit_code))}; sleep 600"
        size = ["-x", str(width), "-y", str(height)]
        self.run("-f", "/dev/null", "new-session", "-d", *size, "sh", "-c", command)

    def run(self, *arguments: str) -> str:
        command = ["tmux", "-S", self._socket, *arguments]
        return subprocess.run(
            command, capture_output=True, text=True, check=True, timeout=600
        ).stdout

    def press(self, *keys: str) -> None:
        self.run("send-keys", *keys)

    def resize(self, width: int, height: int) -> None:
        self.run("resize-window", "-x", str(width), "-y", str(height))

    def text(self) -> str:
        return self.run("capture-pane", "-p")

    def see(self, *words: str, timeout_s: float = 300.0) -> str:
        """Wait until all of the words are on the screen; return the screen."""
        deadline = time.monotonic() + timeout_s
        while True:
            text = self.text()
            if all(word in text for word in words):
                return text
            assert time.monotonic() < deadline, f"no {words} in {timeout_s:.0f} s on\n{text}"
            time.sleep(0.1)

    def exit_code(self) -> int:
        wait_for(
            lambda: self._exit_code.is_file() and self._exit_code.read_text() != "",
            "the viewer to leave",
        )  # fmt: skip
        return int(self._exit_code.read_text())

    def close(self) -> None:
        subprocess.run(
            ["tmux", "-S", self._socket, "kill-server"], capture_output=True, check=False
        )


@pytest.fixture
def training(tmp_path: Path) -> Iterator[ForkedPython]:
    with run_training(tmp_path) as process:
        yield process


@pytest.fixture
def viewers() -> Iterator[list[Viewer]]:
    opened: list[Viewer] = []
    yield opened
    for viewer in opened:
        viewer.close()


def footprint(pid: int) -> tuple[int, ...]:
    """Threads, open files and sockets that a process always has.

    Beside them it has others for moments, such as the file of a checkpoint.
    """
    process = psutil.Process(pid)
    looks = []
    before = global_step()
    while global_step() < before + 12:  # of an epoch
        with process.oneshot():
            counts = process.num_threads(), process.num_fds(), len(process.net_connections())
        looks.append(counts)
    return tuple(map(min, zip(*looks, strict=True)))


@pytest.mark.full
def test_two_viewers_come_and_go_and_the_job_does_not_notice(
    training: ForkedPython, tmp_path: Path, viewers: list[Viewer]
) -> None:
    job = snapshot()
    assert job is not None
    pids = [rank.pid for rank in job.ranks if rank.pid is not None]
    assert len(pids) == 2
    wait_for(lambda: global_step() > 24, "two epochs, which do all that the others do")
    before = [footprint(pid) for pid in pids]

    viewers.append(Viewer(tmp_path))
    viewers.append(Viewer(tmp_path, job.id, "--ascii", width=80, height=24))
    for viewer in viewers:
        viewer.see("DDPStrategy", "running")
    first, second = viewers
    for tab in PAGES.tabs:
        for viewer in viewers:
            viewer.press(tab.key)
        screen = first.see(f"▐{tab.key} {tab.title}▌")
        assert "Traceback" not in screen
        assert second.see(f"[{tab.key} ").isascii()

    first.press("1")
    for size in ((60, 15), (200, 60), (20, 5), (120, 40)):
        first.resize(*size)
        first.see("tiny")
    assert [footprint(pid) for pid in pids] == before

    first.press("q")
    assert first.exit_code() == 0
    first.see(f"detached from {job.id}")
    now = global_step()
    wait_for(lambda: global_step() > now + 3, "steps after one viewer has left")
    assert training.poll() is None
    second.press("1")
    second.see("running")


def test_a_killed_rank_is_named_on_the_screen(
    training: ForkedPython, tmp_path: Path, viewers: list[Viewer]
) -> None:
    job = snapshot()
    assert job is not None
    viewers.append(Viewer(tmp_path))
    viewers[0].see("running")
    pid = job.ranks[1].pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    screen = viewers[0].see("crashed", "rank 1", "SIGKILL")
    assert "Traceback" not in screen
    assert training.wait(60) == 1
    viewers[0].press("7")
    viewers[0].see("▐7 Events▌", "SIGKILL")


@pytest.mark.full
def test_an_interrupted_run_is_shown_as_ended_with_its_checkpoint(
    training: ForkedPython, tmp_path: Path, viewers: list[Viewer]
) -> None:
    viewers.append(Viewer(tmp_path))
    viewers[0].see("running")
    training.send_signal(signal.SIGINT)
    assert training.wait(60) == 130
    screen = viewers[0].see("checkpoint", "stopped by Ctrl-C")
    assert "running" not in screen.splitlines()[0]
    viewers[0].press("q")
    assert viewers[0].exit_code() == 0
    assert "detached" not in viewers[0].text()
