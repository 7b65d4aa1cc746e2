"""Rates and steps of this machine: measured, kept in files, and refused where they cannot be."""

from pathlib import Path

import psutil
import pytest

from boltmesh.advisor.machine import measure_here, of_this_machine, read_rates, steps_file
from boltmesh.cli import run_command
from boltmesh.errors import ConfigError
from tests.support.planned_configs import RATES, SMALL


@pytest.mark.full
def test_rates_are_measured_in_processes_of_their_own() -> None:
    found = measure_here("cpu", 2, "32-true", ".")
    measured = (found.device_tflops, found.memory_gb_s, found.operator_us)
    assert all(each is not None and each > 0 for each in measured)
    assert found.network_gb_s is not None
    assert found.collective_us is not None


@pytest.mark.parametrize("limit", ["3221225472", "max"], ids=["limit", "none"])
def test_a_rank_on_the_cpu_has_its_share_of_what_a_container_may_take(
    limit, remembered, tmp_path, monkeypatch
) -> None:
    (tmp_path / "memory.max").write_text(limit, encoding="ascii")
    (tmp_path / "own").write_text("0::/\n", encoding="ascii")
    monkeypatch.setattr("boltmesh.host_memory.CGROUPS", tmp_path, raising=False)
    monkeypatch.setattr("boltmesh.host_memory.OWN_CGROUPS", tmp_path / "own", raising=False)
    rank_gib = of_this_machine("cpu", 2, "32-true", ".").rank_gib
    whole = psutil.virtual_memory().total / 2**30
    assert whole > 3
    assert rank_gib == pytest.approx(whole / 2 if limit == "max" else 1.5)


def test_remembered_rates_are_read_back(remembered: Path) -> None:
    assert read_rates(remembered) == RATES


@pytest.mark.parametrize("content", ["abc: {bolt_ddp: 0.5}", "abc: 0.5", "abc: {bolt_ddp: {}}"])
def test_steps_of_another_version_say_to_tune_again(content, remembered, capsys) -> None:
    steps_file(remembered).write_text(content, encoding="utf-8")
    assert run_command(["plan", "auto", "ddp", *SMALL[:4]]) == 2
    (said,) = capsys.readouterr().err.strip().splitlines()
    assert said.endswith("is of another version. Delete it, and run boltmesh tune again.")


def test_rates_with_the_factor_of_earlier_versions_are_read(remembered) -> None:
    text = remembered.read_text(encoding="utf-8")
    remembered.write_text(f"{text}calibration: 1.5\n", encoding="utf-8")
    assert read_rates(remembered) == RATES


def test_rates_that_lack_what_a_prediction_needs_say_to_tune_again(remembered, capsys) -> None:
    remembered.write_text("device_tflops: 0.05\n", encoding="utf-8")
    assert run_command(["plan", "auto", "ddp", *SMALL[:4]]) == 2
    (said,) = capsys.readouterr().err.strip().splitlines()
    assert said.endswith("lacks memory_gb_s. Delete it, and run boltmesh tune again.")


@pytest.mark.parametrize("table", ["3", "{2: {4: 0.1}}", "{2: {4: 0.1, 8: -1}}", "{a: {4: 1}}"])
def test_a_table_of_all_reduces_that_cannot_be_is_refused(table, tmp_path) -> None:
    path = tmp_path / "rates.yaml"
    path.write_text(f"allreduce_s: {table}\n", encoding="utf-8")
    with pytest.raises(ConfigError, match="allreduce_s has no measured numbers"):
        read_rates(path)
