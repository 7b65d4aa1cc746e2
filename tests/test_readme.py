"""Every command and every Python block of README.md runs, in the order of the page.

They run in a copy of the checkout, in an environment that has the dependencies and not boltmesh:
the page itself installs it. That is ``full``; ``make test`` runs some commands, as forks. What
would take minutes, a screen or the network is shortened by SHORTENED, and by nothing else.
"""

import os
import re
import shlex
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

import boltmesh
import boltmesh.strategies
from tests.packaging.environments import ROOT, Environment, copy_checkout, make_environment
from tests.support.forked_python import BOLTMESH, run_python

README = (ROOT / "README.md").read_text(encoding="utf-8")
FEW_BATCHES = "limit_val_batches=1 limit_predict_batches=1"
SMALL = "model.init_args.n_layer=2 model.init_args.n_embd=32 data.init_args.batch_size=4"
FEW_STEPS = f"max_steps=2 {FEW_BATCHES} {SMALL}"

SHORTENED: list[tuple[str, Callable[[str], str]]] = [
    # A target of the Makefile would install from the network: make says what it would do. The
    # commands in it are run by test_the_demo_runs and by CI.
    (r"make \w+", lambda line: f"{line} --dry-run"),
    # The dependencies are there, and no index is asked.
    (r"pip install .*", lambda line: f"python -m {line} --no-deps --no-index --no-build-isolation"),
    # Without a terminal there is one screen to show.
    (r"boltmesh top( --demo)?", lambda line: f"{line} --once"),
    (r"boltmesh top --replay \S+", lambda line: f"{line} --once"),
    # These stop by themselves.
    (r"boltmesh .*--(dry-run|print-config|once)\b.*", lambda line: line),
    (r"boltmesh jobs", lambda line: line),
    (r"boltmesh plan .*", lambda line: line),
    (r"boltmesh (record|export-metrics)\b.*", lambda line: line),
    (r"boltmesh check .*", lambda line: f"{line} --steps 2 {FEW_BATCHES} {SMALL}"),
    # Two optimizer steps of a small model, and one batch of everything else.
    (r"boltmesh (fit|validate|predict) .*", lambda line: f"{line} {FEW_STEPS}"),
    (r"torchrun .* -m boltmesh fit .*", lambda line: f"{line} {FEW_STEPS}"),
    (r"python examples/\d\d_\w+\.py", lambda line: f"{line} --max-steps 2"),
]


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", README, flags=re.MULTILINE | re.DOTALL)


def commands() -> list[str]:
    lines = "".join(blocks("bash")).splitlines()
    return [command for line in lines if (command := re.sub(r"\s+#.*", "", line).strip())]


def shortened(command: str) -> str:
    """What is run for a command of the page; a command that no rule knows is a failure."""
    for pattern, change in SHORTENED:
        body, _, redirection = command.partition(" > ")
        if re.fullmatch(pattern, body):
            return f"{change(body)} > {redirection}" if redirection else change(body)
    raise AssertionError(f"say in SHORTENED how to run: {command}")


@dataclass(frozen=True)
class Workplace:
    """A copy of the checkout and the environment that its commands see."""

    checkout: Path
    environment: Environment

    def run(self, line: str, *, timeout_s: float = 600.0) -> str:
        search = f"{self.environment.folder / 'bin'}{os.pathsep}{os.environ['PATH']}"
        done = subprocess.run(
            ["bash", "-c", line],
            cwd=self.checkout,
            env={**os.environ, "PATH": search},
            capture_output=True,
            text=True,
            timeout=timeout_s,
            stdin=subprocess.DEVNULL,
        )
        assert done.returncode == 0, f"{line}\nexits {done.returncode}:\n{done.stdout}{done.stderr}"
        return done.stdout


@pytest.fixture
def workplace(tmp_path: Path) -> Workplace:
    return Workplace(copy_checkout(tmp_path / "boltmesh"), make_environment(tmp_path / "venv"))


@pytest.fixture
def installed(workplace: Workplace) -> Workplace:
    workplace.environment.install("-e", workplace.checkout)
    return workplace


NEEDS_NOTHING = re.compile(r"(make|pip|python|torchrun|boltmesh (plan|check)) ")
"""What a command begins with that goes on from none above it."""
INTERPRETED = {"boltmesh": BOLTMESH, "torchrun": ("-m", "torch.distributed.run"), "python": ()}


def run_as_forks(chosen: list[str], checkout: Path) -> None:
    """Run commands of the page that are Python's; others are for the true environment."""
    for command in chosen:
        line, _, file = shortened(command).partition(" > ")
        program, *arguments = shlex.split(line)
        if program == "make" or "pip" in arguments:
            continue
        done = run_python(*INTERPRETED[program], *arguments, cwd=checkout)
        assert done.returncode == 0, f"{line}\nexits {done.returncode}:\n{done.stdout}{done.stderr}"
        if file:
            (checkout / file).write_text(done.stdout)


