"""Everything that a user can rely on, as one text: names, signatures, commands, keys, formats.

    python -m tests.guards.interface        (or `make snapshot`)

rewrites ``interface.txt``; ``test_interface.py`` compares it with what the packages say. The
text names no module of the packages, so that moving code leaves it as it is, and it is the same on
every supported Python.
"""

import inspect
import io
import json
import os
import re
import struct
import tempfile
import types
from collections.abc import Iterator, Mapping
from contextlib import redirect_stdout
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from typing import Any, ForwardRef, Literal, Union, get_args, get_origin, get_type_hints

import click
import torch
from lightning.pytorch import Trainer, seed_everything

import boltmesh
import boltmesh.strategies
from boltmesh.cli import boltmesh as command_line
from boltmesh.cli import run_command
from boltmesh.configs.load import recipes
from boltmesh.configs.schema import Config
from boltmesh.strategies.registry import STRATEGIES, build_strategy
from tests.support.models import Regression, regression_data
from tests.support.ranks import run_ranks

ROOT = Path(__file__).parents[2]
INTERFACE = Path(__file__).with_name("interface.txt")
STRATEGY_MEMBERS = ("gradient_norm",)
"""What users call on a strategy; everything else there is Lightning's business or ours."""

WIDTH = 100


def interface() -> str:
    """Describe the public interface."""
    sections = {
        "Python": _python(),
        "Errors": _errors(),
        "Registered strategies": _registered(),
        "Config": _config(Config),
        "Recipes": iter(sorted(recipes())),
        "Environment variables in the documentation": _variables(),
        "Formats": _formats(),
        "Command line": _commands(command_line, "boltmesh"),
    }
    parts = [f"## {title}\n\n" + "\n".join(lines) for title, lines in sections.items()]
    return "\n\n".join(parts) + "\n"


def _python() -> Iterator[str]:
    described = set()
    for package in (boltmesh, boltmesh.strategies):
        for name in package.__all__:
            found = getattr(package, name)
            yield f"{package.__name__}.{name}"
            if name in described:
                continue
            described.add(name)
            if isinstance(found, type) and not issubclass(found, Exception):
                yield from _members(found)
            elif callable(found) and not isinstance(found, type):
                yield from _signature(found, "")


def _members(cls: type[Any]) -> Iterator[str]:
    yield from _signature(cls.__init__, "__init__")
    is_strategy = cls.__name__.endswith("Strategy")
    for name in STRATEGY_MEMBERS if is_strategy else sorted(vars(cls)):
        member = inspect.getattr_static(cls, name)
        if isinstance(member, property):
            yield f"    {name}: property"
        elif not name.startswith("_") and callable(getattr(cls, name)):
            yield from _signature(getattr(cls, name), name)


def _signature(function: Any, name: str) -> Iterator[str]:
    """A line for the name, and one for each argument."""
    signature = inspect.signature(function)
    yield f"    {name}(...) -> {spell(signature.return_annotation)}".replace(" -> None", "")
    for argument in signature.parameters.values():
        if argument.name in {"self", "cls"}:
            continue
        end = "" if argument.default is argument.empty else f" = {argument.default!r}"
        kind = "" if argument.kind is argument.POSITIONAL_OR_KEYWORD else argument.kind.description
        line = f"        {argument.name}: {spell(argument.annotation)}{end}  {kind}"
        yield line.rstrip()


def spell(hint: Any) -> str:
    """A type without the modules of its names; ``Optional[X]`` and ``Union`` as ``X | None``."""
    if hint is type(None):
        return "None"
    if isinstance(hint, ForwardRef):
        return hint.__forward_arg__
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in {Union, types.UnionType}:
        return " | ".join(spell(each) for each in arguments)
    if origin is Literal:
        return f"Literal[{', '.join(map(repr, arguments))}]"
    if isinstance(hint, list):  # the arguments of a Callable
        return f"[{', '.join(map(spell, hint))}]"
    if hint is ...:
        return "..."
    if origin is not None and arguments:
        return f"{spell(origin)}[{', '.join(map(spell, arguments))}]"
    if hint is inspect.Signature.empty:
        return "?"
    return str(getattr(hint, "__name__", None) or str(hint).rpartition(".")[2])


def _errors() -> Iterator[str]:
    for name in boltmesh.__all__:
        found = getattr(boltmesh, name)
        if isinstance(found, type) and issubclass(found, boltmesh.BoltMeshError):
            bases = ", ".join(base.__name__ for base in found.__bases__)
            yield f"{name}({bases}) exits with {found.exit_code}"


def _registered() -> Iterator[str]:
    for name, entry in STRATEGIES.items():
        arguments = ", ".join(f"{key}={value!r}" for key, value in entry.arguments.items())
        yield f"{name}: {entry.class_name}({arguments})"
        yield f"    {entry.description}"
        if entry.class_name not in boltmesh.__all__:
            yield from _members(entry.load())


