"""A real sshd of this user on the loopback, with keys of its own, and a config to reach it."""

import contextlib
import getpass
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import psutil
import pytest

SSHD = shutil.which("sshd", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")
PRIVILEGE_SEPARATION = Path("/run/sshd")
"""Root's sshd wants this folder; its package makes it when the service starts.

Who finds none makes it, and nobody removes it, for other workers of pytest-xdist run an sshd, too.
"""

needs_sshd = pytest.mark.skipif(
    SSHD is None or shutil.which("ssh") is None or shutil.which("ssh-keygen") is None,
    reason="needs sshd and ssh (Debian: openssh-server, openssh-client)",
)


class Sshd:
    """The server; ``Host node`` of the config leads to it.

    Args:
        folder: For keys, configs and logs.
        environment: What its sessions find in theirs. Their home is an empty folder, unless it is
            named here: a shell that is killed in the real one's ``.bashrc`` can leave locks there
            that later logins wait for.
    """

    def __init__(self, folder: Path, environment: Mapping[str, str]) -> None:
        folder.mkdir(mode=0o700)
        self.folder = folder
        self.config = folder / "config"
        self.log = folder / "sshd.log"
        for name in ("host", "user", "stranger"):
            _make_key(folder / name)
        (folder / "authorized_keys").write_text((folder / "user.pub").read_text())
        self.port = 0
        self.know((folder / "host.pub").read_text())
        home = folder / "home"
        home.mkdir()
        found = {"HOME": str(home)} | dict(environment)
        words = " ".join(f'"{name}={value}"' for name, value in found.items())
        (folder / "sshd_config").write_text(
            "ListenAddress 127.0.0.1\n"
            f"HostKey {folder}/host\n"
            f"AuthorizedKeysFile {folder}/authorized_keys\n"
            f"PidFile {folder}/pid\n"
            "UsePAM no\n"
            "StrictModes no\n"
            "PasswordAuthentication no\n"
            "KbdInteractiveAuthentication no\n"
            "PermitRootLogin yes\n"
            "LogLevel VERBOSE\n"
            f"SetEnv {words}\n"
        )
        self._process: subprocess.Popen[bytes] | None = None

    def know(self, key: str) -> None:
        """Make ``key`` the one that the user knows of the host."""
        (self.folder / "known_hosts").write_text(f"node {key}")

    def write_config(self, *, key: str = "user", host: str = "127.0.0.1", more: str = "") -> None:
        """Write what the user has in ``~/.ssh/config``, whole for an ssh that starts meanwhile."""
        written = self.config.with_suffix(".new")
        written.write_text(
            "Host node node1 node2\n"
            f"  HostName {host}\n"
            f"  Port {self.port}\n"
            f"  User {getpass.getuser()}\n"
            f"  IdentityFile {self.folder}/{key}\n"
            "  IdentitiesOnly yes\n"
            "  IdentityAgent none\n"
            "  HostKeyAlias node\n"
            f"  UserKnownHostsFile {self.folder}/known_hosts\n"
            "  GlobalKnownHostsFile /dev/null\n"
            f"{more}"
        )
        written.replace(self.config)

    def start(self) -> None:
        """Listen on a port that nobody else has taken meanwhile, and tell the user of it."""
        while not self._listens():
            log = self.log.read_text()
            assert "Address already in use" in log, log
            self.log.unlink()
        self.write_config()

    def _listens(self) -> bool:
        assert SSHD is not None
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        command = [SSHD, "-D", "-E", str(self.log), "-f", f"{self.folder}/sshd_config"]
        self._process = subprocess.Popen([*command, "-p", str(self.port)])
        deadline = time.monotonic() + 300
        while "Server listening" not in (self.log.read_text() if self.log.exists() else ""):
            if self._process.poll() is not None:
                return False
            assert time.monotonic() < deadline, "sshd does not listen"
            time.sleep(0.02)
        return True

    def sessions(self) -> list[psutil.Process]:
        """Return the processes that serve who is logged in."""
        assert self._process is not None
        return psutil.Process(self._process.pid).children(recursive=True)

    def cut(self) -> None:
        """End all sessions as a cable that is pulled: nobody says goodbye."""
        kill(self.sessions())

    def stop(self) -> None:
        """Listen no more, and end all sessions."""
        assert self._process is not None
        sessions = self.sessions()
        self._process.kill()
        self._process.wait()
        kill(sessions)


def kill(processes: Sequence[psutil.Process]) -> None:
    """Kill processes, and return when they do nothing any more."""
    for process in processes:
        with contextlib.suppress(psutil.Error):
            process.kill()
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            while process.status() != psutil.STATUS_ZOMBIE:  # until somebody asks for its exit code
                time.sleep(0.01)


@contextlib.contextmanager
def running_sshd(folder: Path, run_dir: Path, **environment: str) -> Iterator[Sshd]:
    """Run an sshd whose sessions find boltmesh in the PATH and jobs in ``run_dir``."""
    venv = Path(sys.executable).parent
    if os.geteuid() == 0:
        PRIVILEGE_SEPARATION.mkdir(mode=0o755, exist_ok=True)
    found = {"PATH": f"{venv}:/usr/bin:/bin", "BOLTMESH_RUN_DIR": str(run_dir)}
    if "PYTHONPATH" in os.environ:  # the boltmesh that is tested
        found["PYTHONPATH"] = os.environ["PYTHONPATH"]
    sshd = Sshd(folder, found | environment)
    sshd.start()
    try:
        yield sshd
    finally:
        sshd.stop()


def _make_key(path: Path) -> None:
    command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(path)]
    subprocess.run(command, check=True)
