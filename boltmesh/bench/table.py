"""The table, for a terminal, as Markdown and as CSV."""

import csv
import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from boltmesh.axes import AXES
from boltmesh.bench.rows import PERCENT, BenchRow

MILLI, MEGA = 1e3, 1e6
FEW = 10

KINDS = ("parameters", "gradients", "optimizer", "activations")
PLACES = ("device", "host", "disk")
GROUPS = (*AXES, "world")
"""Of ranks, between which something moves."""


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
    for place in PLACES:
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
        *(f"{kind}_bytes_{place}" for place in PLACES for kind in KINDS),
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
    for place in PLACES:
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
