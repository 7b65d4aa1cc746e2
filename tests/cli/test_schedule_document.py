"""docs/pipeline_schedules.md: its picture is what the command draws, its numbers are simulated."""

import itertools
import re

import pytest

from boltmesh import cli
from boltmesh.strategies.pipeline.schedules import registry
from boltmesh.strategies.pipeline.schedules.registry import (
    schedule_table,
    schedules,
    simulate_ideal,
)
from tests.cli.conftest import ROOT

PAGE = (ROOT / "docs" / "pipeline_schedules.md").read_text(encoding="utf-8")
ROWS = {
    cells[1].strip(" `"): [cell.strip() for cell in cells[2:-1]]
    for line in PAGE.splitlines()
    if line.startswith("| `")
    for cells in [line.split("|")]
}
EXAMPLE = {"p": 4, "m": 8, "v": 2}


def formula(text: str, **sizes: int) -> float:
    """What stands before the last parentheses, as a number."""
    body = re.sub(r" \([\d.%]+\)$", "", text)
    body = re.sub(r"(?<=[0-9a-z])(?=[a-z(])", "*", body)
    return eval(body, {"__builtins__": {}}, sizes)


def example(text: str) -> str:
    return re.findall(r" \(([\d.%]+)\)$", text)[0]


def test_every_row_is_a_schedule_and_has_a_source():
    sources = PAGE.split("## Sources")[1]
    assert len(ROWS) >= 8
    for name in ROWS:
        for address in re.findall(r"https://\S+[^,\s]", schedules()[name].source):
            assert f"<{address}>" in sources


@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize("ranks", [2, 3, 4, 6])
def test_the_formulas_are_what_is_simulated(name, ranks):
    bubble, kept, boundaries, *_ = ROWS[name]
    kind = schedules()[name]
    for size in (1, 2, 3):
        if not kind.has_stages_per_rank(size):
            continue
        sizes = {"p": ranks, "m": 2 * ranks, "v": size}
        table = schedule_table(
            name, num_ranks=ranks, num_microbatches=2 * ranks, stages_per_rank=size
        )
        ideal = simulate_ideal(table)
        assert ideal.bubble == pytest.approx(formula(bubble, **sizes))
        peak = max(ideal.peak_live_activations) / size
        assert peak == pytest.approx(formula(kept, **sizes))
        owners = table.rank_of_stage
        crossed = sum(here != there for here, there in itertools.pairwise(owners))
        assert crossed == formula(boundaries, **sizes)


@pytest.mark.parametrize("name", ROWS)
def test_the_examples_are_what_the_formulas_give(name):
    bubble, kept, boundaries, *_ = ROWS[name]
    size = EXAMPLE | ({"v": 1} if schedules()[name].most_stages_per_rank == 1 else {})
    assert example(bubble) == f"{formula(bubble, **size):.1%}"
    assert float(example(kept)) == formula(kept, **size)
    assert int(example(boundaries)) == formula(boundaries, **size)


def test_the_picture_is_what_the_command_draws(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "90")
    line = re.findall(r"^boltmesh (schedule .*)$", PAGE, flags=re.MULTILINE)[0]
    assert cli.run_command([*line.split(), "--ascii"]) == 0
    picture = re.findall(r"```text\n(.*?)```", PAGE, flags=re.DOTALL)[0]
    assert capsys.readouterr().out == picture


def test_a_schedule_of_ones_own_is_drawn(capsys, monkeypatch):
    monkeypatch.setattr(registry, "_kinds", dict(schedules()))
    code = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)[0]
    exec(compile(code, "docs/pipeline_schedules.md", "exec"), {})
    assert cli.run_command(["schedule", "one_by_one"]) == 0
    assert "bubble       75.0% of total" in capsys.readouterr().out
