"""Commands that turn checkpoints into those of other programs, and back."""

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
from typing_extensions import override

from boltmesh.cli.signals import stopped_cleanly
from boltmesh.errors import ConfigError

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kKMGT]?)(i?)[bB]?")


class ByteSize(click.ParamType[int]):
    """A number of bytes as Hugging Face writes it: 5GB, 500MB, 2GiB."""

    name = "size"

    @override
    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, int):
            return value
        found = _SIZE.fullmatch(str(value).strip())
        if found is None:
            self.fail(f"{value!r} is no size. Write 5GB, 500MB or 2GiB.", param, ctx)
        number, unit, binary = found.groups()
        size = int(float(number) * (1024 if binary else 1000) ** " KMGT".index(unit.upper() or " "))
        if size < 1:
            self.fail(f"{value!r} is no size: it has to be at least one byte.", param, ctx)
        return size


class PathOrAddress(click.ParamType["str | Path"]):
    """A path, or an address that fsspec opens: a Path of one would lose a slash."""

    name = "path"

    @override
    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> str | Path:
        from boltmesh.strategies.checkpoint.storage.addresses import path_or_address

        return path_or_address(value)


@click.command()
@click.argument("checkpoint", type=PathOrAddress())
@click.option(
    "--to",
    "target",
    type=PathOrAddress(),
    required=True,
    help="A .ckpt file, a .safetensors file, or a folder for safetensors.",
)
@click.option(
    "--prefix",
    help="Prefix to remove from the names for safetensors, such as model.; '' removes nothing. "
    "[the attribute that holds the model, where there is one only]",
)
@click.option("--max-shard-size", type=ByteSize(), help="Largest size of a file in a folder. [5GB]")
@click.option(
    "--peft",
    "is_for_peft",
    is_flag=True,
    help="Adapters of peft alone, in a folder that PeftModel.from_pretrained loads.",
)
@click.option(
    "--hf",
    "hugging_face",
    type=click.Path(path_type=Path),
    help="A config.json of Hugging Face, or a folder with one: names and parts as in the model's "
    "own files, which from_pretrained and other programs load. All tensors are in memory.",
)
@click.option("--force", is_flag=True, help="Replace what is there.")
def export(
    checkpoint: str | Path,
    target: str | Path,
    prefix: str | None,
    max_shard_size: int | None,
    is_for_peft: bool,
    hugging_face: Path | None,
    force: bool,
) -> int:
    """Write CHECKPOINT for programs that know nothing of boltmesh.

    A .ckpt has everything, and plain Lightning loads it and resumes from it. safetensors have the
    weights, under the names of the model that the LightningModule holds: a .safetensors file, or a
    folder as Hugging Face has them. One tensor is in memory at a time.
    """
    from boltmesh.conversion.export_checkpoint import export as write
    from boltmesh.strategies.checkpoint.shard_reader import refusing_nonsense

    with stopped_cleanly(), refusing_nonsense(checkpoint), _Bar() as bar:
        lines = write(
            checkpoint,
            target,
            prefix=prefix,
            max_shard_bytes=max_shard_size,
            force=force,
            counted=bar.begin,
            is_for_peft=is_for_peft,
            hugging_face=hugging_face,
        )
    click.echo("\n".join(lines))
    return 0


@click.command("import")
@click.argument("source", type=PathOrAddress())
@click.option("--to", "target", type=PathOrAddress(), required=True, help="The directory to make.")
@click.option("--prefix", default="", help="Put before the names of safetensors, such as model.")
@click.option(
    "--tie",
    "ties",
    multiple=True,
    metavar="NAME=STORED",
    help="A second name of a tensor of safetensors, such as lm_head.weight=transformer.wte.weight.",
)
@click.option("--force", is_flag=True, help="Replace what is there.")
def import_command(
    source: str | Path, target: str | Path, prefix: str, ties: tuple[str, ...], force: bool
) -> int:
    """Make a checkpoint directory of SOURCE, which every layout loads shard by shard.

    SOURCE is a Lightning file, of which all is kept, or the weights of a model: a safetensors
    file, or a folder of them as Hugging Face has it. One tensor is in memory at a time.
    """
    from boltmesh.conversion.import_checkpoint import import_checkpoint
    from boltmesh.strategies.checkpoint.shard_reader import refusing_nonsense

    pairs = {}
    for each in ties:
        name, equals, kept = each.partition("=")
        if not (name and equals and kept):
            raise click.BadParameter(f"{each!r} is not NAME=STORED.", param_hint="--tie")
        pairs[name] = kept
    with stopped_cleanly(), refusing_nonsense(source):
        lines = import_checkpoint(source, target, prefix=prefix, ties=pairs, force=force)
    click.echo("\n".join(lines))
    return 0


@click.command()
@click.argument("paths", nargs=-1, required=True, type=PathOrAddress(), metavar="PATH...")
def verify(paths: tuple[str | Path, ...]) -> int:
    """Read every byte of checkpoints, recordings and exports, and print which are whole.

    PATH is one of them, or a folder of them, such as that of a run. Exit code 1 if one is not
    whole, or has no checksums.
    """
    from boltmesh.verify import verify as read_all

    num_whole = num_other = 0
    with stopped_cleanly():
        for found in read_all(paths):
            click.echo(str(found))
            num_whole += found.fault is None
            num_other += found.fault is not None
    if num_whole + num_other > 1:
        click.echo(f"{num_whole} whole, {num_other} not")
    return 1 if num_other else 0


@click.command()
@click.argument("runs", type=click.Path(path_type=Path), default=Path("runs"), metavar="[RUNS]")
@click.option("--dry-run", is_flag=True, help="Print what would be deleted, and delete nothing.")
@click.option(
    "--telemetry-days",
    type=click.FloatRange(min=0),
    default=7.0,
    show_default=True,
    help="Keep telemetry of jobs that have ended since so many days.",
)
def prune(runs: Path, dry_run: bool, telemetry_days: float) -> int:
    """Delete what killed runs have left, and telemetry of old jobs; print each with its bytes.

    RUNS is a folder of runs, as run.dir. Deleted are checkpoints that ModelCheckpoint has lost
    track of, unfinished saves, and runs without a step. Nothing of a run that is in use, never the
    newest whole checkpoint of a run, and no checkpoint with a name of your own.
    """
    from boltmesh.prune import find
    from boltmesh.tui import units

    if not runs.is_dir():
        raise ConfigError(f"{runs} is no folder of runs. Write that of run.dir, such as runs.")
    total = 0
    with stopped_cleanly():
        for found in find(runs, telemetry_days=telemetry_days):
            if found.remove is None:
                click.echo(f"kept       {found.path} ({found.what})")
                continue
            if not dry_run:
                found.remove()
            click.echo(f"{'would go' if dry_run else 'deleted':<10} {found}")
            total += found.num_bytes
    verb = "would be deleted" if dry_run else "deleted"
    click.echo(f"boltmesh: {units.traffic(total)} {verb}")
    return 0


class _Bar:
    """How far it is, on a terminal."""

    def __init__(self) -> None:
        self._bar: Any = None

    def __enter__(self) -> "_Bar":
        return self

    def __exit__(self, *error: object) -> None:
        if self._bar is not None:
            self._bar.__exit__(*error)

    def begin(self, num_bytes: int) -> Callable[[int], Any]:
        """Show it on a terminal; return the function that counts."""
        if not sys.stderr.isatty():
            return lambda _: None
        self._bar = click.progressbar(length=num_bytes, file=sys.stderr).__enter__()
        count: Callable[[int], Any] = self._bar.update
        return count
