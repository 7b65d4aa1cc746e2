"""A job of torchrun over two hosts, which are network namespaces here: each shows all ranks."""

import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.hosts import HOSTS, Host, kill_tree, needs_namespaces, training, two_hosts

pytestmark = [
    pytest.mark.ranks,
    pytest.mark.slow,
    needs_namespaces,
]

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


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[list[Host]]:
    with two_hosts(tmp_path) as hosts:
        yield hosts


def wait_for_ranks(host: Host, wanted: list[tuple], what: str) -> dict:
    deadline = time.monotonic() + 300
    while True:
        seen = host.top()
        found = [(rank["host"], rank["state"], rank["is_summary"]) for rank in seen["ranks"]]
        if found == wanted and all(rank["global_step"] > 0 for rank in seen["ranks"]):
            return seen
        log = host.log.read_text()[-2000:]
        assert time.monotonic() < deadline, f"waited for {what}: {found} {seen.get('said')}\n{log}"
        time.sleep(0.3)


@pytest.mark.full
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
        while hosts[1].top()["ranks"][0]["global_step"] <= before:
            time.sleep(0.2)
        stop.touch()
        assert [process.wait(60) for process in processes] == [0, 0], hosts[0].log.read_text()
    seen = hosts[0].top()
    assert seen["state"] == "finished"
    assert seen["ranks"][0]["state"] == "finished"
    assert not [event for event in seen["events"] if event["kind"] in {"warning", "error"}]


@pytest.mark.full
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
