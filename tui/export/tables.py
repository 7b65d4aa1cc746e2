"""A job as tables: CSV in long form, one row for each thing that was measured.

Every row has what is needed to join and to filter it. What is not known is an empty cell.
"""

import csv
import io
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final

import msgspec

from boltmesh.axes import AXES
from boltmesh.telemetry.snapshot import PHASES, JobSnapshot
from boltmesh.tui.metrics.figures import figures
from boltmesh.tui.sanitize import clean
from boltmesh.tui.sources.live import Observation
from boltmesh.tui.state import fold

Cell = str | int | float | None
Row = tuple[Cell, ...]

_FORMULA: Final = frozenset("=+-@\t\r")


class ExportTable(msgspec.Struct, frozen=True):
    """One kind of row."""

    columns: tuple[str, ...]
    rows: Callable[[Observation], Iterable[Row]]
    order: int | None = None
    """Index of the column that grows among the rows with equal columns before it, in a table of
    past records; None if each observation has all rows of the table."""


def _steps(seen: Observation) -> Iterator[Row]:
    for rank in seen.job.ranks:
        for step in rank.steps:
            phases = {phase.name: phase.seconds for phase in step.phases}
            yield (
                seen.job.id,
                rank.rank,
                step.index,
                step.global_step,
                step.epoch,
                step.end_time,
                step.seconds,
                step.loss,
                step.samples,
                step.tokens,
                *(phases.get(name) for name in PHASES),
            )


def _metrics(seen: Observation) -> Iterator[Row]:
    for point in seen.job.history:
        yield seen.job.id, point.name, point.global_step, point.value


def _collectives(seen: Observation) -> Iterator[Row]:
    expected = _expected(seen.job)
    for rank in seen.job.ranks:
        for each in rank.collectives:
            yield (
                seen.job.id,
                seen.time,
                rank.rank,
                each.axis,
                each.group,
                each.operator,
                each.calls,
                each.payload_bytes,
                each.calls_per_step,
                each.bytes_per_step,
                expected.get((each.axis, each.operator)),
                each.seconds_per_step,
            )


def _expected(job: JobSnapshot) -> dict[tuple[str, str], float]:
    sums: dict[tuple[str, str], float] = {}
    for each in job.expected:
        key = (each.axis, each.operator)
        sums[key] = sums.get(key, 0.0) + each.payload_bytes
    return sums


def _ranks(seen: Observation) -> Iterator[Row]:
    for rank in seen.job.ranks:
        memory = rank.memory
        yield (
            seen.job.id,
            seen.time,
            rank.rank,
            *(rank.coordinates.get(axis) for axis in AXES),
            rank.host,
            rank.pid,
            rank.device,
            rank.state,
            rank.phase,
            rank.global_step,
            rank.epoch,
            rank.last_seen or None,
            rank.samples_per_second,
            rank.tokens_per_second,
            memory.host_rss_bytes,
            memory.device_allocated_bytes,
            memory.device_reserved_bytes,
            memory.device_peak_bytes,
            rank.error,
        )


def _offload(seen: Observation) -> Iterator[Row]:
    for rank in seen.job.ranks:
        for each in rank.offload:
            yield (
                seen.job.id,
                seen.time,
                rank.rank,
                each.place,
                each.direction,
                each.calls,
                each.moved_bytes,
                each.bytes_per_step,
                each.seconds_per_step,
                each.bytes_per_second,
            )


def _figures(seen: Observation) -> Iterator[Row]:
    for name, figure in msgspec.structs.asdict(figures(fold(None, seen))).items():
        yield (
            seen.job.id,
            seen.time,
            name,
            figure.value,
            figure.last,
            figure.age_s,
            figure.definition,
        )


TABLES: Final[dict[str, ExportTable]] = {
    "steps": ExportTable(
        (
            *("job", "rank", "index", "global_step", "epoch", "end_time", "seconds"),
            *("loss", "samples", "tokens"),
            *(f"{name}_s" for name in PHASES),
        ),
        _steps,
        order=2,
    ),
    "metrics": ExportTable(("job", "metric", "global_step", "value"), _metrics, order=2),
    "collectives": ExportTable(
        (
            *("job", "time", "rank", "axis", "group", "operator", "calls", "payload_bytes"),
            *("calls_per_step", "bytes_per_step", "expected_bytes_per_step", "seconds_per_step"),
        ),
        _collectives,
    ),
    "ranks": ExportTable(
        (
            *("job", "time", "rank", *AXES, "host", "pid", "device"),
            *("state", "phase", "global_step", "epoch", "last_seen"),
            *("samples_per_second", "tokens_per_second", "host_rss_bytes"),
            *("device_allocated_bytes", "device_reserved_bytes", "device_peak_bytes", "error"),
        ),
        _ranks,
    ),
    "offload": ExportTable(
        (
            *("job", "time", "rank", "place", "direction", "calls", "moved_bytes"),
            *("bytes_per_step", "seconds_per_step", "bytes_per_second"),
        ),
        _offload,
    ),
    "figures": ExportTable(
        ("job", "time", "figure", "value", "last", "age_s", "definition"), _figures
    ),
}


def csv_text(name: str, looks: Iterable[Observation]) -> Iterator[str]:
    """Yield a table as CSV, the titles first.

    Args:
        name: One of ``TABLES``.
        looks: The observations, in their order. A record is written once, though many observations
            have it; a table whose rows are in every observation is written from the last one.
    """
    table = TABLES[name]
    yield _line(table.columns)
    if table.order is None:
        last = None
        for last in looks:  # noqa: B007 - the last one is wanted
            pass
        yield from map(_line, table.rows(last) if last is not None else ())
        return
    newest: dict[Row, Cell] = {}
    for seen in looks:
        for row in table.rows(seen):
            who = row[: table.order]
            before = newest.get(who)
            if before is None or row[table.order] > before:  # type: ignore[operator]
                newest[who] = row[table.order]
                yield _line(row)


def _line(row: Sequence[Cell]) -> str:
    buffer = io.StringIO()
    csv.writer(buffer, lineterminator="\n").writerow([_cell(value) for value in row])
    return buffer.getvalue()


def _cell(value: Cell) -> str | int | float | None:
    """Return a cell as it is written: numbers as they are, text so that no spreadsheet runs it."""
    if not isinstance(value, str):
        return value
    text = clean(value)
    return f"'{text}" if text[:1] in _FORMULA else text
