"""``boltmesh tune`` and benches of planned layouts: what is run, measured and remembered."""

import json
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from boltmesh.advisor.machine import rates_file, read_rates, read_steps, steps_file
from boltmesh.bench.job import OUT_OF_MEMORY, Ended, run_variant
from boltmesh.bench.measurement import BenchRun
from boltmesh.bench.variant import Variant
from boltmesh.cli import run_command
from boltmesh.configs.load import load
from tests.support.forked_python import run_python
from tests.support.planned_configs import RATES, SMALL


def ended(seconds: float) -> Ended:
    """How a job ends whose steps take so long."""
    return Ended(
        BenchRun(
            mesh={},
            step_s=(seconds,) * 3,
            samples=None,
            tokens=None,
            loss=None,
            last_step=2,
            bubble=(),
            memory={},
            host_bytes=None,
            device_bytes=None,
            axis_bytes={},
        )
    )


@pytest.mark.full
def test_tuning_runs_layouts_back_and_forth_so_that_a_burst_of_load_does_not_decide(
    tmp_path, monkeypatch, capsys
) -> None:
    ran: list[str] = []

    def run(variant: Variant, *_: object, **__: object) -> Ended:
        ran.append(variant.label)
        if len(ran) == 3:
            return Ended(None, "out of memory")
        seconds = (
            2.0 if variant.label == ran[0] else 10.0 if len(ran) == 2 else 1.0
        )  # a burst of load
        return ended(seconds)

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("boltmesh.advisor.machine.measure_here", lambda *_: RATES)
    monkeypatch.setattr("boltmesh.advisor.tune.run_variant", run)
    assert run_command(["tune", "ddp", *SMALL[:4], "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["layouts"]
    first, second, _ = ran[:3]
    assert ran[3:] == [second, first, first, second]
    (reason,) = (each["reason"] for each in found if each["reason"])
    assert reason.startswith("out of memory: it was to need ")
    assert sorted(each["measured_s"] or 0.0 for each in found) == [0.0, 1.0, 2.0]


@pytest.fixture
def tune_by(tmp_path, monkeypatch) -> Callable[[Any], None]:
    """Lets a function stand for jobs of whole models, on a machine of which nothing is known."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("boltmesh.advisor.machine.measure_here", lambda *_: RATES)
    monkeypatch.setattr("boltmesh.advisor.search.MOST_DIVISIONS", 0)
    return partial(monkeypatch.setattr, "boltmesh.advisor.tune.run_variant")


def test_tuning_also_runs_what_its_steps_make_the_fastest(tune_by, capsys) -> None:
    ran: list[str] = []

    def run(variant: Variant, *_: object, **__: object) -> Ended:
        ran.append(variant.label)
        return ended(50.0 if variant.label == ran[0] else 1.0)

    tune_by(run)
    assert run_command(["tune", "ddp", *SMALL[:4], "--rounds", "2", "--top", "1", "--json"]) == 0
    first, other = ran[0], ran[2]
    assert ran == [first, first, other, first, first, other]
    assert first != other
    found = json.loads(capsys.readouterr().out)["layouts"]
    assert [each["measured_s"] for each in found] == [50.0, 1.0]
    assert run_command(["plan", "auto", "ddp", *SMALL[:4], "--json"]) == 0
    best, *_ = json.loads(capsys.readouterr().out)["best"]
    assert (best["step_s"], best["is_measured"]) == (pytest.approx(1.0), True)


@pytest.mark.parametrize("is_stopped", [False, True])
def test_a_layout_that_fails_beside_the_fastest_ends_its_rounds(
    is_stopped, tune_by, capsys
) -> None:
    """What was measured before is remembered, after an interrupt too."""
    ran: list[str] = []

    def run(variant: Variant, *_: object, **__: object) -> Ended:
        ran.append(variant.label)
        if variant.label == ran[0]:
            return ended(50.0)
        if is_stopped:
            raise KeyboardInterrupt
        return Ended(None, "stopped")

    tune_by(run)
    line = ["tune", "ddp", *SMALL[:4], "--rounds", "3", "--top", "1", "--json"]
    assert run_command(line) == (130 if is_stopped else 0)
    first, other = ran[0], ran[3]
    assert ran == ([first] * 3 + [other] if is_stopped else [first] * 3 + [other, first])
    assert json.loads(capsys.readouterr().out)["remembered"] is not None


def no_home(*_: object) -> Path:
    raise RuntimeError("Could not determine home directory.")


@pytest.mark.parametrize("case", ["file in the way", "no home", "interrupt"])
def test_what_is_measured_is_printed_though_it_cannot_be_remembered(
    case, tune_by, tmp_path, monkeypatch, capsys
) -> None:
    ran: list[str] = []

    def run(variant: Variant, *_: object, **__: object) -> Ended:
        ran.append(variant.label)
        if case == "interrupt" and len(ran) == 2:
            raise KeyboardInterrupt
        return ended(0.5 * len(ran))

    cache = tmp_path / "cache"
    if case == "file in the way":
        cache.touch()
    monkeypatch.setenv("XDG_CACHE_HOME", "" if case == "no home" else str(cache))
    monkeypatch.setattr(Path, "home", no_home)
    tune_by(run)
    line = ["tune", "ddp", *SMALL[:4], "--rounds", "1", "--top", "2"]
    assert run_command(line) == (130 if case == "interrupt" else 0)
    said = capsys.readouterr().out.splitlines()
    places = [each for each in said if each[:2] in {"1.", "2."}]
    assert places[0].endswith(f"0.500 s  {ran[0]}")
    assert (" none  " in places[1]) == (case == "interrupt")
    why = {
        "file in the way": f"{cache}/boltmesh/rates cannot be written: Not a directory",
        "no home": "Set XDG_CACHE_HOME to a folder for them",
        "interrupt": "not all rounds have run",
    }[case]
    assert said[-2].startswith("The fastest: boltmesh fit ddp ")
    assert said[-1].startswith("Nothing is remembered: ")
    assert said[-1].endswith(f"{why}.")


def test_plans_of_a_user_without_a_home_measure_rates(monkeypatch, capsys) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    monkeypatch.setattr(Path, "home", no_home)
    monkeypatch.setattr("boltmesh.advisor.machine.measure_here", lambda *_: RATES)
    monkeypatch.setattr("boltmesh.advisor.search.MOST_DIVISIONS", 0)
    assert run_command(["plan", "auto", "ddp", *SMALL[:4], "--json"]) == 0
    assert "measured just now" in json.loads(capsys.readouterr().out)["rates_from"]


def test_a_bench_of_planned_layouts_runs_the_three_best(remembered, monkeypatch, capsys) -> None:
    ran: list[list[str]] = []

    def run(_: object, __: object, line: list[str], **___: object) -> Ended:
        ran.append(line)
        return Ended(None, "stopped")

    monkeypatch.setattr("boltmesh.advisor.search.MOST_DIVISIONS", 0)
    monkeypatch.setattr("boltmesh.bench.command.run_variant", run)
    line = ["bench", "ddp", *SMALL[:4], "accelerator=cpu", "devices=2"]
    line += ["strategy.name=bolt_zero3", "strategy.activation_checkpointing=full"]
    assert run_command([*line, "--strategies", "planned,bolt_zero2"]) == 1
    assert "bolt_ddp, data 2 (planned " in capsys.readouterr().out
    assert len(ran) == 4
    strategies = [load("ddp", each).strategy for each in ran]
    kinds = {each.name: each.get("activation_checkpointing") for each in strategies}
    # Planned without recomputation; the other has what the config has.
    assert kinds == {"bolt_ddp": None, "bolt_zero1": None, "bolt_zero3": None, "bolt_zero2": "full"}


TUNE = """
import sys
from boltmesh.advisor import machine, search
from boltmesh.cli import run_command
from boltmesh.configs.load import load
from boltmesh.strategies.cost_model.step_time import Machine

machine.measure_here = lambda *_: {rates}
search.MOST_DIVISIONS = 0
sys.exit(run_command(sys.argv[1:]))
"""


@pytest.mark.slow(20)
def test_tuning_measures_layouts_and_later_plans_remember(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setattr("boltmesh.advisor.search.MOST_DIVISIONS", 0)
    env = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache")}
    line = ["tune", "ddp", *SMALL[:4], "--steps", "3", "--warmup", "1", "--rounds", "1"]
    line += ["--top", "1", "--json"]
    script = tmp_path / "tune.py"
    script.write_text(TUNE.format(rates=RATES), encoding="utf-8")
    done = run_python(str(script), *line, cwd=tmp_path, env=env, differentiates=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.strip().splitlines()[-1])
    (first,) = found["layouts"]
    assert first["reason"] is None
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = rates_file("cpu", 2, "32-true")
    assert found["remembered"] == str(path)
    assert read_rates(path) is not None
    (steps,) = read_steps(steps_file(path)).values()
    (step,) = steps.values()
    assert (step.seconds, step.predicted_s) == (first["measured_s"], first["predicted_s"])
    assert run_command(["plan", "auto", *line[1:6], "--json"]) == 0
    planned = json.loads(capsys.readouterr().out)["best"]
    took = [each["step_s"] for each in planned if each["is_measured"]]
    assert took == pytest.approx([first["measured_s"]])


@pytest.mark.full
@pytest.mark.slow(30)
def test_a_job_that_needs_more_than_its_memory_ends_with_that_reason(tmp_path) -> None:
    line = [*SMALL, "devices=1", "model.init_args.n_embd=4096"]  # 1.6 GB of parameters
    variant = Variant(label="one", strategy="bolt_ddp")
    ended = run_variant(variant, "ddp", line, steps=1, warmup=0, host_bytes=2**28)
    assert ended.run is None
    assert ended.reason == OUT_OF_MEMORY
