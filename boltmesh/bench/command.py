"""The command: checks its arguments, runs the jobs, writes the table, as Markdown and CSV too.

A row of the table puts together the jobs of a strategy; losses are compared between rows.
"""

import csv
import io
import math
import os
import signal
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from boltmesh.axes import AXES
from boltmesh.bench.job import Ended, run_variant
from boltmesh.bench.measurement import BenchRun
from boltmesh.bench.variant import PLANNED, Variant, parse_variants
from boltmesh.configs.load import load, source_named
from boltmesh.errors import ConfigError
from boltmesh.preflight import check_config
from boltmesh.telemetry.snapshot import MEMORY_PLACES

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from boltmesh.launch.placement import Placement


LOSS_TOLERANCE = 1e-3
"""Relative, of the loss of the last step. Layouts add in another order, by which a few dozen steps
of Adam come apart by some 1e-5; a share of the data that is not the same shows as 1e-2 and more."""
COARSE_LOSS_TOLERANCE = 2e-2
"""Tolerance in 16-bit precision, whose rounding is a thousand times larger."""

PERCENT = 100


@dataclass
class BenchRow:
    """One strategy."""

    label: str
    runs: list[BenchRun] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    """Notes for the reader: why there are no figures, or why they are unusual."""
    is_refused: bool = False

    def add(self, ended: Ended) -> None:
        """Take in a job."""
        if ended.run is not None:
            self.runs.append(ended.run)
        if ended.reason is not None:
            kind = "" if ended.run is not None else "refused: " if ended.is_refused else "failed: "
            note = f"{kind}{ended.reason}"
            if note not in self.notes:
                self.notes.append(note)
        self.is_refused = self.is_refused or ended.is_refused

    @property
    def step_s(self) -> list[float]:
        """Times of the optimizer steps of all jobs, in seconds."""
        return [each for run in self.runs for each in run.step_s]

    def quartiles(self) -> tuple[float, float, float] | None:
        """Return lower quartile, median and upper quartile of the time of a step, in seconds."""
        times = self.step_s
        if not times:
            return None
        if len(times) == 1:
            return times[0], times[0], times[0]
        low, middle, high = statistics.quantiles(times, n=4, method="inclusive")
        return low, middle, high

    def per_second(self, items: float | None) -> float | None:
        """Items of an optimizer step, by its median time."""
        quartiles = self.quartiles()
        return None if items is None or quartiles is None else items / quartiles[1]

    def memory(self, kind: str, place: str) -> int | None:
        """The most bytes of a kind on one rank."""
        return max((run.memory.get((kind, place), 0) for run in self.runs), default=None)

    def bubble(self) -> float | None:
        """Median over all steps; None where nothing is a pipeline."""
        shares = [each for run in self.runs for each in run.bubble]
        return statistics.median(shares) if shares else None


def compare_losses(rows: Sequence[BenchRow], *, is_coarse: bool) -> None:
    """Note where layouts that saw the same data have another loss after the same steps.

    Layouts are compared if they share the data among as many data ranks.
    """
    tolerance = COARSE_LOSS_TOLERANCE if is_coarse else LOSS_TOLERANCE
    first: dict[tuple[int, int], tuple[str, float]] = {}
    for row in rows:
        for run in row.runs:
            if run.loss is None:
                continue
            key = run.mesh.get("data", 1), run.last_step
            label, loss = first.setdefault(key, (row.label, run.loss))
            if math.isclose(run.loss, loss, rel_tol=tolerance):
                continue
            where = f"that of {label}" if label != row.label else "its own first round"
            note = (
                f"LOSS DIFFERS: {run.loss:.6g} after step {run.last_step}, and {loss:.6g} is "
                f"{where} on the same data"
            )
            if note not in row.notes:
                row.notes.append(note)


MILLI, MEGA = 1e3, 1e6
FEW = 10

KINDS = ("parameters", "gradients", "optimizer", "activations")
GROUPS = (*AXES, "world")
"""Groups of ranks between which something moves."""


