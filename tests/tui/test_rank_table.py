"""A line for each rank, and one rank in full."""

from typing import Any

import msgspec
import pytest
from rich.cells import cell_len

from boltmesh.telemetry.snapshot import (
    CollectiveInFlight,
    Event,
    GroupProgress,
    JobSnapshot,
    MemoryKind,
    PeerTotal,
)
from boltmesh.tui.devices import DeviceReading
from boltmesh.tui.metrics.ranks import rank_rows
from boltmesh.tui.panels.rank_detail import draw_rank_detail
from boltmesh.tui.panels.rank_table import (
    COLUMNS,
    MANY_RANKS,
    cells_of,
    draw_rank_table,
    shown_ranks,
)
from boltmesh.tui.render.style import ASCII, UNICODE, Style
from boltmesh.tui.render.table import column_at
from boltmesh.tui.state import State, fold
from boltmesh.tui.view import TableView
from tests.tui.loads import HEALTHY, steady, team, waiting_for, worker
from tests.tui.samples import NOW, crashed_demo, demo, job, rank, state, total

LOOK = Style(UNICODE)


def _late(size: int = 8) -> State:
    return state(team(*waiting_for(0.1, size=size)))


def _table(shown: State, width: int = 200, height: int = 30, **view: Any) -> list[str]:
    table = TableView(**view)
    return [line.plain for line in draw_rank_table(shown, width, height, LOOK, table=table)]


def _order(shown: State, **view: Any) -> list[int]:
    return [row.rank for row in shown_ranks(shown, TableView(**view))]


def test_the_late_rank_has_its_share_and_its_cause() -> None:
    row = _table(_late(4))[-1]
    assert row.lstrip().startswith("3 ")
    assert "! +54%" in row
    assert "forward +100 ms" in row
    assert "slower" in _table(_late(4))[1]
    assert not any("forward +" in line for line in _table(state(team(*[steady()] * 4))))


def test_steps_are_drawn_as_columns_and_their_split_as_a_bar() -> None:
    def slow_end(index: int) -> dict[str, float]:
        return HEALTHY | ({"forward": 0.5} if index == 23 else {})

    row = _table(state(team(slow_end)))[2]
    assert "▁" * 15 + "█" in row
    assert "█" * 6 in row.partition("▁█")[2]


def test_ranks_are_sorted_by_any_column_in_both_directions() -> None:
    shown = state(demo().job)
    for title in COLUMNS:
        up, down = _order(shown, sort=title), _order(shown, sort=title, is_descending=True)
        cells = {row.rank: cells_of(row)[title] for row in rank_rows(shown)}
        values = [cells[number] for number in up if cells[number] is not None]
        assert values == sorted(values, key=lambda value: (isinstance(value, str), value))
        assert sorted(up) == sorted(down) == list(range(8))
    assert _order(_late(), sort="slower", is_descending=True)[0] == 7


@pytest.mark.parametrize(
    ("words", "ranks"),
    [("slower>20", [7]), ("rank<=1", [0, 1]), ("state=running", list(range(8))), ("dead", []),
     ("forward rank=7", [7]), ("cause=forward", []), ("waits>50", list(range(7)))],
)  # fmt: skip
def test_a_filter_keeps_the_ranks_that_fit(words: str, ranks: list[int]) -> None:
    assert sorted(_order(_late(), filter=words)) == ranks
    lines = _table(_late(), filter=words)
    assert len(lines) == 2 + max(1, len(ranks))
    assert ("nothing fits" in lines[-1]) == (not ranks)
    assert (f"{len(ranks)} of 8" in lines[0]) == (len(ranks) < 8)


def test_of_many_ranks_those_in_trouble_stand_first() -> None:
    loads = waiting_for(0.1, size=MANY_RANKS)
    ranks = [worker(number, load) for number, load in enumerate(loads)]
    ranks[4] = msgspec.structs.replace(ranks[4], state="dead")
    shown = state(job(ranks=tuple(ranks)))
    assert _order(shown)[:3] == [4, MANY_RANKS - 1, 0]
    few = state(job(ranks=tuple(ranks[: MANY_RANKS - 1])))
    assert _order(few) == list(range(MANY_RANKS - 1))
    assert _order(shown, sort="rank") == list(range(MANY_RANKS))


