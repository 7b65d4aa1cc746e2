"""A job of torchrun over two hosts, which are network namespaces here: each shows all ranks."""

import contextlib
import json
import os
import shutil
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

pytestmark = [
    pytest.mark.ranks,
    pytest.mark.slow,
    pytest.mark.skipif(
        os.geteuid() != 0 or not shutil.which("ip") or not shutil.which("unshare"),
        reason="needs root, ip (Debian: iproute2) and unshare (util-linux)",
    ),
]

HOSTS = ("node-a", "node-b")
PORT = 29_500
SCRIPT = """
    import sys, time
    from pathlib import Path

    import torch
    from lightning.pytorch import LightningModule, Trainer
    from torch.utils.data import DataLoader

    import boltmesh


    class Slow(LightningModule):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(4, 1)

        def training_step(self, batch, index):
            time.sleep(0.02)
            # Agreed: a host that sees the file a step later would wait for one that has left.
            self.trainer.should_stop = self.trainer.strategy.reduce_boolean_decision(
                Path(sys.argv[1]).exists(), all=False
            )
            return self.layer(batch).mean()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), 0.01)


    data = DataLoader(torch.ones(100_000, 4), batch_size=4)
    trainer = Trainer(
        strategy="bolt_ddp", accelerator="cpu", devices=1, num_nodes=2, max_epochs=1,
        logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Slow(), data)
"""


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


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[list[Host]]:
    hosts = [Host(number, tmp_path) for number in range(2)]
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
def training(hosts: list[Host], script: Path, stop: Path) -> Iterator[list[subprocess.Popen]]:
    processes = []
    try:
        for number, host in enumerate(hosts):
            torchrun = [
                sys.executable, "-m", "torch.distributed.run", "--nnodes=2",
                f"--node-rank={number}", "--nproc-per-node=1",
                f"--master-addr={hosts[0].address}", f"--master-port={PORT}",
                str(script), str(stop),
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


def wait_for_ranks(host: Host, wanted: list[tuple], what: str) -> dict:
    deadline = time.monotonic() + 75
    while True:
        seen = host.top()
        found = [(rank["host"], rank["state"], rank["is_summary"]) for rank in seen["ranks"]]
        if found == wanted:
            return seen
        log = host.log.read_text()[-2000:]
        assert time.monotonic() < deadline, f"waited for {what}: {found} {seen.get('said')}\n{log}"
        time.sleep(0.3)


@pytest.mark.timeout(170)
def test_each_host_shows_all_ranks_of_the_job(hosts: list[Host], tmp_path: Path) -> None:
    script, stop = tmp_path / "train.py", tmp_path / "stop"
    script.write_text(textwrap.dedent(SCRIPT))
    with training(hosts, script, stop) as processes:
        for number, host in enumerate(hosts):
            wanted = [(name, "running", at != number) for at, name in enumerate(HOSTS)]
            seen = wait_for_ranks(host, wanted, f"both ranks on {host.name}")
            assert seen["state"] == "running"
            assert seen["world_size"] == 2
        before = seen["ranks"][0]["global_step"]
        assert before > 0
        while hosts[1].top()["ranks"][0]["global_step"] <= before:
            time.sleep(0.2)
        stop.touch()
        assert [process.wait(60) for process in processes] == [0, 0], hosts[0].log.read_text()
    seen = hosts[0].top()
    assert seen["state"] == "finished"
    assert seen["ranks"][0]["state"] == "finished"
    assert not [event for event in seen["events"] if event["kind"] in {"warning", "error"}]


@pytest.mark.timeout(170)
def test_a_host_that_loses_its_power_is_not_shown_as_running(
    hosts: list[Host], tmp_path: Path
) -> None:
    script, stop = tmp_path / "train.py", tmp_path / "stop"
    script.write_text(textwrap.dedent(SCRIPT))
    with training(hosts, script, stop) as processes:
        both = [("node-a", "running", False), ("node-b", "running", True)]
        wait_for_ranks(hosts[0], both, "both ranks")
        kill_tree(processes[1])
        ended = [("node-a", "failed", False), ("node-b", "missing", True)]
        seen = wait_for_ranks(hosts[0], ended, "the end of the job")
        assert seen["state"] == "failed"
        assert seen["ranks"][1]["error"] == (
            "node-b is not heard of since the ranks here have ended."
        )
        assert seen["ranks"][1]["global_step"] > 0
