"""The campaign for a GPU runs, as far as a CPU goes."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.gpu import campaign as campaign_module
from tests.gpu.campaign import CASES, PARTS, Campaign, many_ranks, ratio, result_of, run_part


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
        return {"error": "NCCL"} if name == "smoke" else {"norms": [1.0]}

    def prepare(self, count: int) -> None:
        """Start nothing."""


def test_where_nccl_refuses_ranks_use_gloo_and_pipelines_are_left_out(tmp_path: Path) -> None:
    campaign = Recorded(tmp_path)
    rows = {row.name: row for row in many_ranks(campaign)}
    assert [each[0] for each in campaign.asked].count("smoke") == 1
    assert {each[1]["backend"] for each in campaign.asked} == {"nccl", "gloo"}
    assert "left out" in rows["1f1b"].found["error"]
    assert rows["zero3"].is_met
    assert len(rows) == len(CASES) + 2


def test_parameters_that_differ_miss_the_goal(tmp_path: Path) -> None:
    class Different(Recorded):
        def measure(self, name: str, arguments: Any, world_size: int = 1) -> dict[str, Any]:
            return {"is_right": True, "norms": [1.0 + (world_size > 1) * 0.01]}

    rows = list(many_ranks(Different(tmp_path)))
    assert not any(row.is_met for row in rows)


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