WRITES_A_CONFIG = "boltmesh fit zero3 --print-config > mine.yaml"
CHAINS = {"watching": "", "config": "mine.yaml", "restarts": "--restarts"}
"""Commands that go on from others, by the last word here that is in them."""


def chain_of(command: str) -> str:
    return [name for name, word in CHAINS.items() if word in command][-1]


@pytest.mark.full
@pytest.mark.slow(15)
@pytest.mark.ranks
@pytest.mark.parametrize("chain", CHAINS)
def test_every_command_that_goes_on_from_others_runs_as_a_fork(chain: str, tmp_path: Path) -> None:
    needing = [each for each in commands() if not NEEDS_NOTHING.match(each)]
    assert WRITES_A_CONFIG in needing
    chosen = [each for each in needing if chain_of(each) == chain]
    assert len(chosen) > 1
    if chain == "restarts":
        chosen.insert(0, WRITES_A_CONFIG)
    run_as_forks(chosen, copy_checkout(tmp_path / "boltmesh"))


LIKE_OTHERS = re.compile(r"threed|02_zero_nvme|03_pipeline")

INDEPENDENT = [
    # Other tests run what these do: eight ranks, or a strategy of another line.
    pytest.param(each, marks=[pytest.mark.full] if LIKE_OTHERS.search(each) else [])
    for each in commands()
    if NEEDS_NOTHING.match(each)
]


@pytest.mark.sample(
    "make demo",
    "pip install -c constraints.txt -e .",
    "boltmesh plan zero3 --strategy zero3_nvme",
)
@pytest.mark.ranks
@pytest.mark.parametrize("command", INDEPENDENT)
def test_a_command_that_needs_no_other_runs_as_a_fork(command: str, tmp_path: Path) -> None:
    run_as_forks([command], copy_checkout(tmp_path / "boltmesh"))


@pytest.mark.full
@pytest.mark.slow(180)
@pytest.mark.ranks
def test_every_command_runs_in_the_order_of_the_page(workplace: Workplace) -> None:
    assert len(commands()) > 10
    for command in commands():
        workplace.run(shortened(command))


@pytest.mark.ranks
def test_every_python_block_runs_as_a_fork(tmp_path: Path) -> None:
    checkout = copy_checkout(tmp_path / "boltmesh")
    for script in python_scripts(checkout):
        done = run_python(str(script), cwd=checkout)
        assert done.returncode == 0, done.stdout + done.stderr


def python_scripts(checkout: Path) -> Iterator[Path]:
    """The blocks, beside the examples, from where the page says that its model and data come."""
    first, *others = blocks("python")
    assert first.count("max_steps=200") == 1
    for number, block in enumerate([first.replace("max_steps=200", "max_steps=2"), *others]):
        script = checkout / "examples" / f"readme_{number}.py"
        script.write_text(block, encoding="utf-8")
        yield script


@pytest.mark.full
@pytest.mark.slow(35)
@pytest.mark.ranks
def test_every_python_block_runs(installed: Workplace) -> None:
    for script in python_scripts(installed.checkout):
        installed.run(f"python {script}")


@pytest.mark.full
@pytest.mark.slow(35)
@pytest.mark.ranks
def test_the_demo_runs_and_so_does_what_it_advises(installed: Workplace) -> None:
    recipe = installed.run("make --dry-run demo")
    (fit,) = re.findall(r"^\S*/(boltmesh fit .*)$", recipe, flags=re.MULTILINE)
    output = installed.run(f"{fit} {FEW_STEPS}")
    for promise in (r"train loss +\d\.\d+ before, \d\.\d+ after", "boltmesh top", "runs/demo/0"):
        assert re.search(promise, output), f"{promise} is not in:\n{output}"
    advice = re.findall(r"'  (boltmesh .*?) +# ", recipe)
    assert len(advice) == 3
    for command in advice:
        command = command.replace("max_steps=1200", "max_steps=3").replace("FOLDER", "examples")
        goes_on = "run.name=demo" in command
        installed.run(f"{command} {SMALL}" if goes_on else f"{command} --dry-run")


def test_every_file_that_the_page_names_is_there() -> None:
    links = [link for link in re.findall(r"\]\(([^)]+)\)", README) if "://" not in link]
    named = re.findall(r"\b(?:configs|examples|tests|docs)/[\w/.]+\.\w+\b", README)
    assert links
    assert named
    for path in {*links, *named, "CONTRIBUTING.md", "LICENSE", "constraints.txt"}:
        assert (ROOT / path.partition("#")[0]).is_file(), path


@pytest.mark.parametrize("package", [boltmesh, boltmesh.strategies])
def test_every_public_name_resolves(package: object) -> None:
    names = getattr(package, "__all__")  # noqa: B009 - not every module has it
    assert names == sorted(names)
    for name in names:
        assert getattr(package, name) is not None
