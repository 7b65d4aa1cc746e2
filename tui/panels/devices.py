"""GPUs and processes of the job on this host, a line for each, and the host itself."""

from collections.abc import Sequence

import msgspec

from boltmesh.tui import units
from boltmesh.tui.devices import DeviceReading
from boltmesh.tui.devices.reading import NO_LIMIT, POWER_LIMIT
from boltmesh.tui.metrics.status import rates_are_current
from boltmesh.tui.render.bars import MEMORY, UTILISATION, bar
from boltmesh.tui.render.line import Line, Role
from boltmesh.tui.render.ranks import NEARLY_FULL
from boltmesh.tui.render.style import Style, heading, labelled, sentence, wrap_facts
from boltmesh.tui.render.table import AS_IT_COMES, Cell, Column, browse, selected_row
from boltmesh.tui.state import State
from boltmesh.tui.view import Cells, TableView, arrange_rows


class GpuRow(msgspec.Struct, frozen=True):
    """One GPU of the job."""

    device: str
    """Its name on its first rank, such as ``cuda:1``."""
    ranks: tuple[int, ...]
    reading: DeviceReading
    foreign_pids: tuple[int, ...]
    """Processes on it that are not of this job; empty too where the driver does not tell."""

    @property
    def memory_share(self) -> float | None:
        """Used over total."""
        return share(self.reading.memory_used_bytes, self.reading.memory_total_bytes)


class ProcessRow(msgspec.Struct, frozen=True):
    """The process of one rank."""

    rank: int
    reading: DeviceReading


def gpu_rows(state: State) -> list[GpuRow]:
    """Return the GPUs in the order of their ranks."""
    names = {rank.rank: rank.device.partition(" (")[0] for rank in state.job.ranks}
    own = {rank.pid for rank in state.job.ranks if rank.pid is not None}
    rows = []
    for reading in state.devices:
        if reading.kind != "gpu":
            continue
        pids = [process.pid for process in reading.processes or ()]
        # In a container NVML gives the host's numbers; if none is known, none can be attributed.
        is_known = any(pid in own for pid in pids)
        rows.append(
            GpuRow(
                device=names.get(min(reading.ranks, default=-1), ""),
                ranks=reading.ranks,
                reading=reading,
                foreign_pids=tuple(pid for pid in pids if is_known and pid not in own),
            )
        )
    return sorted(rows, key=lambda row: min(row.ranks, default=-1))


def process_rows(state: State) -> list[ProcessRow]:
    """Return the processes in the order of their ranks."""
    rows = [
        ProcessRow(reading.ranks[0], reading)
        for reading in state.devices
        if reading.kind == "process" and reading.ranks
    ]
    return sorted(rows, key=lambda row: row.rank)


def host_reading(state: State) -> DeviceReading | None:
    """Return the reading of this host, if ranks run on it."""
    return next((reading for reading in state.devices if reading.kind == "host"), None)


def share(part: float | None, whole: float | None) -> float | None:
    """Return ``part`` of ``whole``, where both are known and the whole is not nothing."""
    return None if part is None or not whole else part / whole


COLUMNS = (
    "device",
    "ranks",
    "model",
    "util",
    "SM",
    "tensor",
    "memory",
    "power",
    "temp",
    "SM clock",
    "throttle",
    "NVLink",
    "PCIe",
    "ECC",
    "others",
)
"""Titles that the table can be sorted by. Shares count in percent, links in bytes a second."""

BARS_FROM_WIDTH = 130
BAR_WIDTH = 8
NEARLY_TOO_HOT_CELSIUS = 3.0
"""So close to where it slows down, a GPU's temperature warns."""