def test_the_selected_row_is_marked_and_scrolled_to() -> None:
    shown = state(team(*[steady()] * 40))
    lines = draw_rank_table(shown, 100, 10, LOOK, table=TableView(selected=30, sort="rank"))
    (marked,) = [line for line in lines if any(role == "selected" for _, role in line.spans)]
    assert marked.plain.lstrip().startswith("30 ")
    assert "more" in lines[0].plain


def test_the_sorted_column_has_an_arrow_and_a_click_finds_its_title() -> None:
    shown = _late()
    header = _table(shown, sort="slower", is_descending=True)[1]
    assert "slower ↓" in header
    lines = draw_rank_table(shown, 200, 5, LOOK)
    x = lines[1].plain.index("step time")
    assert column_at(lines[1], x + 2, COLUMNS) == "step time"


def test_columns_without_a_figure_are_left_out() -> None:
    header = _table(state(team(steady(), steady())), 300)[1]
    for title in ("host", "cause", "behind", "temp", "tensor"):
        assert title not in header
    full = _table(fold(None, demo()), 300)[1]
    for title in ("pipeline", "data", "tensor", "temp", "tokens/s", "waits"):
        assert title in full


def test_a_rank_that_failed_tells_its_error() -> None:
    lines = _table(state(crashed_demo().job), 200)
    assert any("✗ dead" in line for line in lines)
    assert any("Connection closed by peer" in line for line in lines)


@pytest.mark.parametrize("look", [LOOK, Style(ASCII, has_headings=False, has_signs=False)])
@pytest.mark.parametrize(("width", "height"), [(0, 0), (1, 1), (20, 3), (60, 15), (300, 100)])
def test_tables_and_details_fit_any_place(width: int, height: int, look: Style) -> None:
    strange = rank(
        0, steps=(), device="\x1b[31m" + "学" * 90, host="h\n" * 50, error="e\x07" * 300, pid=None,
        coordinates={}, state="failed", phase="no such phase", last_seen=0.0,
    )  # fmt: skip
    states = [
        state(job(ranks=())),
        state(job(ranks=(strange,))),
        fold(None, demo()),
        state(crashed_demo().job),
    ]
    for shown in states:
        for lines in (
            draw_rank_table(shown, width, height, look, table=TableView(selected=2)),
            draw_rank_detail(shown, width, height, look, rank=0),
            draw_rank_detail(shown, width, height, look, rank=99),
        ):
            assert len(lines) <= height
            assert all(cell_len(line.plain) == line.width <= width for line in lines)
            assert not any(character in line.plain for line in lines for character in "\x1b\x07\n")


def test_a_thousand_ranks_are_a_table_like_any_other() -> None:
    shown = state(job(ranks=tuple(rank(number) for number in range(1024))))
    lines = _table(shown, 120, 20, sort="rank", is_descending=True, selected=1000)
    assert len(lines) == 20
    assert any(line.lstrip().startswith("23 ") for line in lines)


def _detail(snapshot: JobSnapshot, *devices: DeviceReading, rank: int = 0, width: int = 160) -> str:
    shown = msgspec.structs.replace(state(snapshot), devices=devices)
    lines = draw_rank_detail(shown, width, 80, LOOK, rank=rank)
    return "\n".join(line.plain for line in lines)


def _row_of(text: str, start: str) -> list[str]:
    """The words of the line that begins so."""
    return next(line for line in text.splitlines() if line.startswith(start)).split()


def test_a_rank_stands_beside_its_peers_phase_by_phase() -> None:
    text = _detail(team(*waiting_for(0.1, size=4)), rank=3, width=80)
    assert _row_of(text, "██ forward")[2:] == ["160", "ms", "60.0", "ms", "+100", "ms"]
    assert _row_of(text, "▒▒ exposed comm")[3:] == ["16.0", "ms", "116", "ms", "-100", "ms"]
    assert _row_of(text, "▓▓ backward")[-1] == "none"
    assert "slower: its compute time is 284 ms, that of its peers 184 ms" in text
    alone = _detail(team(steady()), rank=0, width=80)
    assert _row_of(alone, "██ forward")[-2:] == ["-", "-"]
    assert "slower:" not in alone


def test_a_rank_tells_where_it_is_and_how_far_behind() -> None:
    ranks = (
        worker(0),
        worker(1, global_step=20, last_seen=NOW - 75, phase="data", skipped_records=3),
    )
    text = _detail(job(ranks=ranks), rank=1)
    for fact in ("rank 1: data 1", "in ░ data", "last seen 1m 15s ago", "behind 4",
                 "skipped records 3", "pid 1001", "host elsewhere"):  # fmt: skip
        assert fact in text


