"""Three axes over two hosts, which are network namespaces here, started by torchrun."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from boltmesh.strategies.checkpoint.manifest import find_fault
from tests.support import hosts_job
from tests.support.hosts import needs_namespaces, training, two_hosts
from tests.support.ranks import run_ranks

pytestmark = [
    pytest.mark.ranks,
    pytest.mark.slow(45),
    pytest.mark.full,
    needs_namespaces,
]

ROOT = Path(__file__).parents[2]


def alone(rank: int, world_size: int) -> dict[str, Any]:
    return hosts_job.train("auto", epochs=2, devices=1, num_nodes=1)


def test_each_axis_over_two_hosts_trains_as_one_process_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))
    with two_hosts(tmp_path) as hosts:
        script = hosts_job.__file__
        with training(hosts, script, tmp_path, ranks_per_host=2) as processes:
            ended = [process.wait(300) for process in processes]
        assert ended == [0, 0], "".join(host.log.read_text()[-3000:] for host in hosts)
    assert find_fault(tmp_path / hosts_job.SHARED) is None
    found = torch.load(tmp_path / "found.pt")
    (expected,) = run_ranks(alone, 1)
    steps = hosts_job.STEPS
    assert found["pipeline"]["losses"] == pytest.approx(expected["losses"][:steps], rel=1e-5)
    assert found["data"]["losses"] == pytest.approx(expected["losses"][steps:], rel=1e-5)
    assert found["tensor"]["losses"] == pytest.approx(expected["losses"][:steps], rel=1e-5)
    for name, each in expected["parameters"].items():
        # Adam divides by roots of tiny squares: rounding of a gradient shows in its step.
        torch.testing.assert_close(found["data"]["parameters"][name], each, rtol=1e-3, atol=1e-5)
    assert found["pipeline"]["said"] == found["data"]["said"] == []
    (said,) = found["tensor"]["said"]
    assert said.startswith("Rank placement: The tensor group {0, 1, 2, 3} crosses the hosts node-a")
    assert said.endswith("Use tensor=2, whose groups stay within a host.")
