"""The command line: what it has, how light it is, and what it says when it cannot go on."""

import json
import subprocess
import sys

import click
import pytest
from omegaconf import OmegaConf

from boltmesh import cli
from boltmesh.configs.load import load
from tests.cli.conftest import TINY

RUN_OPTIONS = {"--print-config", "--dry-run", "--traceback"}


def test_the_commands_and_their_options_are_these():
    """Whoever adds one changes this test, the README and the changelog."""
    found = {
        name: {option for each in command.params if isinstance(each, click.Option)
               for option in each.opts}
        for name, command in cli.boltmesh.commands.items()
    }  # fmt: skip
    assert found == {
        "fit": {*RUN_OPTIONS, "--restarts"},
        "validate": RUN_OPTIONS,
        "test": RUN_OPTIONS,
        "predict": RUN_OPTIONS,
        "check": {"--steps", "--traceback"},
        "bench": {"--strategies", "--steps", "--warmup", "--rounds", "--output"},
        "plan": {"--strategy", "--devices", "--size", "--cluster", "--json"},
        "doctor": {"--offload-path", "--ascii", "--json"},
        "schedule": {"--stages", "--microbatches", "--stages-per-rank", "--forward", "--backward",
                     "--ascii", "--json"},
        "top": {"--once", "--json", "--demo", "--ascii", "--theme", "--run-dir", "--interval",
                "--replay", "--at", "--on-alert", "--ssh", "--slurm", "--remote-command",
                "--no-mouse"},
        "jobs": {"--json", "--ascii", "--run-dir", "--ssh", "--slurm", "--remote-command"},
        "record": {"--interval", "--for", "--force", "--run-dir"},
        "export-metrics": {"--format", "--table", "--output", "--every", "--replay", "--at",
                           "--run-dir"},
        "stream": {"--list", "--run-dir", "--interval"},
        "export": {"--to", "--prefix", "--max-shard-size", "--hf", "--peft", "--force"},
        "import": {"--to", "--prefix", "--tie", "--force"},
        "verify": set(),
        "prune": {"--dry-run", "--telemetry-days"},
        "advise": {"--devices", "--gpu", "--nodes", "--network"},
        "report": {"--run-dir", "--output", "--replay"},
        "tune": {"--top", "--warmup", "--steps", "--rounds", "--memory", "--json"},
    }  # fmt: skip


def test_the_command_line_loads_no_training_library_and_no_screen():
    code = (
        "import sys, boltmesh.cli, boltmesh.preflight\n"
        "import boltmesh.plan.command, boltmesh.launch.supervisor\n"
        "print([each for each in ('torch', 'lightning', 'textual') if each in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_python_m_boltmesh_works():
    done = subprocess.run(
        [sys.executable, "-m", "boltmesh", "--version"], capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith("boltmesh 0.")


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["fi"], "boltmesh: No such command 'fi'. Did you mean 'fit'?\n"),
        (["fit"], "boltmesh: Missing argument 'CONFIG'.\n"),
        (["fit", "ddp", "--dryrun"], "boltmesh: No such option '--dryrun'. "),
        (["fit", "dpp"], "boltmesh: There is no recipe 'dpp'. Did you mean 'ddp'? "),
        (["fit", "ddp", "max_step=3"], "boltmesh: command line: unknown key 'max_step'. "),
        (["check", "ddp", "--steps", "0"], "boltmesh: Invalid value for '--steps': "),
        (["top", "--once", "no-such-job"], "boltmesh: "),
    ],
)
def test_what_a_user_can_mend_is_one_line_and_exit_2(workplace, capfd, arguments, line):
    assert cli.run_command(arguments) == 2
    out, error = capfd.readouterr()
    assert out == ""
    assert error.startswith(line)
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    "line",
    [
        "top --once --interval", "record a.rec --interval", "record a.rec --for",
        "export-metrics --every", "stream --interval", "schedule 1f1b --forward",
        "schedule 1f1b --backward", "tune ddp --memory", "top --once --replay a.rec --at",
    ],
)  # fmt: skip
@pytest.mark.parametrize("number", ["nan", "inf", "1e999"])
def test_numbers_that_are_not_finite_are_refused(workplace, capfd, line, number):
    option = line.split()[-1]
    assert cli.run_command([*line.split(), number]) == 2
    said = capfd.readouterr().err
    assert said == f"boltmesh: Invalid value for '{option}': '{number}' is not a finite number.\n"


def test_the_printed_config_is_a_config_that_means_the_same(workplace, capsys):
    assert cli.run_command(["fit", str(TINY), "max_steps=7", "--print-config"]) == 0
    printed = workplace / "printed.yaml"
    printed.write_text(capsys.readouterr().out)
    assert load(printed) == load(TINY, ["max_steps=7"])
    assert OmegaConf.load(printed).trainer.max_steps == 7


def test_a_traceback_is_shown_on_request(workplace, capfd):
    assert cli.run_command(["fit", "dpp", "--traceback"]) == 2
    error = capfd.readouterr().err
    assert "Traceback (most recent call last)" in error
    assert error.splitlines()[-1].startswith("boltmesh: There is no recipe 'dpp'.")


def test_jobs_prints_json(workplace, capsys):
    assert cli.run_command(["jobs", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["jobs"] == []
