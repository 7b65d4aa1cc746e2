"""One line for each process of the job on this host, under one of the host itself."""

from boltmesh.tui import units
from boltmesh.tui.panels.devices import ProcessRow, host_reading, process_rows, share
from boltmesh.tui.render.line import Line, Role
from boltmesh.tui.render.ranks import NEARLY_FULL
from boltmesh.tui.render.style import Style, heading, labelled, sentence, wrap_facts
from boltmesh.tui.render.table import AS_IT_COMES, Cell, Column, browse
from boltmesh.tui.state import State
from boltmesh.tui.view import Cells, TableView, arrange_rows

COLUMNS = ("rank", "pid", "host", "CPU", "memory", "shared", "threads", "disk read", "disk written")
"""Titles that the table can be sorted by. CPU counts in percent of one core, disks in bytes a
second."""

ROWS_BEFORE_HOST = 3
"""Where fewer lines are left for the processes, the host is told in one line or not at all."""


def draw_processes(
    state: State, width: int, height: int, look: Style, *, table: TableView = AS_IT_COMES
) -> list[Line]:
    """The host in a line or two, and the processes that the filter leaves."""
    every, rows = process_rows(state), shown_processes(state, table)
    lines = [heading("processes", width, look)] if look.has_headings and height >= 2 else []
    top = len(lines)
    room = max(0, height - top)
    host = _host(state, width)
    host = host[: max(0, room - 1 - min(len(rows), ROWS_BEFORE_HOST))]
    if not every:
        why = sentence(_why_none(state), width, look, role="muted")
        return [*lines, *host, *why][: max(0, height)]
    seen = browse(_columns(), rows, _cells, width, room - 1 - len(host), look, table)
    if top:
        lines = [heading("processes", width, look, right=seen.hidden)]
    lines += [*host, seen.header, *seen.lines]
    return lines[: max(0, height)]


def shown_processes(state: State, table: TableView) -> list[ProcessRow]:
    """Return the rows in the order in which they are drawn, which ``TableView.selected`` counts."""
    return arrange_rows(process_rows(state), cells_of, table)


def cells_of(row: ProcessRow) -> Cells:
    """Return a row as it is filtered and sorted."""
    reading = row.reading
    return {
        "rank": row.rank,
        "pid": reading.pid,
        "host": reading.name,
        "CPU": reading.utilization_percent,
        "memory": reading.memory_used_bytes,
        "shared": reading.shared_memory_bytes,
        "threads": reading.num_threads,
        "disk read": reading.disk_read_bytes_per_second,
        "disk written": reading.disk_written_bytes_per_second,
    }


def _why_none(state: State) -> str:
    if not state.job.ranks:
        return "no ranks yet"
    if any(rank.state in {"starting", "running"} for rank in state.job.ranks):
        return "no rank runs on this host: processes are read where they are"
    return "the processes of this job have ended"


def _columns() -> list[Column]:
    return [
        Column("rank", is_number=True),
        Column("pid", is_number=True, rank=2),
        Column("host", rank=6, shrinks_to=8),
        Column("CPU", is_number=True, steady_width=5),
        Column("memory", is_number=True, steady_width=8),
        Column("shared", is_number=True, rank=5, steady_width=8),
        Column("threads", is_number=True, rank=4),
        Column("disk read", is_number=True, rank=3, steady_width=9),
        Column("disk written", is_number=True, rank=3, steady_width=9),
    ]


def _cells(row: ProcessRow) -> list[Cell]:
    reading = row.reading
    return [
        str(row.rank),
        units.UNKNOWN if reading.pid is None else str(reading.pid),
        Line(reading.name, "muted"),
        units.percent(reading.utilization_percent),
        units.memory(reading.memory_used_bytes),
        Line(units.memory(reading.shared_memory_bytes), "muted"),
        units.count(reading.num_threads),
        _rate(reading.disk_read_bytes_per_second),
        _rate(reading.disk_written_bytes_per_second),
    ]


def _rate(value: float | None) -> str:
    return units.UNKNOWN if value is None else f"{units.traffic(value)}/s"


def _host(state: State, width: int) -> list[Line]:
    """The host: cores, memory, swap, and the disk of the run directory."""
    host = host_reading(state)
    if host is None:
        return []
    used = share(host.memory_used_bytes, host.memory_total_bytes)
    left = share(host.disk_free_bytes, host.disk_total_bytes)
    cores = "" if host.num_cores is None else f" of {host.num_cores} cores"
    parts = [
        labelled("host", host.name, "strong"),
        labelled("CPU", units.percent(host.utilization_percent) + cores),
        labelled("memory", _of(host.memory_used_bytes, host.memory_total_bytes), _warns(used)),
    ]
    if host.swap_total_bytes:
        swap: Role = "warn" if host.swap_used_bytes else "text"
        parts.append(labelled("swap", _of(host.swap_used_bytes, host.swap_total_bytes), swap))
    if host.disk_folder is not None:
        free = f"{units.memory(host.disk_free_bytes)} free of {units.memory(host.disk_total_bytes)}"
        role = _warns(None if left is None else 1 - left)
        parts.append(labelled(f"disk of {host.disk_folder}", free, role))
    return wrap_facts(parts, width)


def _of(used: int | None, total: int | None) -> str:
    return f"{units.memory(used)} of {units.memory(total)}"


def _warns(used: float | None) -> Role:
    return "warn" if used is not None and used >= NEARLY_FULL else "text"
