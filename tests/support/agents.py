"""Hosts of a test: torchrun agents of one machine, each with a memory of its own."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import psutil

from boltmesh.strategies.checkpoint import host_memory

ROOT = Path(__file__).parents[2]


class Agent:
    """One torchrun of a job, and its ranks.

    Args:
        host: Number of the host; the first one has the store through which they meet.
        command: Of a rank, behind ``python -m boltmesh``.
        folder: Where it runs.
        port: Of the store.
        num_ranks: Ranks of each host.
        num_hosts: Hosts of the job.
        max_restarts: torchrun's.
    """

    def __init__(
        self,
        host: int,
        command: Sequence[str],
        folder: Path,
        *,
        port: int,
        num_ranks: int = 2,
        num_hosts: int = 2,
        max_restarts: int = 100,
    ) -> None:
        self.memory = folder / f"memory-{host}"
        self.memory.mkdir(exist_ok=True)
        self._log = folder / f"host-{host}.log"
        line = [
            sys.executable, "-m", "torch.distributed.run", f"--nnodes={num_hosts}",
            f"--nproc-per-node={num_ranks}", f"--max-restarts={max_restarts}",
            "--rdzv-backend=c10d", "--rdzv-id=job", f"--rdzv-endpoint=127.0.0.1:{port}",
            f"--rdzv-conf=is_host={int(host == 0)}", "-m", "boltmesh", *command,
        ]  # fmt: skip
        environment = {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "PYTHONWARNINGS": "ignore",
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
            host_memory.DIR_VARIABLE: str(self.memory),
        }
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(
                line, cwd=folder, env=environment, stdout=log, stderr=subprocess.STDOUT
            )

    def said(self) -> str:
        """Return what all starts of this host have printed."""
        return self._log.read_text(errors="replace")

    def ranks(self) -> list[int]:
        """Return the process ids of its ranks."""
        try:
            return [each.pid for each in psutil.Process(self.process.pid).children()]
        except psutil.NoSuchProcess:
            return []

    def copies(self) -> set[int]:
        """Return the steps of which this host has the parts of both."""
        folders = self.memory.glob("boltmesh-*/*")
        return {step for each in folders for step in host_memory.steps_in(each)}

    def lose(self) -> None:
        """Kill the agent with its ranks, and forget what the host has in memory."""
        pids = [*self.ranks(), self.process.pid]
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()
        for each in self.memory.iterdir():
            shutil.rmtree(each)

    def end(self) -> None:
        """Kill what is left of it."""
        if self.process.poll() is None:
            self.lose()
