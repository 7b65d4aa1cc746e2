"""The command: checks what is asked, runs the jobs, and writes the table."""

import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from boltmesh.bench.rows import BenchRow, compare_losses
from boltmesh.bench.running import run_variant
from boltmesh.bench.table import as_csv, as_markdown, as_text
from boltmesh.bench.variant import PLANNED, Variant, parse_variants
from boltmesh.configs.load import find, load
from boltmesh.errors import ConfigError
from boltmesh.preflight import check_config

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from boltmesh.launch.placement import Placement

_FULL_PRECISION = ("32", "64")

MEANINGS = (
    "Memory is the most of each kind that one rank had at the end of a step; bytes are what one "
    "rank moved in a step; a bubble is 1 - busy / window of the pipeline's ranks. The loss is the "
    "mean over the data ranks."
)


def bench(
    config: str,
    overrides: Sequence[str],
    *,
    strategies: str,
    steps: int,
    warmup: int,
    rounds: int,
    output: Path | None,
    plan: Callable[[str, Sequence[str]], list[Variant]],
) -> int:
    """Run each strategy, print the table, and return 1 when none has run.

    ``plan`` gives the rows of ``PLANNED``.

    Raises:
        ConfigError: When the config cannot run, or something given is wrong.
    """
    variants = parse_variants(strategies)
    loaded, source = load(config, overrides), str(find(config))
    placement = check_config(loaded, source=source, is_fit=True, for_show=False)
    if placement.launcher is not None:
        raise ConfigError(
            f"boltmesh bench starts the ranks of each strategy itself, and "
            f"{placement.launcher.name} has started this one. Run it without it."
        )
    if output is not None and not output.parent.is_dir():
        raise ConfigError(f"--output: {output.parent} is no folder. Make it, or choose another.")
    if any(each.strategy == PLANNED for each in variants):
        rest = [each for each in variants if each.strategy != PLANNED]
        variants = [*plan(config, overrides), *rest]
    rows = {each.label: BenchRow(each.label) for each in variants}
    was_stopped = False
    try:
        for number in range(rounds):
            # Back and forth, so that what drifts, such as heat, is shared by all.
            order = variants if number % 2 == 0 else variants[::-1]
            for variant in order:
                shown = f", round {number + 1} of {rounds}" if rounds > 1 else ""
                _tell(f"boltmesh bench: {variant.label}{shown}")
                _run(variant, rows[variant.label], config, overrides, loaded, placement,
                     steps=steps, warmup=warmup)  # fmt: skip
    except KeyboardInterrupt:
        was_stopped = True
    table = list(rows.values())
    compare_losses(table, is_coarse=not loaded.trainer.precision.startswith(_FULL_PRECISION))
    print(as_text(table, last_step=warmup + steps))
    if output is not None and any(row.runs or row.notes for row in table):
        about = _about(table, loaded, placement, [config, *overrides], steps=steps, warmup=warmup)
        for path in _write(table, output, about, last_step=warmup + steps):
            print(f"written: {path}")
    if was_stopped:
        return 128 + signal.SIGINT
    return 0 if any(row.runs for row in table) else 1


def _run(
    variant: Variant,
    row: BenchRow,
    config: str,
    overrides: Sequence[str],
    loaded: "DictConfig",
    placement: "Placement",
    *,
    steps: int,
    warmup: int,
) -> None:
    obstacle = variant.obstacle(placement.accelerator, placement.num_local_ranks)
    if obstacle is not None:
        row.is_refused = True
        if not row.notes:
            row.notes.append(f"not possible here: {obstacle}")
        return
    chosen = placement.devices
    devices = range(chosen) if isinstance(chosen, int) else chosen
    line = variant.overrides(loaded, overrides, devices)
    row.add(run_variant(variant, config, line, steps=steps, warmup=warmup))


def _about(
    rows: Sequence[BenchRow],
    config: "DictConfig",
    placement: "Placement",
    line: Sequence[str],
    *,
    steps: int,
    warmup: int,
) -> list[str]:
    """How it was measured."""
    versions = next((run.versions for row in rows for run in row.runs), {})
    told = ", ".join(f"{name} {version}" for name, version in sorted(versions.items()))
    jobs = max((len(row.runs) for row in rows), default=0)
    ranks = (
        f"boltmesh bench {' '.join(line)}: {placement.num_local_ranks} ranks on "
        f"{placement.accelerator}, precision {config.trainer.precision}. {told}."
    )
    counted = (
        f"{steps} optimizer steps after {warmup} that do not count, in {jobs} "
        f"job{'s' if jobs != 1 else ''} for each strategy. The time of a step is that of the rank "
        f"that took longest; samples and tokens are those of the job, by the median time."
    )
    return [ranks, counted, MEANINGS]


def _write(
    rows: Sequence[BenchRow], output: Path, about: Sequence[str], *, last_step: int
) -> list[Path]:
    stem = output.with_suffix("") if output.suffix in {".md", ".csv"} else output
    contents = {".md": as_markdown(rows, last_step=last_step, about=about), ".csv": as_csv(rows)}
    written = []
    for suffix, content in contents.items():
        path = stem.with_name(stem.name + suffix)
        partial = path.with_name(path.name + ".partial")
        partial.write_text(content, encoding="utf-8")
        os.replace(partial, path)
        written.append(path)
    return written


def _tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
