"""The tables of GPUs and processes: what they show, warn of, sort and filter."""

from typing import Any

import pytest

from boltmesh.tui.demo import Scenario
from boltmesh.tui.devices import DeviceReading, GpuProcess
from boltmesh.tui.panels.devices import (
    COLUMNS,
    PROCESS_COLUMNS,
    both_ways,
    draw_devices,
    draw_processes,
    shown_devices,
    shown_processes,
)
from boltmesh.tui.render.style import ASCII, UNICODE, Style
from boltmesh.tui.sources.live import Observation
from boltmesh.tui.state import State, fold
from boltmesh.tui.view import TableView
from tests.tui.samples import NOW, demo, job, rank

LOOK = Style(UNICODE)
GIB = 2**30


def gpu(number: int = 0, **changes: Any) -> DeviceReading:
    fields: dict[str, Any] = {
        "kind": "gpu",
        "ranks": (number,),
        "name": "NVIDIA H100",
        "uuid": f"GPU-{number}",
        "utilization_percent": 90.0,
        "memory_used_bytes": 40 * GIB,
        "memory_total_bytes": 80 * GIB,
        "temperature_celsius": 60.0,
        "temperature_limit_celsius": 87.0,
        "throttle_reasons": (),
    }
    return DeviceReading(**fields | changes)


def process(number: int = 0, **changes: Any) -> DeviceReading:
    return DeviceReading(kind="process", ranks=(number,), name="here", pid=1000 + number, **changes)


def seen(*devices: DeviceReading, num_ranks: int = 4) -> State:
    ranks = tuple(
        rank(at, device=f"cuda:{at} (NVIDIA H100)", device_uuid=f"GPU-{at}")
        for at in range(num_ranks)
    )
    return fold(None, Observation(NOW, job(ranks=ranks), devices))


def devices(state: State, width: int = 160, height: int = 20, **options: Any) -> list[str]:
    return _text(draw_devices(state, width, height, options.pop("look", LOOK), **options), width)


def processes(state: State, width: int = 160, height: int = 20, **options: Any) -> list[str]:
    return _text(draw_processes(state, width, height, options.pop("look", LOOK), **options), width)


def _text(lines: list[Any], width: int) -> list[str]:
    assert all(line.width <= width for line in lines)
    return [line.plain.rstrip() for line in lines]


def roles(lines: list[Any], text: str) -> set[str]:
    return {span.role for line in lines for span in line.spans if text in span.text}


def test_a_hot_gpu_stands_out_without_colour() -> None:
    state = fold(None, demo(scenario="straggler"))
    lines = draw_devices(state, 200, 20, LOOK)
    (hot,) = [line.plain for line in lines if "thermal" in line.plain]
    assert hot.startswith("cuda:5")
    assert "! 89/87 C" in hot
    assert "! HW thermal" in hot
    assert "1320/1980 MHz" in hot
    assert roles(lines, "89/87") == {"bad"}


@pytest.mark.parametrize(
    ("temperature", "role"), [(83.0, "text"), (84.5, "warn"), (87.0, "bad")]
)  # fmt: skip
def test_a_temperature_warns_before_the_limit(temperature: float, role: str) -> None:
    lines = draw_devices(seen(gpu(temperature_celsius=temperature)), 160, 9, LOOK)
    assert roles(lines, "/87 C") == {role}


def test_memory_that_is_nearly_full_and_lost_bits_warn() -> None:
    reading = gpu(memory_used_bytes=79 * GIB, ecc_corrected_errors=3, ecc_uncorrected_errors=1)
    lines = draw_devices(seen(reading), 160, 9, LOOK)
    assert roles(lines, "79.0/80.0") == {"warn"}
    assert roles(lines, "3/1") == {"bad"}


def test_an_idle_gpu_is_not_held_back() -> None:
    lines = draw_devices(seen(gpu(throttle_reasons=("idle",))), 160, 9, LOOK)
    assert roles(lines, "idle") == {"muted"}


def test_what_is_not_known_is_a_dash_and_never_zero() -> None:
    reading = DeviceReading(kind="gpu", ranks=(0,), name="GPU-x", uuid="GPU-x")
    row = devices(seen(reading, gpu(1, sm_clock_mhz=1000, pcie_sent_bytes_per_second=0.0)))[2]
    assert set(row.removeprefix("cuda:0").split()) == {"0", "GPU-x", "-"}


def test_columns_that_no_gpu_can_fill_are_left_out() -> None:
    header = devices(seen(gpu()))[1]
    assert "NVLink" not in header
    assert "ECC" not in header
    assert "NVLink" in devices(seen(gpu(nvlink_sent_bytes_per_second=1e9)))[1]


def test_a_stranger_on_a_gpu_is_counted() -> None:
    own, other = GpuProcess(1000, GIB), GpuProcess(77, 2 * GIB)
    state = seen(gpu(processes=(own, other)))
    assert devices(state)[1].endswith("others")
    assert devices(state)[2].endswith("1")
    detail = "\n".join(devices(state, table=TableView(selected=0)))
    assert "process 77 (not of this job) 2.00 GiB" in detail


def test_numbers_of_another_namespace_accuse_nobody() -> None:
    state = seen(gpu(processes=(GpuProcess(5, GIB), GpuProcess(6, GIB))))
    assert "others" not in devices(state)[1]


def test_the_selected_gpu_is_told_in_full_where_there_is_room() -> None:
    state = fold(None, demo())
    shown = devices(state, table=TableView(selected=2))
    assert any("GPU-00000000-0000-0000-0000-000000000002" in line for line in shown)
    assert not any(
        "GPU-" in line for line in devices(state, height=10, table=TableView(selected=2))
    )