@dataclass(frozen=True)
class Column:
    """One column of what people read."""

    title: str
    cell: Callable[[BenchRow], str | None]
    """None where there is nothing to say; a column of which that is true in all rows is left
    out."""


def columns(last_step: int) -> list[Column]:
    """All there are.

    Args:
        last_step: After which the loss is given.
    """
    made = [
        Column("strategy", lambda row: row.label),
        Column("mesh", _mesh),
        Column("step ms", lambda row: _time(row, 1)),
        Column("quartiles", _quartiles),
        Column("samples/s", lambda row: _number(row.per_second(_items(row, "samples")))),
        Column("tokens/s", lambda row: _number(row.per_second(_items(row, "tokens")))),
    ]
    for place in MEMORY_PLACES:
        for kind in KINDS:
            title = f"{kind} MB" if place == "host" else f"{kind} MB ({place})"
            made.append(Column(title, _memory(kind, place)))
    made += [
        Column("device peak MB", lambda row: _megabytes(_largest(row, "device_bytes"))),
        Column("resident MB", lambda row: _megabytes(_largest(row, "host_bytes"))),
    ]
    for axis in GROUPS:
        made.append(Column(f"{axis} MB/step", _traffic(axis)))
    return [
        *made,
        Column("bubble %", _bubble),
        Column(f"loss at {last_step}", _loss),
        Column("note", lambda row: "; ".join(row.notes) or None),
    ]


def as_text(rows: Sequence[BenchRow], *, last_step: int) -> str:
    """For a terminal: aligned, and the notes below, for they are long."""
    titles, lines = _cells(rows, last_step)
    shown = [at for at, title in enumerate(titles) if title != "note"]
    table = [[line[at] for at in shown] for line in [titles, *lines]]
    widths = [max(len(line[at]) for line in table) for at in range(len(shown))]
    text = [
        "  ".join(
            [
                line[0].ljust(widths[0]),
                *(cell.rjust(width) for cell, width in zip(line[1:], widths[1:], strict=True)),
            ]
        ).rstrip()
        for line in table
    ]
    notes = [f"  {row.label}: {note}" for row in rows for note in row.notes]
    return "\n".join([*text, *notes])


def as_markdown(rows: Sequence[BenchRow], *, last_step: int, about: Sequence[str]) -> str:
    """For a document; ``about`` are the lines that say how it was measured."""
    titles, lines = _cells(rows, last_step)
    rule = ["---", *("---:" if each != "note" else "---" for each in titles[1:])]
    table = ["| " + " | ".join(map(_escaped, each)) + " |" for each in [titles, rule, *lines]]
    return "\n".join([*table, "", *(f"- {each}" for each in about), ""])


def as_csv(rows: Sequence[BenchRow]) -> str:
    """For programs: one line for each strategy, in seconds and bytes, empty where not known."""
    file = io.StringIO()
    names = [
        "strategy", *AXES, "jobs", "steps", "step_s_lower_quartile",
        "step_s_median", "step_s_upper_quartile", "samples_per_s", "tokens_per_s",
        *(f"{kind}_bytes_{place}" for place in MEMORY_PLACES for kind in KINDS),
        "device_peak_bytes", "resident_bytes", *(f"{axis}_bytes_per_step" for axis in GROUPS),
        "bubble_share", "last_step", "loss", "is_refused", "note",
    ]  # fmt: skip
    writer = csv.DictWriter(file, names, lineterminator="\n")
    writer.writeheader()
    for row in rows:
        writer.writerow(_values(row))
    return file.getvalue()


