"""The dashboard in a terminal multiplexer, which is where most people keep it."""

import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(shutil.which("tmux") is None, reason="tmux is not installed")

WAIT_S = 300.0


class Tmux:
    """A tmux server of its own, with the dashboard in its only window."""

    def __init__(self, socket: Path, *options: str, size: tuple[int, int] = (80, 24)) -> None:
        self._socket = socket
        # The configuration of whoever runs the tests stays out of it.
        self._base = ["tmux", "-f", "/dev/null", "-S", str(socket)]
        command = [sys.executable, "-m", "boltmesh", "top", "--demo", *options]
        size_options = ["-x", str(size[0]), "-y", str(size[1])]
        self.run("new-session", "-d", *size_options, *command)

    def run(self, *arguments: str) -> str:
        done = subprocess.run(
            [*self._base, *arguments], capture_output=True, text=True, check=True, timeout=600
        )
        return done.stdout

    def press(self, *keys: str) -> None:
        self.run("send-keys", *keys)

    def wait_for(self, *texts: str, gone: str | None = None) -> str:
        """Wait until these texts are on the screen and that one is not; return the screen."""
        deadline = time.monotonic() + WAIT_S
        while True:
            screen = self.run("capture-pane", "-p")
            if all(text in screen for text in texts) and (gone is None or gone not in screen):
                return screen
            assert time.monotonic() < deadline, f"no {texts} or {gone} on the screen:\n{screen}"
            time.sleep(0.1)

    def is_running(self) -> bool:
        command = [*self._base, "has-session"]
        return subprocess.run(command, capture_output=True, check=False).returncode == 0

    def close(self) -> None:
        subprocess.run([*self._base, "kill-server"], capture_output=True, check=False)


@pytest.fixture
def tmux(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Tmux]:
    # Some shells export the size that the terminal had when they started.
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("LINES", "24")
    server = Tmux(tmp_path / "socket")
    yield server
    server.close()


def test_keys_resizing_and_leaving(tmux: Tmux) -> None:
    tmux.wait_for("● running", "▐1 Over▌")
    tmux.press("3")
    tmux.wait_for("▐3 Comm▌", "communication per step")
    tmux.run("resize-window", "-x", "130", "-y", "40")
    tmux.wait_for("▐3 Communication▌")
    tmux.press("/tensor")  # as from who types fast: no key is taken for a command
    tmux.wait_for("/ tensor", gone="broadcast")
    tmux.press("Escape")
    tmux.wait_for("broadcast")
    tmux.run("resize-window", "-x", "60", "-y", "15")
    screen = tmux.wait_for("▐3Comm▌")
    assert max(map(len, screen.splitlines())) <= 60
    tmux.press("q")
    deadline = time.monotonic() + WAIT_S
    while tmux.is_running():
        assert time.monotonic() < deadline
        time.sleep(0.1)
