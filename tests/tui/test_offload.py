"""What is offloaded: how much in a step, how fast, and for how long, over the ranks."""

import msgspec
import pytest

from boltmesh.telemetry.snapshot import OffloadTotal, RankSnapshot
from boltmesh.tui.export.prometheus import prometheus_text
from boltmesh.tui.export.tables import csv_text
from boltmesh.tui.panels.memory import draw_memory
from boltmesh.tui.panels.offload import OffloadRow, draw_offload, offload_rows
from boltmesh.tui.panels.rank_detail import draw_rank_detail
from boltmesh.tui.render.style import ASCII, UNICODE, Style
from boltmesh.tui.sources.live import Observation
from tests.tui.exposition import parse
from tests.tui.meshes import mesh_job
from tests.tui.samples import NOW, demo, job, rank, state, step

LOOK = Style(UNICODE)
GB = 10**9


def _total(place: str = "disk", direction: str = "read", **changes: object) -> OffloadTotal:
    fields: dict[str, object] = {
        "place": place,
        "direction": direction,
        "calls": 40,
        "moved_bytes": 20 * GB,
        "bytes_per_step": 2.0 * GB,
        "seconds_per_step": 0.25,
        "bytes_per_second": 8.0 * GB,
    }
    return OffloadTotal(**fields | changes)  # type: ignore[arg-type]


def _rows(*ranks: RankSnapshot) -> dict[tuple[str, str], OffloadRow]:
    rows = offload_rows(state(job(ranks=ranks)))
    return {(row.place, row.direction): row for row in rows}


def test_a_way_is_spread_over_the_ranks_and_the_slowest_is_named() -> None:
    speeds = (8.0 * GB, 2.0 * GB, 5.0 * GB)
    row = _rows(
        *(
            rank(number, offload=(_total(bytes_per_second=speed, bytes_per_step=speed / 4),))
            for number, speed in enumerate(speeds)
        )
    )["disk", "read"]
    assert (row.bandwidth, row.slowest, row.slowest_bandwidth) == (5 * GB, 1, 2 * GB)
    assert (row.per_step, row.moved_bytes, row.num_ranks) == (1.25 * GB, 60 * GB, 3)