def draw_devices(
    state: State, width: int, height: int, look: Style, *, table: TableView = AS_IT_COMES
) -> list[Line]:
    """The GPUs that the filter leaves, and the selected one in full where there is room."""
    every, rows = gpu_rows(state), shown_devices(state, table)
    lines = [heading("devices", width, look)] if look.has_headings and height >= 2 else []
    top = len(lines)
    note = _note(state, every, width, look)
    if not every:
        return [*lines, *note][: max(0, height)]
    # The use of devices says nothing of a job that is stalled or has ended.
    is_running = rates_are_current(state)
    room = max(0, height - top - len(note))
    detail = _detail(rows, table, width, look)[: max(0, room - 1 - len(rows))]
    seen = browse(
        _columns(every),
        rows,
        lambda row: _cells(row, every, width, look, is_running=is_running),
        width,
        room - 1 - len(detail),
        look,
        table,
    )
    if top:
        lines = [heading("devices", width, look, right=seen.hidden)]
    lines += [*note, seen.header, *seen.lines]
    return [*lines, *detail][: max(0, height)]


def shown_devices(state: State, table: TableView) -> list[GpuRow]:
    """Return the rows in the order in which they are drawn, which ``TableView.selected`` counts."""
    return arrange_rows(gpu_rows(state), cells_of, table)


def cells_of(row: GpuRow) -> Cells:
    """Return a row as it is filtered and sorted."""
    reading = row.reading
    memory = row.memory_share
    return {
        "device": row.device,
        "ranks": row.ranks[0] if len(row.ranks) == 1 else ",".join(map(str, row.ranks)),
        "model": reading.name,
        "util": reading.utilization_percent,
        "SM": reading.sm_active_percent,
        "tensor": reading.tensor_active_percent,
        "memory": None if memory is None else 100 * memory,
        "power": reading.power_watts,
        "temp": reading.temperature_celsius,
        "SM clock": reading.sm_clock_mhz,
        "throttle": ", ".join(_limits(reading)),
        "NVLink": _sum(
            reading.nvlink_sent_bytes_per_second, reading.nvlink_received_bytes_per_second
        ),
        "PCIe": _sum(reading.pcie_sent_bytes_per_second, reading.pcie_received_bytes_per_second),
        "ECC": _sum(reading.ecc_corrected_errors, reading.ecc_uncorrected_errors),
        "others": len(row.foreign_pids),
    }


def _note(state: State, rows: Sequence[GpuRow], width: int, look: Style) -> list[Line]:
    """Say why there is no table, or why it is not whole."""
    host = host_reading(state)
    if host is not None and host.note:
        return sentence(host.note, width, look, role="warn")
    if rows:
        return []
    ranks = state.job.ranks
    if ranks and all(rank.device_uuid is None for rank in ranks):
        text = "the ranks have no GPU of their own: see the processes"
    elif host is None:
        text = "no rank runs on this host: devices are read where the ranks are"
    else:
        text = "no GPU reading"
    return sentence(text, width, look, role="muted")


def _columns(rows: Sequence[GpuRow]) -> list[Column]:
    """Return the columns that can have a figure here; the others are left out."""
    cells = [cells_of(row) for row in rows]
    columns = [
        Column("device", shrinks_to=6),
        Column("ranks", is_number=True, rank=2, shrinks_to=5),
        Column("model", rank=11, shrinks_to=8),
        Column("util", is_number=True, steady_width=4),
        Column("SM", is_number=True, rank=6, steady_width=4),
        Column("tensor", is_number=True, rank=5, steady_width=4),
        Column("memory", is_number=True, rank=1),
        Column("power", is_number=True, rank=3),
        Column("temp", is_number=True, rank=2),
        Column("SM clock", is_number=True, rank=6),
        Column("throttle", rank=4, shrinks_to=24),
        Column("NVLink", is_number=True, rank=7, steady_width=12),
        Column("PCIe", is_number=True, rank=8, steady_width=12),
        Column("ECC", is_number=True, rank=9),
        Column("others", is_number=True, rank=10),
    ]
    optional = {"SM", "tensor", "SM clock", "NVLink", "PCIe", "ECC"}
    has_others = any(row.foreign_pids for row in rows)
    return [
        column
        for column in columns
        if (column.title not in optional or any(each[column.title] is not None for each in cells))
        and (column.title != "others" or has_others)
    ]


