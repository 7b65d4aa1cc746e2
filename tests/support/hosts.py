"""Two hosts for a test: network namespaces with names, addresses and a link between them."""

import contextlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

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

    def within(self, *command: str) -> list[str]:
        rename = f'hostname {self.name} && exec "$@"'
        inside = ["ip", "netns", "exec", self.namespace, "unshare", "--uts"]
        return [*inside, "sh", "-c", rename, "sh", *command]

    def top(self) -> dict:
        command = self.within(sys.executable, "-m", "boltmesh", "top", "--once", "--json")
        done = subprocess.run(
            command, env=self.environment, capture_output=True, text=True, check=False
        )
        return (
            json.loads(done.stdout) if done.returncode == 0 else {"ranks": [], "said": done.stderr}
        )


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
) -> Iterator[list[subprocess.Popen]]:
    """Start a script and its arguments under torchrun on each host; gives each host's torchrun."""
    processes = []
    try:
        for number, host in enumerate(hosts):
            torchrun = [
                sys.executable, "-m", "torch.distributed.run", "--nnodes=2",
                f"--node-rank={number}", f"--nproc-per-node={ranks_per_host}",
                f"--master-addr={hosts[0].address}", f"--master-port={PORT}",
                *map(str, script),
            ]  # fmt: skip
            with host.log.open("wb") as log:
                processes.append(
                    subprocess.Popen(
                        host.within(*torchrun),
                        env=host.environment,
                        stdout=log,
                        stderr=log,
                        start_new_session=True,
                    )
                )
        yield processes
    finally:
        for process in processes:
            kill_tree(process)


def kill_tree(process: subprocess.Popen) -> None:
    """Kill torchrun and its ranks, which have sessions of their own: the host loses its power."""
    with contextlib.suppress(psutil.Error):
        agent = psutil.Process(process.pid)
        for each in [*agent.children(recursive=True), agent]:
            with contextlib.suppress(psutil.Error):
                each.kill()
    process.wait()