def _config(section: type[Any], prefix: str = "") -> Iterator[str]:
    """A line for each key: its type, its default, and what limits it."""
    hints = get_type_hints(section)
    for key in fields(section):
        hint = hints[key.name]
        if is_dataclass(hint) and isinstance(hint, type):
            yield from _config(hint, f"{prefix}{key.name}.")
            continue
        default = key.default_factory() if key.default_factory is not MISSING else key.default
        limits = {name: value for name, value in key.metadata.items() if name != "example"}
        more = "".join(f", {name} {value!r}" for name, value in sorted(limits.items()))
        yield f"{prefix}{key.name}: {spell(hint)} = {default!r}{more}"


def _variables() -> Iterator[str]:
    texts = [path.read_text(encoding="utf-8") for path in (ROOT / "docs").glob("*.md")]
    yield from sorted(set(re.findall(r"BOLTMESH_[A-Z_]+", "\n".join(texts))))


def _commands(command: click.Command, path: str) -> Iterator[str]:
    context = click.Context(
        command, info_name=path, terminal_width=WIDTH, max_content_width=WIDTH,
        help_option_names=["-h", "--help"],
    )  # fmt: skip
    yield "\n".join(line.rstrip() for line in command.get_help(context).splitlines())
    if isinstance(command, click.Group):
        for name, inner in command.commands.items():
            yield ""
            yield from _commands(inner, f"{path} {name}")


def _formats() -> Iterator[str]:
    """What a short run of one rank writes: names of files, keys in them, numbers of versions."""
    with tempfile.TemporaryDirectory(prefix="interface-") as folder:
        run_ranks(_train, 1, folder)
        checkpoint, telemetry = Path(folder, "sharded"), Path(folder, "telemetry")
        yield f"files of a checkpoint directory: {_names(checkpoint)}"
        manifest = json.loads((checkpoint / "manifest.json").read_text())
        yield f"manifest.json: {_shape(manifest)}"
        rest = torch.load(checkpoint / "meta.pt", weights_only=False)
        yield f"meta.pt: {', '.join(sorted(rest))}"
        yield f"boltmesh in it: {', '.join(sorted(rest['boltmesh']))}"
        whole = torch.load(Path(folder, "whole"), weights_only=False)
        yield f"checkpoint in one file: {', '.join(sorted(whole))}"
        (job,) = telemetry.iterdir()
        yield f"files of a job's telemetry: {_names(job)}"
        yield f"job.json: {', '.join(sorted(json.loads((job / 'job.json').read_text())))}"
        (rank,) = job.glob("rank*.bin")
        magic, version = struct.unpack_from("<8sI", rank.read_bytes())
        yield f"a rank's telemetry: {magic.decode()} version {version}, {rank.stat().st_size} bytes"
        recording = Path(folder, "recording")
        _run("record", str(job), str(recording))
        words = recording.read_bytes().splitlines()[0].decode().split()
        yield f"a recording begins with: {' '.join(words[:-1])} and the version of boltmesh"
        report = json.loads(_run("top", "--once", "--json", str(job)))
        yield f"top --json: schema {report['schema']}; {', '.join(sorted(report))}"


def _run(*arguments: str) -> str:
    """What a command prints."""
    with redirect_stdout(io.StringIO()) as printed:
        assert run_command(list(arguments)) == 0, printed.getvalue()
    return printed.getvalue()


def _train(rank: int, world_size: int, folder: str) -> None:
    os.environ["BOLTMESH_RUN_DIR"] = str(Path(folder, "telemetry"))
    for name, strategy in (("sharded", "bolt_zero3"), ("whole", "bolt_ddp")):
        seed_everything(1, verbose=False)
        arguments = {"telemetry": name == "sharded"}
        trainer = Trainer(
            accelerator="cpu", devices=1, max_steps=1, logger=False, enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False,
            strategy=build_strategy(strategy, **arguments),
        )  # fmt: skip
        trainer.fit(Regression(), regression_data(8, 4))
        trainer.save_checkpoint(Path(folder, name))


def _names(folder: Path) -> str:
    return ", ".join(sorted(str(path.relative_to(folder)) for path in folder.rglob("*")))


def _shape(value: Any) -> Any:
    """Keys and types of a JSON document; the number of its format as it is."""
    if isinstance(value, Mapping):
        return {
            key: each if key == "format" else _shape(each) for key, each in sorted(value.items())
        }
    return type(value).__name__


def main() -> None:
    INTERFACE.write_text(interface(), encoding="utf-8")
    print(f"{INTERFACE} is rewritten: read its difference before you commit it.")


if __name__ == "__main__":
    main()
