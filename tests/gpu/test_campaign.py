"""The campaign for a GPU runs, as far as a CPU goes."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.gpu import campaign as campaign_module
from tests.gpu.campaign import (
    CASES,
    IN_BF16,
    PARTS,
    Campaign,
    compared,
    many_ranks,
    ratio,
    result_of,
    run_part,
    speed,
)
from tests.gpu.measure import num_graphs


@pytest.mark.full
@pytest.mark.slow(120)
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("number", range(1, len(PARTS) + 1))
def test_every_part_runs_dry(
    number: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = run_part(number, Campaign(tmp_path, is_dry=True))
    assert rows
    assert not [row for row in rows if "error" in row.found], rows
    if number <= 3:  # those of correctness
        assert all(row.is_met is not False for row in rows), rows
    written = json.loads((tmp_path / f"part-{number}.json").read_text(encoding="utf-8"))
    assert [each["name"] for each in written["rows"]] == [row.name for row in rows]
    assert rows[-1].name in capsys.readouterr().out


def test_ranks_on_one_gpu_are_hosts_of_their_own_to_nccl(tmp_path: Path) -> None:
    campaign = Campaign(tmp_path)
    first, second = (campaign.environment(rank, 2, 29000) for rank in range(2))
    assert first["NCCL_HOSTID"] != second["NCCL_HOSTID"]
    assert (second["RANK"], second["LOCAL_RANK"], second["WORLD_SIZE"]) == ("1", "1", "2")
    assert "NCCL_HOSTID" not in campaign.environment()


class Recorded(Campaign):
    """Records what would be measured."""

    def measure(self, name: str, arguments: Any, world_size: int = 1) -> dict[str, Any]:
        self.asked = [*getattr(self, "asked", []), (name, arguments, world_size)]
        return {"error": "NCCL"} if name == "smoke" else {"norms": [1.0], "traffic": {}}

    def prepare(self, count: int) -> None:
        """Start nothing."""


def test_where_nccl_refuses_ranks_use_gloo_and_pipelines_are_left_out(tmp_path: Path) -> None:
    campaign = Recorded(tmp_path)
    rows = {row.name: row for row in many_ranks(campaign)}
    assert [each[0] for each in campaign.asked].count("smoke") == 1
    assert {each[1]["backend"] for each in campaign.asked} == {"nccl", "gloo"}
    assert "left out" in rows["1f1b"].found["error"]
    assert rows["zero3"].is_met
    assert len(rows) == len(CASES) + len(IN_BF16) + 3


def test_parameters_that_differ_miss_the_goal(tmp_path: Path) -> None:
    class Different(Recorded):
        def measure(self, name: str, arguments: Any, world_size: int = 1) -> dict[str, Any]:
            return {
                "is_right": True, "norms": [1.0 + (world_size > 1) * 0.03], "traffic": {}
            }  # fmt: skip

    rows = list(many_ranks(Different(tmp_path)))
    assert not any(row.is_met for row in rows)


@pytest.mark.parametrize(
    ("name", "traffic", "is_met"),
    [
        ("zero3", {"data allgather": (400.0, 400.0)}, True),
        ("zero3, bf16", {"data allgather": (400.0, 200.0)}, False),  # a plan of fp32
        ("zero3", {"data allgather": (400.0, 400.0), "data broadcast": (0.0, 8.0)}, False),
        ("zero3", None, False),
    ],
)
def test_bytes_that_are_not_those_expected_miss_the_goal(
    name: str, traffic: Any, is_met: bool
) -> None:
    row = compared(name, {"norms": [1.0], "traffic": traffic}, {"norms": [1.0]}, 1.0)
    assert row.is_met == is_met


def test_what_has_no_time_left_is_said_to_be_left_out(tmp_path: Path) -> None:
    assert "left out" in Campaign(tmp_path).measure("fit", {})["error"]


def test_results_and_errors_of_a_measurement_are_read() -> None:
    assert result_of('noise\n{"step_s": 1.5}\n', "", 0) == {"step_s": 1.5}
    assert result_of("", "Traceback\nValueError: no\n\n", 1) == {
        "error": "exit code 1: ValueError: no"
    }


def test_a_ratio_has_a_goal() -> None:
    assert ratio("one", {"a": 1.01, "b": 1.0}, "a", "b", 1.02).is_met
    assert not ratio("one", {"a": 1.03, "b": 1.0}, "a", "b", 1.02).is_met
    assert ratio("one", {"a": None, "b": 1.0}, "a", "b", 1.02).found == {"error": "not measured"}


def test_no_part_is_longer_than_nine_minutes() -> None:
    assert campaign_module.PART_S <= 540.0


class Measured(Campaign):
    """Finds what it is given for compiled blocks."""

    compiled: dict[str, Any]

    def measure(self, name: str, arguments: Any, world_size: int = 1) -> dict[str, Any]:
        is_compiled = arguments.get("strategy", {}).get("compile_blocks")
        return {"step_s": 1.0, **(self.compiled if is_compiled else {})}

    def prepare(self, count: int) -> None:
        """Start nothing."""


@pytest.mark.parametrize(("graphs", "is_met"), [(0, True), (1, False)])
def test_blocks_that_are_compiled_again_miss_the_goal(
    graphs: int, is_met: bool, tmp_path: Path
) -> None:
    campaign = Measured(tmp_path)
    campaign.compiled = {"graphs_after_step_3": graphs}
    rows = {row.name: row for row in speed(campaign)}
    assert rows["compiled again after step 3"].is_met == is_met


def test_graphs_are_counted_by_step(monkeypatch: pytest.MonkeyPatch) -> None:
    stats = {"stats": {"unique_graphs": 3}}
    monkeypatch.setitem(sys.modules, "torch._dynamo.utils", SimpleNamespace(counters=stats))
    assert num_graphs() == 3
    monkeypatch.delitem(sys.modules, "torch._dynamo.utils")
    assert num_graphs() == 0


@pytest.mark.parametrize(("mib", "code"), [(1, 0), (65, 1)])
def test_a_bundle_of_more_than_64_mib_is_refused(mib: int, code: int, tmp_path: Path) -> None:
    makefile = Path(__file__).parents[2].joinpath("Makefile").read_text("utf-8")
    rule = makefile.split("\ngpu-bundle:")[1].split("\n\n")[0]
    [check] = [line for line in rule.splitlines() if "du " in line]
    folder = tmp_path / ".gpu" / "wheels"
    folder.mkdir(parents=True)
    with (folder / "torchao.whl").open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, mib << 20)
    command = check.strip().removeprefix("@").replace("$$", "$")
    assert subprocess.run(["sh", "-c", command], cwd=tmp_path, check=False).returncode == code
