"""A new axis is an entry in ``AXES`` and a class: everything else shows it without an edit."""

import csv
import functools
import io
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.ranks, pytest.mark.slow(30)]

ROOT = Path(__file__).parents[2]
Written = Callable[[str], dict[str, Any]]


@pytest.fixture(scope="module")
def echo(tmp_path_factory: pytest.TempPathFactory) -> Written:
    """What processes write in which ``tests/support/echo_axis.py`` has added a toy axis."""

    @functools.cache
    def written(part: str) -> dict[str, Any]:
        folder = tmp_path_factory.mktemp(part)
        variables = {"BOLTMESH_RUN_DIR": str(folder / "run"), "PYTHONPATH": str(ROOT)}
        command = [sys.executable, "-m", "tests.support.echo_axis", part, str(folder / "echo.json")]
        done = subprocess.run(
            command,
            cwd=ROOT,
            env={**os.environ, **variables},
            capture_output=True,
            text=True,
            timeout=600,
        )
        assert done.returncode == 0, done.stderr
        found: dict[str, Any] = json.loads((folder / "echo.json").read_text())
        return found

    return written


PARTS = ["demo", pytest.param("run", marks=pytest.mark.full)]


def row_of(table: str, axis: str) -> list[str]:
    """The cells of the line of a printed table that begins with the axis."""
    return next(line.split() for line in table.splitlines() if line.split()[:1] == [axis])


def test_a_plan_has_a_line_for_it(echo: Written) -> None:
    found = echo("demo")
    assert "pipeline=2 x data=1 x echo=2 x tensor=2, ZeRO-1" in found["plan"]
    assert row_of(found["plan"], "echo") == ["echo", "2", "4", "ranks", "0", "2"]
    assert row_of(found["plan of one"], "echo") == ["echo", "1", "8", "ranks", "0"]
    assert "  echo " not in found["plan"].partition("between ranks")[2]  # it states no bytes


@pytest.mark.parametrize("part", PARTS)
def test_the_page_of_the_mesh_shows_it(echo: Written, part: str) -> None:
    found = echo(part)
    assert found["mesh"]["echo"] == 2
    assert row_of(found["page"], "echo")[:2] == ["echo", "2"]
    assert "echo 2" in found["page"].splitlines()[0]
    if part == "demo":
        for place in ("echo 0", "echo 1"):
            assert f"·· {place} " in found["page"]


@pytest.mark.parametrize("part", PARTS)
def test_exports_have_a_column_and_a_label_for_it(echo: Written, part: str) -> None:
    found = echo(part)
    rows = list(csv.DictReader(io.StringIO(found["ranks"]), strict=True))
    assert list(rows[0])[3:8] == ["pipeline", "data", "context", "echo", "tensor"]
    assert {row["echo"] for row in rows} == {"0", "1"}
    (info,) = [line for line in found["prometheus"].splitlines() if 'echo="2"' in line]
    assert info.startswith("boltmesh_job_info{")


@pytest.mark.full
def test_its_ranks_train_as_one_process_does(echo: Written) -> None:
    run = echo("run")
    assert run["is_equal"]
    assert [place["echo"] for place in run["coordinates"]] == [0, 1]
    assert run["expected"] == []