def _values(row: BenchRow) -> dict[str, object]:
    values: dict[str, object] = {
        "strategy": row.label,
        "jobs": len(row.runs),
        "steps": len(row.step_s),
        "is_refused": row.is_refused,
        "note": "; ".join(row.notes),
    }
    quartiles = row.quartiles()
    if quartiles is None:
        return values
    newest = row.runs[-1]
    low, middle, high = quartiles
    values |= {axis: newest.mesh.get(axis, 1) for axis in AXES}
    values |= {
        "step_s_lower_quartile": low,
        "step_s_median": middle,
        "step_s_upper_quartile": high,
        "samples_per_s": row.per_second(newest.samples),
        "tokens_per_s": row.per_second(newest.tokens),
        "device_peak_bytes": _largest(row, "device_bytes"),
        "resident_bytes": _largest(row, "host_bytes"),
        "bubble_share": row.bubble(),
        "last_step": newest.last_step,
        "loss": newest.loss,
    }
    for place in MEMORY_PLACES:
        values |= {f"{kind}_bytes_{place}": row.memory(kind, place) for kind in KINDS}
    return values | {f"{axis}_bytes_per_step": _axis(row, axis) for axis in GROUPS}


def _cells(rows: Sequence[BenchRow], last_step: int) -> tuple[list[str], list[list[str]]]:
    made = [(each.title, [each.cell(row) for row in rows]) for each in columns(last_step)]
    kept = [(title, cells) for title, cells in made if any(cells)]
    lines = [[cells[at] or "-" for _, cells in kept] for at in range(len(rows))]
    return [title for title, _ in kept], lines


def _mesh(row: BenchRow) -> str | None:
    if not row.runs:
        return None
    named = [f"{axis} {size}" for axis, size in row.runs[-1].mesh.items() if size > 1]
    return " x ".join(named) or "one process"


def _time(row: BenchRow, which: int) -> str | None:
    quartiles = row.quartiles()
    return None if quartiles is None else f"{MILLI * quartiles[which]:.1f}"


def _quartiles(row: BenchRow) -> str | None:
    quartiles = row.quartiles()
    return None if quartiles is None else f"{_time(row, 0)} to {_time(row, 2)}"


def _items(row: BenchRow, what: str) -> float | None:
    found: float | None = getattr(row.runs[-1], what) if row.runs else None
    return found


def _largest(row: BenchRow, what: str) -> int | None:
    known = [value for run in row.runs if (value := getattr(run, what)) is not None]
    return max(known, default=None)


def _memory(kind: str, place: str) -> Callable[[BenchRow], str | None]:
    # Zero of a place that is not used is not worth a column.
    return lambda row: _megabytes(row.memory(kind, place) or None)


def _axis(row: BenchRow, axis: str) -> float | None:
    known = [run.axis_bytes[axis] for run in row.runs if axis in run.axis_bytes]
    return max(known, default=None)


def _traffic(axis: str) -> Callable[[BenchRow], str | None]:
    def cell(row: BenchRow) -> str | None:
        moved = _axis(row, axis)
        return None if not moved else _mega(moved)

    return cell


def _bubble(row: BenchRow) -> str | None:
    share = row.bubble()
    return None if share is None else f"{PERCENT * share:.1f}"


def _loss(row: BenchRow) -> str | None:
    losses = [run.loss for run in row.runs if run.loss is not None]
    return f"{losses[-1]:.5f}" if losses else None


def _megabytes(count: int | None) -> str | None:
    return None if count is None else _mega(count)


def _mega(count: float) -> str:
    """In millions, with as many decimals as small models need."""
    number = count / MEGA
    return f"{number:,.1f}" if number >= FEW else f"{number:.3f}"


def _number(value: float | None) -> str | None:
    return None if value is None else f"{value:,.0f}" if value >= PERCENT else f"{value:.2f}"


def _escaped(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


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
    loaded, source = load(config, overrides), source_named(config, overrides)
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
            # Back and forth, so that a drift, such as heat, affects all of them.
            order = variants if number % 2 == 0 else variants[::-1]
            for variant in order:
                shown = f", round {number + 1} of {rounds}" if rounds > 1 else ""
                _print_progress(f"boltmesh bench: {variant.label}{shown}")
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
    versions_text = ", ".join(f"{name} {version}" for name, version in sorted(versions.items()))
    jobs = max((len(row.runs) for row in rows), default=0)
    ranks = (
        f"boltmesh bench {' '.join(line)}: {placement.num_local_ranks} ranks on "
        f"{placement.accelerator}, precision {config.trainer.precision}. {versions_text}."
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


def _print_progress(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
