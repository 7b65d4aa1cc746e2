"""A new axis is an entry in ``AXES`` and a class: everything else shows it without an edit."""

import csv
import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.ranks, pytest.mark.slow(30)]

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def echo(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What a process prints in which ``tests/support/echo_axis.py`` has added a toy axis."""
    folder = tmp_path_factory.mktemp("echo")
    environment = {**os.environ, "BOLTMESH_RUN_DIR": str(folder / "run"), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "tests.support.echo_axis", str(folder)]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads((folder / "echo.json").read_text())
    return found


def row_of(table: str, axis: str) -> list[str]:
    """The cells of the line of a printed table that begins with the axis."""
    return next(line.split() for line in table.splitlines() if line.split()[:1] == [axis])


@pytest.mark.full
def test_a_plan_has_a_line_for_it(echo: dict[str, Any]) -> None:
    assert "pipeline=2 x data=1 x echo=2 x tensor=2, ZeRO-1" in echo["plan"]
    assert row_of(echo["plan"], "echo") == ["echo", "2", "4", "ranks", "0", "2"]
    assert row_of(echo["plan of one"], "echo") == ["echo", "1", "8", "ranks", "0"]
    assert "  echo " not in echo["plan"].partition("between ranks")[2]  # it states no bytes


@pytest.mark.full
@pytest.mark.parametrize("source", ["demo", "run"])
def test_the_page_of_the_mesh_shows_it(echo: dict[str, Any], source: str) -> None:
    found = echo[source]
    assert found["mesh"]["echo"] == 2
    assert row_of(found["page"], "echo")[:2] == ["echo", "2"]
    assert "echo 2" in found["page"].splitlines()[0]
    if source == "demo":
        for place in ("echo 0", "echo 1"):
            assert f"·· {place} " in found["page"]


@pytest.mark.full
@pytest.mark.parametrize("source", ["demo", "run"])
def test_exports_have_a_column_and_a_label_for_it(echo: dict[str, Any], source: str) -> None:
    found = echo[source]
    rows = list(csv.DictReader(io.StringIO(found["ranks"]), strict=True))
    assert list(rows[0])[3:7] == ["pipeline", "data", "echo", "tensor"]
    assert {row["echo"] for row in rows} == {"0", "1"}
    (info,) = [line for line in found["prometheus"].splitlines() if 'echo="2"' in line]
    assert info.startswith("boltmesh_job_info{")


@pytest.mark.full
def test_its_ranks_train_as_one_process_does(echo: dict[str, Any]) -> None:
    run = echo["run"]
    assert run["is_equal"]
    assert [place["echo"] for place in run["coordinates"]] == [0, 1]
    assert run["expected"] == []
