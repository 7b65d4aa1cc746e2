"""``boltmesh bench`` as a user runs it."""

import csv
from pathlib import Path
from typing import Any

import pytest

from boltmesh.bench import command
from boltmesh.bench.job import Ended
from boltmesh.cli import run_command
from tests.bench.test_measurement import ran
from tests.cli.conftest import TINY
from tests.support.forked_python import BOLTMESH, run_python

LINE = ["bench", str(TINY), "--strategies"]


@pytest.mark.ranks
def test_strategies_are_run_measured_and_written(workplace: Path) -> None:
    strategies = "one_process,bolt_ddp:no_p2p,one_process+model.init_args.fail_at=2"
    failing = "model.init_args.failing_rank=0"
    options = ["--steps", "3", "--warmup", "1", "--output", "table.md"]
    done = run_python(*BOLTMESH, *LINE, strategies, failing, *options)
    assert done.returncode == 0, done.stderr
    assert "boltmesh bench: one_process\n" in done.stderr
    assert "written: table.md\nwritten: table.csv\n" in done.stdout
    with Path("table.csv").open() as file:
        one, no_p2p, failed = csv.DictReader(file)
    assert int(one["steps"]) == 3
    assert 0 < float(one["step_s_lower_quartile"]) <= float(one["step_s_median"]) < 60
    assert float(one["samples_per_s"]) > 0
    assert int(one["optimizer_bytes_host"]) > 0
    assert int(one["resident_bytes"]) > 50_000_000
    assert 0 < float(one["loss"]) < 100
    assert one["note"] == ""
    assert "the ranks are on the CPU" in no_p2p["note"]
    assert no_p2p["is_refused"] == "True"
    assert failed["steps"] == "0"
    assert failed["note"].startswith("failed: ")
    assert "planted: this batch is bad" in failed["note"]
    assert "4 on the same data" not in Path("table.md").read_text()
    # Nothing but the tables and the telemetry is left in the folder.
    assert {each.name for each in Path().iterdir()} == {"table.md", "table.csv", "telemetry"}


def test_rounds_alternate_and_an_interrupted_table_is_written(
    workplace: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []

    def run(variant: Any, config: str, line: Any, *, steps: int, warmup: int) -> Ended:
        order.append(variant.label)
        if len(order) == 6:
            raise KeyboardInterrupt
        return ran(2.0)

    monkeypatch.setattr(command, "run_variant", run)
    options = ["--rounds", "3", "--output", "table"]
    assert run_command([*LINE, "bolt_zero1,bolt_zero2", *options]) == 130
    assert order == ["bolt_zero1", "bolt_zero2", "bolt_zero2", "bolt_zero1", "bolt_zero1",
                     "bolt_zero2"]  # fmt: skip
    with Path("table.csv").open() as file:
        assert [each["jobs"] for each in csv.DictReader(file)] == ["3", "2"]
    assert "round 3 of 3" in capsys.readouterr().err


def test_when_nothing_runs_the_command_has_failed(
    workplace: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "run_variant", lambda *_, **__: Ended(None, "no"))
    assert run_command([*LINE, "bolt_ddp,replicated"]) == 1
    shown = capsys.readouterr().out
    assert "bolt_ddp: failed: no" in shown
    assert "replicated: not possible here" in shown


def test_what_cannot_be_compared_is_refused_in_one_line(
    workplace: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for line, words in [
        ([*LINE, "bolt_dpp"], "Did you mean bolt_ddp?"),
        ([*LINE, "bolt_ddp", "trainer.max_stps=1"], "max_stps"),
        ([*LINE, "bolt_ddp", "--output", "none/table"], "none is no folder"),
        (["bench", "nowhere.yaml", "--strategies", "bolt_ddp"], "nowhere.yaml"),
        (["bench", str(TINY)], "--strategies"),
    ]:
        assert run_command(line) == 2
        shown = capsys.readouterr()
        assert words in shown.err
        assert shown.err.count("\n") == 1
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_PORT": "1",
                        "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1",
                        "TORCHELASTIC_RUN_ID": "1", "GROUP_RANK": "0"}.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    assert run_command([*LINE, "bolt_ddp"]) == 2
    assert "starts the ranks of each strategy itself" in capsys.readouterr().err
