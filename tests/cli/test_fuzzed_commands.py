"""Whatever a config or a command line holds, a command does what it says or refuses it.

No traceback, no hang, no value that is not the one that was given. Drawn by a seed.
"""

import os
import random
import re
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]
from omegaconf import DictConfig, ListConfig, OmegaConf

from boltmesh.cli import run_command
from boltmesh.configs.load import TEXT_LOADER, load, recipes
from boltmesh.configs.merge import all_keys, full_key
from boltmesh.strategies.registry import STRATEGIES
from boltmesh.strategy_arguments import accepted_arguments
from tests.cli.conftest import TINY

NUM_CASES = 1_000
LARGE = (
    "4294967296", "9999999999", str(2**63), str(2**64), "9" * 22, "-" + "9" * 22, "9" * 400,
    "0x" + "f" * 4200, "1e400", "'9999999999'", "[9999999999]", "9999999999:00:00:00", "x" * 400,
)  # fmt: skip
WRONG_TAGS = (
    "!!timestamp x", "!!int ''", "!!int x", "!!float '-'", "!!bool x", "[!!timestamp x]",
    "{a: !!bool ''}", "{!!int '': 1}", "!!binary é", "2026-13-45", "!!omap x", "!!str [1]",
)  # fmt: skip
EVIL = "\x1b]0;x\x07\x9b31m\r\u202e\u200b"
TEXTS = (
    "", " ", "null", "~", "true", "-1", "0", "1", "3", "1.5", "1e3", "1_0", "0x10", "010", "1:30",
    ".nan", "-.inf", "9" * 400, "2**3", "a b", "é", EVIL, "\ud800", "/", "..", "/dev/null", "=",
    "[]", "[1, 2]", "[[[1]]]", "{}", "{a: 1}", "{a: {b: [1]}}", "{1: 2}", "{? : }", "*x", "&x 1",
    "!!set", "!!python/object/apply:os.system ['touch code-was-run']", "${run.name}", "${nothing}",
    "${", "$", "${oc.env:HOME}", "${run}", "{class_path: 3}", "bolt_zero3", "[" * 300, "'", '"',
    "[{class_path: a.B, init_args: 3}]", "a: b: c", "|", ">", "%", "- a", "yes", "off", "<<",
    "2026-01-01", *LARGE, *WRONG_TAGS,
)  # fmt: skip
CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202e\u200b]")


@pytest.fixture(autouse=True)
def _no_code(workplace: Path) -> Iterator[None]:
    yield
    assert not (workplace / "code-was-run").exists()


def check_said(code: int, out: str, error: str, line: list[str]) -> None:
    """Check that a command has said what it has to, and in one line what is wrong."""
    shown = shlex.join(line)
    assert code in {0, 1, 2}, (code, shown)
    assert "Traceback" not in out + error, (error, shown)
    assert not CONTROL.search(out + error), (out + error, shown)
    if code == 2:
        assert [each for each in error.splitlines() if each], shown
        assert error.startswith("boltmesh: "), (error, shown)


def damaged_text(draw: random.Random, text: str) -> str:
    """Change a config as a slip of an editor would."""
    lines = text.splitlines(keepends=True)
    at, other = draw.randrange(len(lines)), draw.randrange(len(lines))
    kind = draw.randrange(7)
    if kind == 0:
        lines[at] = draw.choice(["", " ", "\t", "  "]) + lines[at].lstrip()
    elif kind == 1:
        lines[at], lines[other] = lines[other], lines[at]
    elif kind == 2:
        lines.insert(at, lines[other])
    elif kind == 3:
        place = draw.randrange(len(lines[at]))
        lines[at] = (
            lines[at][:place] + draw.choice(":-#[]{}'\"&*!|>%@`\t,é\x07") + lines[at][place:]
        )
    elif kind == 4:
        key, colon, _ = lines[at].partition(":")
        lines[at] = f"{key}{colon} {draw.choice(TEXTS)}\n"
    elif kind == 5:
        return text[: draw.randrange(len(text))]
    else:
        place = draw.randrange(len(lines[at]))
        lines[at] = lines[at][:place] + lines[at][place + 1 :]
    return "".join(lines)