def test_busy_is_a_share_of_an_optimizer_step_and_not_of_a_batch() -> None:
    # Four batches of half a second make one step of two seconds.
    batches = tuple(step(number, global_step=(number + 3) // 4) for number in range(21))
    row = _rows(rank(0, steps=batches, offload=(_total(seconds_per_step=1.0),)))["disk", "read"]
    assert row.busy_share == pytest.approx(0.5)
    single = _rows(rank(0, offload=(_total(seconds_per_step=0.25),)))["disk", "read"]
    assert single.busy_share == pytest.approx(0.5)


def test_what_is_not_known_yet_is_a_dash_and_no_zero() -> None:
    young = _total(bytes_per_step=None, seconds_per_step=None, bytes_per_second=None)
    rows = offload_rows(state(job(ranks=(rank(0, steps=(), offload=(young,)),))))
    assert (rows[0].per_step, rows[0].bandwidth, rows[0].busy_share) == (None, None, None)
    titles, line = (each.plain for each in draw_offload(rows, 100, LOOK))
    assert titles.split() == ["offload", "a", "step", "bandwidth", "busy", "since", "the", "start"]
    assert line.split() == ["from", "disk", "-", "-", "-", "20.0", "GB"]


def test_a_job_without_offload_shows_no_line_of_it() -> None:
    assert draw_offload((), 80, LOOK) == []
    text = "\n".join(line.plain for line in draw_memory(state(mesh_job({"data": 2})), 90, 30, LOOK))
    assert "offload" not in text


@pytest.mark.parametrize(("width", "height"), [(60, 9), (78, 18), (118, 34)])
def test_the_memory_page_has_all_ways_beside_at_least_three_kinds(width: int, height: int) -> None:
    look = Style(UNICODE, has_headings=width > 60)
    drawn = [line.plain for line in draw_memory(state(demo().job), width, height, look)]
    assert len(drawn) <= height
    assert all(len(line) <= width for line in drawn)
    for way in ("from host", "to host", "from disk", "to disk"):
        assert any(line.startswith(way) and "GB/s" in line for line in drawn), way
    assert sum(line.startswith("device  ") and "GiB" in line for line in drawn) >= 3


def test_the_table_of_kinds_is_the_last_to_give_way() -> None:
    seen = state(demo().job)
    for height in range(1, 20):
        drawn = [line.plain for line in draw_memory(seen, 80, height, LOOK)]
        assert len(drawn) <= height
        assert any("parameters" in line for line in drawn) == (height >= 3)
        ways = sum(line.startswith(("from ", "to ")) for line in drawn)
        assert ways in {0, 4}, "all of the ways or none"


def test_a_step_that_waits_for_the_disk_is_marked() -> None:
    rows = offload_rows(state(job(ranks=(rank(0, offload=(_total(seconds_per_step=0.49),)),))))
    (line,) = draw_offload(rows, 100, LOOK)[1:]
    assert [span.role for span in line.spans if "98% of a step" in span.text] == ["warn"]


def test_one_rank_is_shown_without_a_comparison() -> None:
    drawn = "\n".join(
        line.plain for line in draw_rank_detail(state(demo().job), 118, 60, LOOK, rank=2)
    )
    assert "offload traffic" in drawn
    assert "from disk" in drawn
    assert "slowest" not in drawn


def test_signs_are_ascii_where_ascii_is_asked_for() -> None:
    drawn = draw_memory(state(demo().job), 100, 34, Style(ASCII))
    assert all(line.plain.isascii() for line in drawn)


def test_prometheus_and_csv_have_every_way_of_every_rank() -> None:
    ranks = (rank(0, offload=(_total(),)), rank(1, offload=(_total("host", "write"),)))
    seen = Observation(time=NOW, job=job(ranks=ranks))
    found = parse(prometheus_text(seen))
    labels = {"rank": "1", "place": "host", "direction": "write"}
    assert found["boltmesh_offload_bytes_total"].value(**labels) == 20 * GB
    assert found["boltmesh_offload_transfers_total"].value(**labels) == 40
    assert found["boltmesh_offload_bytes_per_second"].value(**labels) == 8 * GB
    assert found["boltmesh_offload_seconds_per_step"].value(**labels) == 0.25
    titles, *rows = "".join(csv_text("offload", [seen])).splitlines()
    assert titles.startswith("job,time,rank,place,direction,calls,moved_bytes,bytes_per_step")
    assert [row.split(",")[2:6] for row in rows] == [
        ["0", "disk", "read", "40"],
        ["1", "host", "write", "40"],
    ]


def test_the_demo_moves_what_its_memory_says_is_away() -> None:
    seen = demo().job
    for each in seen.ranks:
        kept = {(kind.kind, kind.place): kind.measured_bytes or 0 for kind in each.memory_kinds}
        moved = {(way.place, way.direction): way for way in each.offload}
        on_disk = kept["optimizer", "disk"]
        for direction in ("read", "write"):
            way = moved["disk", direction]
            assert way.bytes_per_step == on_disk  # all of its state, once there and once back
            assert way.moved_bytes == on_disk * seen.global_step
            assert way.seconds_per_step is not None
            assert way.bytes_per_second is not None
            assert way.bytes_per_step == pytest.approx(way.seconds_per_step * way.bytes_per_second)
        rss = sum(size for (_, place), size in kept.items() if place == "host")
        assert each.memory.host_rss_bytes == rss
    decoded = msgspec.json.decode(msgspec.json.encode(seen), type=type(seen))
    assert decoded.ranks[0].offload == seen.ranks[0].offload