def _cells(
    row: GpuRow, rows: Sequence[GpuRow], width: int, look: Style, *, is_running: bool
) -> list[Cell]:
    reading = row.reading
    has_bars = width >= BARS_FROM_WIDTH
    drawn: dict[str, Cell] = {
        "device": row.device or units.UNKNOWN,
        "ranks": ",".join(map(str, row.ranks)),
        "model": Line(reading.name.removeprefix("NVIDIA "), "muted"),
        "util": _utilization(reading, look, has_bar=has_bars, is_running=is_running),
        "SM": units.percent(reading.sm_active_percent),
        "tensor": units.percent(reading.tensor_active_percent),
        "memory": _memory(row, look, has_bar=has_bars, is_running=is_running),
        "power": of_limit(reading.power_watts, reading.power_limit_watts, "W"),
        "temp": _temperature(reading, look),
        "SM clock": of_limit(reading.sm_clock_mhz, reading.sm_clock_max_mhz, "MHz"),
        "throttle": _held_back(reading, look),
        "NVLink": both_ways(
            reading.nvlink_sent_bytes_per_second, reading.nvlink_received_bytes_per_second
        ),
        "PCIe": both_ways(
            reading.pcie_sent_bytes_per_second, reading.pcie_received_bytes_per_second
        ),
        "ECC": _ecc(reading, look),
        "others": Line(units.count(len(row.foreign_pids)), "warn" if row.foreign_pids else "text"),
    }
    return [drawn[column.title] for column in _columns(rows)]


def of_limit(value: float | None, limit: float | None, unit: str) -> str:
    """``640/700 W``."""
    if value is None:
        return units.UNKNOWN
    whole = f"{value:.0f}" if limit is None else f"{value:.0f}/{limit:.0f}"
    return f"{whole} {unit}"


def both_ways(sent: float | None, received: float | None) -> str:
    """Bytes a second out and in: ``21.4/0.31 GB``, in the unit of the larger one."""
    if sent is None and received is None:
        return units.UNKNOWN
    top = max(sent or 0.0, received or 0.0)
    scale, unit = next(
        ((scale, unit) for scale, unit in _UNITS if top >= scale), (_UNITS[-1][0], _UNITS[-1][1])
    )
    parts = [units.UNKNOWN if each is None else _short(each / scale) for each in (sent, received)]
    return f"{parts[0]}/{parts[1]} {unit}/s"


_UNITS = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1.0, "B"))


def _short(value: float) -> str:
    return f"{value:.0f}" if value >= 99.5 or value == 0 else f"{value:.1f}"


def _utilization(reading: DeviceReading, look: Style, *, has_bar: bool, is_running: bool) -> Line:
    percent = reading.utilization_percent
    text = units.percent(percent)
    if not has_bar or percent is None:
        return Line(text)
    role: Role = UTILISATION.level(percent / 100) if is_running else "chart"
    return bar(percent / 100, BAR_WIDTH, look.glyphs, role=role).add(text.rjust(5))


def _memory(row: GpuRow, look: Style, *, has_bar: bool, is_running: bool) -> Line:
    used, total = row.reading.memory_used_bytes, row.reading.memory_total_bytes
    if used is None:
        return Line(units.UNKNOWN)
    if not total:
        return Line(units.memory(used))
    role: Role = "warn" if used / total >= NEARLY_FULL else "text"
    text = f"{used / 2**30:.1f}/{total / 2**30:.1f} GiB"
    if not has_bar:
        return Line(text, role)
    level: Role = MEMORY.level(used / total) if is_running else "chart"
    return bar(used / total, BAR_WIDTH, look.glyphs, role=level).add(" " + text, role)


def _temperature(reading: DeviceReading, look: Style) -> Line:
    value, limit = reading.temperature_celsius, reading.temperature_limit_celsius
    text = of_limit(value, limit, "C")
    if value is None or limit is None or value < limit - NEARLY_TOO_HOT_CELSIUS:
        return Line(text)
    return Line(look.sign("!") + text, "bad" if value >= limit else "warn")


def _limits(reading: DeviceReading) -> tuple[str, ...]:
    return tuple(each for each in reading.throttle_reasons or () if each not in NO_LIMIT)