@pytest.mark.parametrize("title", COLUMNS)
def test_gpus_are_sorted_by_every_column(title: str) -> None:
    state = fold(None, demo(scenario="straggler"))
    up, down = (
        shown_devices(state, TableView(sort=title, is_descending=is_descending))
        for is_descending in (False, True)
    )
    assert sorted(row.ranks for row in up) == sorted(row.ranks for row in down)
    if title in {"temp", "others"}:
        assert up[-1].ranks == ((5,) if title == "temp" else (7,))


@pytest.mark.parametrize("title", PROCESS_COLUMNS)
def test_processes_are_sorted_by_every_column(title: str) -> None:
    state = seen(*(process(at, utilization_percent=10.0 * (at % 3)) for at in range(4)))
    rows = shown_processes(state, TableView(sort=title, is_descending=True))
    assert [row.rank for row in rows] == {"CPU": [2, 1, 0, 3], "rank": [3, 2, 1, 0],
                                          "pid": [3, 2, 1, 0]}.get(title, [0, 1, 2, 3])  # fmt: skip


def test_a_filter_leaves_the_rows_that_fit() -> None:
    state = fold(None, demo(scenario="straggler"))
    assert [row.ranks for row in shown_devices(state, TableView(filter="temp>85"))] == [(5,)]
    assert [row.ranks for row in shown_devices(state, TableView(filter="thermal"))] == [(5,)]
    assert [row.rank for row in shown_processes(state, TableView(filter="rank=3"))] == [3]
    assert "nothing fits the filter" in devices(state, table=TableView(filter="nothing"))[-1]
    assert "nothing fits the filter" in processes(state, table=TableView(filter="nothing"))[-1]


def test_the_sorted_column_has_an_arrow_and_the_selected_row_its_role() -> None:
    state = fold(None, demo())
    table = TableView(selected=1, sort="temp", is_descending=True)
    lines = draw_devices(state, 100, 10, LOOK, table=table)
    assert "temp ↓" in lines[1].plain
    assert {span.role for span in lines[3].spans} == {"selected"}


def test_the_host_stands_above_its_processes() -> None:
    shown = processes(fold(None, demo()))
    assert "CPU 5% of 192 cores" in shown[1]
    assert "disk of /tmp/boltmesh-1000 1.37 TiB free of 1.75 TiB" in shown[1]
    assert len(shown) == 3 + 8


def test_a_disk_that_is_nearly_full_warns() -> None:
    host = DeviceReading(kind="host", ranks=(0,), name="here", disk_folder="/run",
                         disk_free_bytes=GIB, disk_total_bytes=100 * GIB)  # fmt: skip
    assert roles(draw_processes(seen(host, process()), 160, 9, LOOK), "1.00 GiB free") == {"warn"}


@pytest.mark.parametrize(
    ("state", "words"),
    [
        (fold(None, Observation(NOW, job())), "the ranks have no GPU of their own"),
        (seen(), "no rank runs on this host"),
        (seen(DeviceReading(kind="host", ranks=(0,), name="here", note="GPUs are not read: no")),
         "GPUs are not read: no"),
    ],
)  # fmt: skip
def test_one_line_says_why_no_gpu_is_shown(state: State, words: str) -> None:
    shown = devices(state)
    assert words in shown[1]
    assert len(shown) == 2


@pytest.mark.parametrize(
    ("scenario", "later_s", "use", "memory"),
    [
        ("healthy", 0, "good", "good"),
        ("input_bound", 30, "warn", "good"),
        ("hang", 300, "chart", "chart"),
    ],
)
def test_bars_have_the_colours_of_the_headline_figures(
    scenario: Scenario, later_s: float, use: str, memory: str
) -> None:
    shown = fold(None, demo(scenario=scenario, later_s=later_s))
    row = draw_devices(shown, 160, 20, LOOK)[2]
    roles = [span.role for span in row.spans if UNICODE.bar_full in span.text]
    assert roles == [use, memory]


def test_one_line_says_why_no_process_is_shown() -> None:
    assert processes(fold(None, demo(scenario="crashed", later_s=30)))[-1] == (
        "the processes of this job have ended"
    )
    assert "no rank runs on this host" in processes(seen())[-1]


@pytest.mark.parametrize(
    ("sent", "received", "text"),
    [(None, None, "-"), (21.4e9, 0.31e9, "21.4/0.3 GB/s"), (0.0, 0.0, "0/0 B/s"),
     (1500.0, None, "1.5/- kB/s"), (999.0, 120e6, "0.0/120 MB/s")],
)  # fmt: skip
def test_both_ways_share_a_unit(sent: float | None, received: float | None, text: str) -> None:
    assert both_ways(sent, received) == text


@pytest.mark.pairwise
@pytest.mark.parametrize("width", [1, 5, 30, 60, 100, 300])
@pytest.mark.parametrize("height", [0, 1, 2, 4, 12, 60])
@pytest.mark.parametrize("look", [LOOK, Style(ASCII, has_headings=False, has_signs=False)])
def test_every_size_holds_the_tables(width: int, height: int, look: Style) -> None:
    for state in (fold(None, demo()), seen(), fold(None, Observation(NOW, job(ranks=())))):
        for draw in (draw_devices, draw_processes):
            for table in (TableView(), TableView(selected=3, first=5)):
                lines = draw(state, width, height, look, table=table)
                assert len(lines) <= height
                shown = _text(lines, width)
                assert not look.glyphs.is_ascii or "".join(shown).isascii()