def drawn_override(draw: random.Random, keys: list[str]) -> str:
    key = draw.choice(keys)
    kind = draw.randrange(8)
    if kind == 0:
        key = key.rpartition(".")[2]
    elif kind == 1:
        place = draw.randrange(len(key))
        key = key[:place] + draw.choice("._-[]0aé$") + key[place + 1 :]
    elif kind == 2:
        key = f"{key}.{draw.choice(['x', '0', '-1', '', 'class_path', 'init_args.x'])}"
    return f"{key}{draw.choice(['=', '=', '=', '=', '=', '==', '', ' = '])}{draw.choice(TEXTS)}"


def leaves(value: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """Give every value of a config, by its key."""
    if isinstance(value, (DictConfig, dict)) and value:
        for name in value:
            inside = value._get_node(name) if isinstance(value, DictConfig) else value[name]
            yield from leaves(inside, ".".join((*([key] if key else []), str(name))))
    else:
        if not isinstance(value, (DictConfig, ListConfig)) and hasattr(value, "_value"):
            value = value._value()
        yield key, value


def check_values(
    config: DictConfig, given: dict[str, Any], written: dict[str, Any], shown: str
) -> None:
    """Check that a config has the values that it was given."""
    held = dict(leaves(config))
    for key, value in given.items():
        if key.endswith("class_path") or key in {"strategy", "run.name"} or value in ({}, None):
            continue
        found = held.get(key)
        if isinstance(found, (DictConfig, ListConfig)):
            found = OmegaConf.to_container(found, resolve=False)
        if "callbacks" in key or "logger" in key:
            continue  # an item may be written shorter than it is kept
        if isinstance(found, str) and isinstance(value, (int, float)):
            value = written[key]  # a text is as it is written
        if isinstance(found, (int, float)) and isinstance(value, str):
            value = parsed(value)  # a number in quotes
        same = found == value and isinstance(found, bool) == isinstance(value, bool)
        both_nan = found != found and value != value
        assert same or both_nan, (key, value, found, shown)


def parsed(text: str) -> Any:
    """Return what OmegaConf reads in the text behind ``=``."""
    found = OmegaConf.to_container(OmegaConf.from_dotlist([f"value={text}"]), resolve=False)
    assert isinstance(found, dict)
    return found["value"]


@pytest.mark.parametrize("num_cases", [40, pytest.param(NUM_CASES, marks=pytest.mark.full)])
def test_configs(
    num_cases: int, workplace: Path, capfd: Any, figure: Callable[[str, int, int], None]
) -> None:
    draw, path = random.Random(20260101), workplace / "mine.yaml"
    texts = [each.read_text() for each in (TINY, *recipes().values())]
    keys, num_loaded = list(all_keys()), 0
    for _ in range(num_cases):
        text = draw.choice(texts)
        overrides = []
        if draw.random() < 0.6:
            for _ in range(draw.choice([1, 1, 1, 3])):
                text = damaged_text(draw, text) if text else text
        else:
            overrides = [drawn_override(draw, keys) for _ in range(draw.choice([1, 1, 2, 4]))]
        path.write_bytes(text.encode(errors="surrogatepass"))
        line = ["fit", str(path), *overrides, "--print-config"]
        code = run_command(line)
        out, error = capfd.readouterr()
        check_said(code, "" if code == 0 else out, error, line)
        if code:
            assert out == ""
            continue
        num_loaded += 1
        printed = yaml.safe_load(out)  # it is YAML
        assert isinstance(printed, dict)
        given = dict(leaves(OmegaConf.to_container(OmegaConf.create(text or "{}"), resolve=False)))
        config = load(path, overrides)
        if not overrides:
            plain = dict(leaves(yaml.load(text, Loader=TEXT_LOADER) or {}))
            check_values(config, given, plain, text)
        last = {full_key(each.partition("=")[0].strip()): each for each in overrides}
        if len(last) == 1 and len(overrides) == 1:
            ((key, each),) = last.items()
            value = parsed(each.partition("=")[2])
            if not isinstance(value, (dict, list)):
                word = each.partition("=")[2].strip()
                check_values(config, {key: value}, {key: word.removeprefix("&x ")}, each)
        again = workplace / "again.yaml"
        again.write_text(out)
        assert load(again) == config or ".nan" in out, line
    assert num_cases / 8 < num_loaded < num_cases
    figure("fuzzed configs: no traceback, hang or changed value", num_cases, num_cases)


@pytest.mark.parametrize("num_cases", [40, pytest.param(NUM_CASES, marks=pytest.mark.full)])
def test_numbers_that_nothing_holds_are_refused_before_a_run_begins(
    num_cases: int, workplace: Path, capfd: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PL_GLOBAL_SEED", "1")  # the runs set it
    draw, keys = random.Random(20260103), [("bolt_ddp", key) for key in all_keys()]
    for name, entry in STRATEGIES.items():
        keys += [(name, f"strategy.{each}") for each in accepted_arguments(entry.load())]
    for _ in range(num_cases):
        strategy, key = draw.choice(keys)
        override = f"{key}={draw.choice([*LARGE, *WRONG_TAGS, '.nan', '[]', '{a: 1}'])}"
        line = ["fit", str(TINY), "devices=1", f"strategy={strategy}", override, "--dry-run"]
        code = run_command(line)
        _, error = capfd.readouterr()
        check_said(code, "", error, line)
        assert code != 1, (error, line)
    assert not (workplace / "runs").exists()


FILES = ("absent", "folder", "pipe", "empty.ckpt", "text.yaml", "noise", "loop", "mine.yaml", "-")
LINES: dict[str, tuple[str, ...]] = {
    "fit": ("--print-config", "--dry-runn", "--restarts", "--traceback=1"),
    "validate": ("--print-config",),
    "plan": (
        "--strategy",
        "--size",
        "--devices",
        "--json",
        "auto",
        "--gpu",
        "--network",
        "--batch",
    ),
    "schedule": ("--stages", "--microbatches", "--chunks", "--forward", "--json", "--ascii"),
    "export": ("--to", "--prefix", "--max-shard-size", "--dtype", "--force", "--peft"),
    "import": ("--to", "--prefix", "--force"),
    "verify": (),
    "prune": ("--dry-run", "--telemetry-days"),
    "top": ("--once", "--replay", "--json", "--at", "--theme", "--interval", "--run-dir"),
    "report": ("--replay", "--output", "--run-dir"),
    "export-metrics": ("--format", "--table", "--replay", "--run-dir", "--output"),
    "jobs": ("--json", "--run-dir", "--ascii"),
    "stream": ("--list", "--run-dir"),
    "record": ("--force", "--run-dir", "--for"),
    "nothing": (),
}
ALWAYS = {
    "fit": ["--print-config"], "validate": ["--print-config"], "top": ["--once"],
    "stream": ["--list"],
}  # fmt: skip
"""Without it the command would train, or show something until it is left."""


@pytest.mark.parametrize("num_cases", [150, pytest.param(NUM_CASES, marks=pytest.mark.full)])
def test_command_lines(
    num_cases: int, workplace: Path, capfd: Any, figure: Callable[[str, int, int], None]
) -> None:
    draw = random.Random(20260102)
    (workplace / "folder").mkdir()
    os.mkfifo(workplace / "pipe")
    (workplace / "empty.ckpt").touch()
    (workplace / "text.yaml").write_text("a: [1")
    (workplace / "noise").write_bytes(random.Random(1).randbytes(4096))
    (workplace / "loop").symlink_to("loop")
    (workplace / "mine.yaml").write_text(TINY.read_text())
    words = [*FILES, *recipes(), *TEXTS, "bolt_ddp", "1f1b", "2", "prometheus", "GPT", "125M"]
    codes = dict.fromkeys((0, 1, 2), 0)
    for _ in range(num_cases):
        command = draw.choice(list(LINES))
        options = [*LINES[command], "--help", "--", "--json", "--x"]
        line = [command, *ALWAYS.get(command, ())]
        count = draw.choice([0, 1, 2, 2, 3, 4])
        line += [draw.choice(options if draw.random() < 0.4 else words) for _ in range(count)]
        if "--" in line and command in ALWAYS:
            line.remove("--")
        code = run_command(line)
        _, error = capfd.readouterr()
        check_said(code, "", error, line)
        codes[code] += 1
    assert codes[2] > num_cases / 4
    figure("fuzzed command lines: no traceback, no hang", num_cases, num_cases)