def _held_back(reading: DeviceReading, look: Style) -> Line:
    if reading.throttle_reasons is None:
        return Line(units.UNKNOWN, "muted")
    limits = _limits(reading)
    if limits and limits != (POWER_LIMIT,):
        return Line(look.sign("!") + ", ".join(limits), "warn")
    return Line(_reasons(reading), "muted")


def _reasons(reading: DeviceReading) -> str:
    reasons = reading.throttle_reasons
    return units.UNKNOWN if reasons is None else ", ".join(reasons) or "none"


def _ecc(reading: DeviceReading, look: Style) -> Line:
    corrected, lost = reading.ecc_corrected_errors, reading.ecc_uncorrected_errors
    if corrected is None and lost is None:
        return Line(units.UNKNOWN, "muted")
    text = f"{units.count(corrected)}/{units.count(lost)}"
    return Line(look.sign("!") + text, "bad") if lost else Line(text, "muted")


def _sum(first: float | None, second: float | None) -> float | None:
    return None if first is None and second is None else (first or 0) + (second or 0)


def _detail(rows: Sequence[GpuRow], table: TableView, width: int, look: Style) -> list[Line]:
    """The selected GPU in full."""
    row = selected_row(rows, table)
    if row is None:
        return []
    reading = row.reading
    busy = reading.memory_utilization_percent
    clock = of_limit(reading.memory_clock_mhz, reading.memory_clock_max_mhz, "MHz")
    power = share(reading.power_watts, reading.power_limit_watts)
    parts = [
        Line(f"{row.device} {reading.name}".strip(), "strong"),
        Line(reading.uuid or "", "muted"),
        labelled("memory in use by kernels", f"{units.percent(busy)} of the time"),
        labelled("memory bandwidth", units.percent(reading.memory_bandwidth_percent)),
        labelled("SM occupancy", units.percent(reading.sm_occupancy_percent)),
        labelled("memory clock", clock),
        labelled("power", units.percent(None if power is None else 100 * power) + " of its limit"),
        labelled("throttle", _reasons(reading)),
        labelled("ECC errors corrected/lost", _ecc(reading, look).plain),
    ]
    for process in reading.processes or ():
        whose = "not of this job" if process.pid in row.foreign_pids else "of this job"
        role: Role = "warn" if process.pid in row.foreign_pids else "text"
        name = f"process {process.pid} ({whose})"
        parts.append(labelled(name, units.memory(process.memory_bytes), role))
    return [Line(), *wrap_facts(parts, width)]


PROCESS_COLUMNS = (
    "rank",
    "pid",
    "host",
    "CPU",
    "memory",
    "shared",
    "threads",
    "disk read",
    "disk written",
)
"""Titles that the table can be sorted by. CPU counts in percent of one core, disks in bytes a
second."""

ROWS_BEFORE_HOST = 3
"""Where fewer lines are left for the processes, the host has one line or none."""


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
    seen = browse(
        _process_columns(), rows, _process_cells, width, room - 1 - len(host), look, table
    )
    if top:
        lines = [heading("processes", width, look, right=seen.hidden)]
    lines += [*host, seen.header, *seen.lines]
    return lines[: max(0, height)]


def shown_processes(state: State, table: TableView) -> list[ProcessRow]:
    """Return the rows in the order in which they are drawn, which ``TableView.selected`` counts."""
    return arrange_rows(process_rows(state), process_cells, table)


def process_cells(row: ProcessRow) -> Cells:
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
    if any(rank.is_alive for rank in state.job.ranks):
        return "no rank runs on this host: processes are read where they are"
    return "the processes of this job have ended"


def _process_columns() -> list[Column]:
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


def _process_cells(row: ProcessRow) -> list[Cell]:
    reading = row.reading
    return [
        str(row.rank),
        units.UNKNOWN if reading.pid is None else str(reading.pid),
        Line(reading.name, "muted"),
        units.percent(reading.utilization_percent),
        units.memory(reading.memory_used_bytes),
        Line(units.memory(reading.shared_memory_bytes), "muted"),
        units.count(reading.num_threads),
        units.bandwidth(reading.disk_read_bytes_per_second),
        units.bandwidth(reading.disk_written_bytes_per_second),
    ]


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
