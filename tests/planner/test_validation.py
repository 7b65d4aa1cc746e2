"""The errors of the planner on published runs, a little looser than they were measured."""

import csv
import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.planner.rows import ROWS
from tests.planner.validate import validate


@pytest.fixture(scope="module")
def result():
    return validate(ROWS, None)


def test_times_of_sources_that_the_rates_never_saw(result):
    found = result["left_out"]
    assert found["rows"] == 456
    assert found["median"] < 0.09
    assert found["p90"] < 0.19
    medians = {name: each["median"] for name, each in found["sources"].items()}
    assert max(medians.values()) < 0.21


def test_layouts_are_ordered(result):
    found = result["left_out"]
    assert found["pairs"] > 0.84
    assert found["top3_loss"] < 0.02


def test_memory(result):
    assert result["left_out"]["memory_median"] < 0.08
    counts = result["memory_filter"]
    assert counts["failed_rejected"] >= 6
    assert counts["fitted_rejected"] <= 0.08 * counts["fitted"]


def test_rates_that_the_runs_do_not_identify_are_named(result):
    assert set(result["at_bound"]) <= {
        "matmul", "elementwise", "network", "onload_network", "straggler"
    }  # fmt: skip


def test_rows_of_another_file_are_predicted(tmp_path: Path):
    with ROWS.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    unseen = [{**row, "source": "somebody else"} for row in rows if "torchtitan" in row["source"]]
    unseen.append({**unseen[0], "gpu": "abacus"})
    target = tmp_path / "rows.csv"
    with target.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, unseen[0].keys())
        writer.writeheader()
        writer.writerows(unseen)
    command = [sys.executable, "-m", "tests.planner.validate", "--predict", str(target), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found = json.loads(done.stdout)
    assert found["predicted"]["rows"] == 18
    assert found["predicted"]["skipped"] == 1
    assert list(found["predicted"]["sources"]) == ["somebody else"]
    assert found["calibrated"]["rows"] == 16
    assert found["calibrated"]["median"] < found["predicted"]["median"] + 0.05
