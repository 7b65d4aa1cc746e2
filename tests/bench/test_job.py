"""What a strategy's job is started with."""

import os
import subprocess
import sys
from typing import Any

from boltmesh.bench import job
from boltmesh.bench.variant import parse_variants
from boltmesh.launch.supervisor import Supervisor


def test_peer_to_peer_is_switched_off_in_the_processes_of_its_row_alone(monkeypatch) -> None:
    monkeypatch.delenv("NCCL_P2P_DISABLE", raising=False)
    started: list[dict[str, str]] = []
    script = "import os, sys; sys.stderr.write('boltmesh: ' + os.getenv('NCCL_P2P_DISABLE', '0'))"

    def start(
        arguments: Any, environment: dict[str, str], stderr: int, watch: Any, host_bytes: int | None
    ) -> int:
        started.append(environment)
        command = [sys.executable, "-c", f"{script}; sys.exit(1)"]
        return subprocess.run(command, env=environment, stderr=stderr).returncode

    monkeypatch.setattr(job, "_watched", start)
    plain, without = parse_variants("bolt_ddp,bolt_ddp:no_p2p")
    found = [job.run_variant(each, "c", [], steps=1, warmup=0).reason for each in (plain, without)]
    assert found == ["0", "1"]
    assert [each.get("NCCL_P2P_DISABLE") for each in started] == [None, "1"]
    assert "NCCL_P2P_DISABLE" not in os.environ


def test_ranks_of_a_job_get_what_their_job_was_started_with(monkeypatch) -> None:
    monkeypatch.setenv("NCCL_P2P_DISABLE", "1")
    supervisor = Supervisor(["fit", "c"], num_ranks=2, job_id="j", wants_traceback=False)
    assert supervisor._environment(1)["NCCL_P2P_DISABLE"] == "1"