def test_a_rank_of_an_ended_job_was_last_seen_then_and_not_now() -> None:
    ended = job(ranks=(worker(0, last_seen=NOW - 75),), state="crashed", updated=NOW - 75)
    assert "last seen 1m 15s ago" in _detail(ended, rank=0)


def test_a_rank_of_another_host_is_known_by_its_summary_alone() -> None:
    distant = rank(1, steps=(), is_summary=True)
    assert "known only by the summary" in _detail(job(ranks=(worker(0), distant)), rank=1)
    assert "known only by the summary" not in _detail(job(ranks=(worker(0), distant)), rank=0)


def test_a_rank_tells_what_it_moves_and_where_it_waits() -> None:
    busy = worker(
        0,
        groups=(
            GroupProgress("data", "g", (0, 1), 1841, "allreduce", False, NOW - 42.0),
            GroupProgress("tensor", "t", (), 7, "allgather", None, None),
            GroupProgress("world", "w", (0, 1), 0, None, None, None),
        ),
        collectives=(
            total(bytes_per_step=5e6, seconds_per_step=0.004),
            total("world", "barrier", calls_per_step=0.0),
        ),
        peers=(PeerTotal("pipeline", "send", 1, 8, 800, 100e6),),
    )
    text = _detail(job(ranks=(busy,)), rank=0, width=80)
    assert _row_of(text, "data    0, 1")[3:] == ["1,841", "all_reduce", "!", "inside", "42s"]
    assert _row_of(text, "tensor  -")[2:] == ["7", "all_gather", "not", "reported", "-"]
    assert "world" not in text
    assert _row_of(text, "data      all_reduce")[2:] == [
        "2",
        "5.00",
        "MB",
        "4.00",
        "ms",
        "20.0",
        "kB",
    ]
    assert _row_of(text, "pipeline  send to 1")[4:7] == ["-", "100", "MB"]


def test_without_groups_the_collective_in_flight_is_told() -> None:
    waiting = worker(0, in_flight=CollectiveInFlight("data", "allreduce", 9, is_done=False))
    assert _row_of(_detail(job(ranks=(waiting,)), width=80), "data")[2:5] == [
        "9", "all_reduce", "!",
    ]  # fmt: skip


def test_a_rank_tells_its_device_its_memory_its_work_and_its_events() -> None:
    gpu = DeviceReading(
        kind="gpu", ranks=(0,), name="H100", uuid="GPU-a", utilization_percent=97.0,
        memory_used_bytes=5 * 2**30, memory_total_bytes=10 * 2**30, temperature_celsius=71.0,
        power_watts=640.0,
    )  # fmt: skip
    trained = worker(
        0,
        device="cuda:0 (H100)",
        device_uuid="GPU-a",
        memory_kinds=(MemoryKind("optimizer", "host", 2**33, 2**32),),
        flops_per_batch=40e12,
        peak_flops_per_second=989e12,
    )
    events = (Event(NOW, 0, "warning", "clipped"), Event(NOW, 1, "warning", "not mine"))
    text = _detail(job(ranks=(trained,), events=events), gpu, rank=0)
    for fact in ("memory 5.00 GiB of 10.0 GiB", "temperature 71 C", "power 640 W", "8.00 GiB",
                 "4.00 GiB", "MFU 20.2%", "200 TFLOP/s", "clipped", "loss 2.0000"):  # fmt: skip
        assert fact in text
    assert "not mine" not in text


def test_what_a_rank_says_when_it_fails_is_told_in_full() -> None:
    failed = rank(0, state="failed", error="RuntimeError: " + "x " * 60 + "end")
    text = _detail(job(ranks=(failed,), state="failed"), rank=0, width=100)
    assert "✗ RuntimeError" in text
    assert "end" in text


def test_two_columns_stand_side_by_side_where_there_is_room() -> None:
    busy = worker(0, collectives=(total(),))
    wide = _detail(job(ranks=(busy,)), rank=0, width=160)
    narrow = _detail(job(ranks=(busy,)), rank=0, width=80)
    assert any("step time" in line and "moved in a step" in line for line in wide.splitlines())
    assert len(wide.splitlines()) < len(narrow.splitlines())
