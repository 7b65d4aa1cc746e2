"""Two hosts for a test: network namespaces with names, addresses and a link between them.

``python -m tests.support.hosts NAMESPACE NAME ARGUMENTS`` enters a host and is ``python ARGUMENTS``
from then on.
"""

import contextlib
import ctypes
import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.support.forked_python import BOLTMESH, ForkedPython, become_python

CLONE_NEWUTS, CLONE_NEWNET = 0x04000000, 0x40000000  # of sched.h; in os from Python 3.12 on
needs_namespaces = pytest.mark.skipif(
    os.geteuid() != 0 or not shutil.which("ip") or not shutil.which("unshare"),
    reason="needs root, ip (Debian: iproute2) and unshare (util-linux)",
)

HOSTS = ("node-a", "node-b")
PORT = 29_500


def run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"needs the right to make network namespaces: {done.stderr.strip()}")


class Host:
    """A namespace with a host name, an address and a run directory of its own."""

    def __init__(self, number: int, folder: Path) -> None:
        self.name = HOSTS[number]
        self.namespace = f"boltmesh-{os.getpid()}-{number}"
        self.link = f"bm{os.getpid() % 100_000}-{number}"
        self.address = f"10.213.77.{number + 1}"
        self.log = folder / f"{self.name}.log"
        self.environment = {
            **os.environ,
            "BOLTMESH_RUN_DIR": str(folder / f"run-{self.name}"),
            "GLOO_SOCKET_IFNAME": self.link,
            "OMP_NUM_THREADS": "1",
        }

    def start(self, *arguments: str, log: Any = None) -> ForkedPython:
        """Start ``python ARGUMENTS`` on this host; it writes to a file if one is given."""
        return ForkedPython(
            *("-m", __name__, self.namespace, self.name, *arguments),
            env=self.environment,
            stdout=log,
            stderr=log,
        )

    def top(self) -> dict:
        process = self.start(*BOLTMESH, "top", "--once", "--json")
        out, error = process.communicate(60)
        return json.loads(out) if process.returncode == 0 else {"ranks": [], "said": error}


@contextlib.contextmanager
def two_hosts(folder: Path) -> Iterator[list[Host]]:
    """Make them for as long as the block lasts; skip the test where that is not permitted."""
    hosts = [Host(number, folder) for number in range(2)]
    with contextlib.ExitStack() as stack:
        for host in hosts:
            run("ip", "netns", "add", host.namespace)
            stack.callback(subprocess.run, ["ip", "netns", "delete", host.namespace], check=True)
        run(
            "ip", "link", "add", hosts[0].link, "netns", hosts[0].namespace, "type", "veth",
            "peer", "name", hosts[1].link, "netns", hosts[1].namespace,
        )  # fmt: skip
        for host in hosts:
            run(
                "ip", "-n", host.namespace, "address", "add", f"{host.address}/24", "dev", host.link
            )
            for link in ("lo", host.link):
                run("ip", "-n", host.namespace, "link", "set", link, "up")
        yield hosts


@contextlib.contextmanager
def training(
    hosts: list[Host], *script: str | Path, ranks_per_host: int = 1
) -> Iterator[list[ForkedPython]]:
    """Start a script and its arguments under torchrun on each host; gives each host's torchrun."""
    processes: list[ForkedPython] = []
    try:
        for number, host in enumerate(hosts):
            torchrun = [
                "-m", "torch.distributed.run", "--nnodes=2",
                f"--node-rank={number}", f"--nproc-per-node={ranks_per_host}",
                f"--master-addr={hosts[0].address}", f"--master-port={PORT}",
                *map(str, script),
            ]  # fmt: skip
            with host.log.open("wb") as log:
                processes.append(host.start(*torchrun, log=log))
        yield processes
    finally:
        for process in processes:
            kill_tree(process)


def kill_tree(process: ForkedPython) -> None:
    """Kill torchrun and its ranks, which have sessions of their own: the host loses its power."""
    with contextlib.suppress(psutil.Error):
        agent = psutil.Process(process.pid)
        for each in [*agent.children(recursive=True), agent]:
            with contextlib.suppress(psutil.Error):
                each.kill()
    process.wait()


def enter(namespace: str, name: str) -> None:
    """Move this process, which has one thread, into a host."""
    system = ctypes.CDLL(None, use_errno=True)
    with Path("/run/netns", namespace).open() as entry:
        if system.setns(entry.fileno(), CLONE_NEWNET) or system.unshare(CLONE_NEWUTS):
            raise OSError(ctypes.get_errno(), f"cannot enter {namespace}")
    socket.sethostname(name)


if __name__ == "__main__":
    enter(*sys.argv[1:3])
    become_python(sys.argv[3:], os.environ, sys.executable)
