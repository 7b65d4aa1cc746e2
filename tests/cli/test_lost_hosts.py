"""A host of a job is lost with its ranks and its memory: the run goes on from the other's copy."""

import os
import re
import socket
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cli.test_run_ranks import fit, metrics
from tests.support.agents import Agent
from tests.support.forked_python import BOLTMESH, ForkedPython

EVERY = 4


@pytest.mark.full
@pytest.mark.ranks
@pytest.mark.slow(90)
@pytest.mark.parametrize("strategy", ["bolt_zero2", "bolt_ddp"])
def test_a_lost_host_costs_at_most_so_many_steps_and_no_bit(tmp_path: Path, strategy: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = fit(
        "devices=2", "trainer.num_nodes=2", f"strategy={strategy}", "max_epochs=1", "resume=auto",
        "data.init_args.samples=480", "strategy.timeout_s=30", "checkpoint.every_n_epochs=1",
        "model.init_args.step_s=0.3", f"strategy.checkpoint_in_memory_every={EVERY}",
    )  # fmt: skip
    first, second = (Agent(host, command, tmp_path, port=port) for host in range(2))
    try:
        _wait(lambda: max(second.copies(), default=0) >= 8, first)
        second.lose()
        reached = 1 + max(map(int, metrics(tmp_path / "runs/tiny/0")))  # rows count from 0
        second = Agent(1, command, tmp_path, port=port)
        assert first.process.wait(timeout=150) == 0, first.said()[-3000:]
        assert second.process.wait(timeout=60) == 0
    finally:
        first.end()
        second.end()
    said = first.said() + second.said()
    (step,) = {int(each) for each in re.findall(r"from memory of the hosts, step=(\d+)", said)}
    assert reached - EVERY <= step
    straight = tmp_path / "straight"
    straight.mkdir()
    alone = fit(
        "devices=4", f"strategy={strategy}", "max_epochs=1", "data.init_args.samples=480",
        "checkpoint.every_n_epochs=1",
    )  # fmt: skip
    environment = {**os.environ, "PYTHONWARNINGS": "ignore", "OMP_NUM_THREADS": "1"}
    undisturbed = ForkedPython(*BOLTMESH, *alone, env=environment, cwd=straight)
    undisturbed.communicate(timeout=100)
    assert undisturbed.returncode == 0
    found, expected = (metrics(each / "runs/tiny/0") for each in (tmp_path, straight))
    assert found.keys() == expected.keys()
    for row, values in expected.items():
        if strategy == "bolt_ddp":  # torch's DDP arranges buckets, and so sums, again
            loss = float(values["train_loss"])
            assert float(found[row]["train_loss"]) == pytest.approx(loss, rel=1e-5)
        else:
            assert found[row] == values
    assert not list(tmp_path.glob("memory-*/*/*")), "the memory is freed at the end"


def _wait(condition: Callable[[], bool], agent: Agent) -> None:
    until = time.monotonic() + 120
    while not condition():
        assert agent.process.poll() is None, agent.said()[-3000:]
        assert time.monotonic() < until, agent.said()[-3000:]
        time.sleep(0.05)
