"""Measured beside expected: the figures, the table, its sums and its words."""

from typing import Any

import msgspec
import pytest

from boltmesh.telemetry.snapshot import GroupProgress, JobSnapshot
from boltmesh.telemetry.traffic import ExpectedTraffic
from boltmesh.tui.metrics.findings.limits import find_traffic
from boltmesh.tui.metrics.traffic import TrafficRow, axis_totals, traffic_rows
from boltmesh.tui.panels.traffic import COLUMNS, draw_communication, draw_traffic, shown_traffic
from boltmesh.tui.render.style import ASCII, UNICODE, Style
from boltmesh.tui.view import TableView
from tests.tui.meshes import change_rank, mesh_job
from tests.tui.samples import demo, job, rank, state, step, total

LOOK = Style(UNICODE)


def _expect(payload: float, axis: str = "data", **changes: Any) -> ExpectedTraffic:
    fields = {"operator": "allreduce", "calls": None, "why": "gradients, once"}
    return ExpectedTraffic(**{"axis": axis, "payload_bytes": payload, **fields, **changes})


def _row(snapshot: JobSnapshot) -> TrafficRow:
    (row,) = traffic_rows(snapshot)
    return row


def _of(*sizes: float | None, expected: float | None = None, **changes: Any) -> JobSnapshot:
    """A job in which rank n moves the n-th size each step."""
    ranks = tuple(
        rank(number, collectives=(total(bytes_per_step=size),)) for number, size in enumerate(sizes)
    )
    stated = () if expected is None else (_expect(expected),)
    return job(**{"ranks": ranks, "expected": stated} | changes)


def _drawn(snapshot: JobSnapshot, width: int = 150, height: int = 30, **options: Any) -> str:
    lines = draw_traffic(state(snapshot), width, height, LOOK, **options)
    return "\n".join(line.plain for line in lines)


def test_ranks_that_differ_are_named_with_the_least_and_the_most() -> None:
    row = _row(_of(3000.0, 1000.0, 3000.0, None))
    assert (row.least, row.most) == ((1, 1000.0), (0, 3000.0))
    assert row.has_uneven_ranks
    assert row.payload_bytes == pytest.approx(7000 / 3)
    assert not _row(_of(2000.0, 2000.0)).has_uneven_ranks


def test_shares_add_up_over_all_ranks_and_operators() -> None:
    rows = traffic_rows(mesh_job({"pipeline": 2, "data": 2, "tensor": 2}))
    assert sum(row.byte_share or 0 for row in rows) == pytest.approx(1.0)
    only_first = (total(), total("world", "broadcast", bytes_per_step=6000.0))
    ranks = (rank(0, collectives=only_first), rank(1, collectives=(total(),)))
    shares = {row.operator: row.byte_share for row in traffic_rows(job(ranks=ranks))}
    assert shares == {"allreduce": 0.4, "broadcast": 0.6}


def test_the_share_of_time_is_of_a_whole_accumulated_step() -> None:
    timed = (total(seconds_per_step=0.4),)
    steps = tuple(step(index, global_step=index // 4) for index in range(20))
    row = _row(job(ranks=tuple(rank(n, steps=steps, collectives=timed) for n in range(2))))
    assert row.time_share == pytest.approx(0.4 / (4 * 0.5))


def test_an_unknown_end_leaves_time_and_speed_unknown() -> None:
    row = _row(_of(2000.0, 2000.0))
    assert (row.seconds, row.time_share, row.wire_bytes_per_second) == (None, None, None)


def test_the_wire_counts_only_ranks_whose_times_are_known() -> None:
    ranks = (
        rank(0, collectives=(total(seconds_per_step=0.5),)),
        rank(1, collectives=(total(bytes_per_step=8e9),)),
    )
    assert _row(job(ranks=ranks)).wire_bytes_per_second == pytest.approx(2000.0 * 2 * 1 / 2 / 0.5)


def test_point_to_point_puts_its_payload_on_the_wire_once() -> None:
    for axis in ("pipeline", "other"):  # no size of a group is needed for it
        timed = total(axis, "send", bytes_per_step=1000.0, seconds_per_step=0.5)
        row = _row(job(mesh={"pipeline": 7}, ranks=(rank(collectives=(timed,)),)))
        assert row.wire_bytes_per_second == pytest.approx(2000.0)


def test_groups_of_no_axis_have_no_known_size() -> None:
    timed = total("other", seconds_per_step=0.5)
    row = _row(job(ranks=(rank(collectives=(timed,)),)))
    assert row.wire_bytes_per_second is None


@pytest.mark.parametrize(
    ("measured", "batches", "reason"),
    [
        (8000.0, 4, "once for each of the 4 batches of a step: no_sync is missing"),
        (6000.0, 1, "all of it is moved 3 times a step"),
        (1000.0, 1, "half of the bytes: sent in 16 bits where 32 were expected?"),
        (2700.0, 1, "more than the strategy states"),
        (300.0, 1, "less than the strategy states"),
        (0.0, 1, "less than the strategy states"),
    ],
)
def test_a_difference_has_its_reason(measured: float, batches: int, reason: str) -> None:
    steps = tuple(step(index, global_step=index // batches) for index in range(20))
    ranks = tuple(
        rank(n, steps=steps, collectives=(total(bytes_per_step=measured),)) for n in range(2)
    )
    row = _row(job(ranks=ranks, expected=(_expect(2000.0),)))
    assert (row.verdict, row.reason) == ("differs", reason)
    assert row.is_wrong


@pytest.mark.parametrize(
    ("axis", "last", "verdict"),
    [
        ("pipeline", {"samples": 2}, "varies"),
        ("tensor", {"tokens": 500}, "varies"),
        ("pipeline", {}, "differs"),
        ("data", {"samples": 2}, "differs"),
    ],
)
def test_activations_of_smaller_batches_are_no_difference(
    axis: str, last: dict[str, int], verdict: str
) -> None:
    steps = (*(step(index) for index in range(9)), step(9, **last))
    ranks = (rank(0, steps=steps, collectives=(total(axis, bytes_per_step=1950.0),)),)
    snapshot = job(ranks=ranks, expected=(_expect(2000.0, axis),))
    row = _row(snapshot)
    assert (row.verdict, row.is_wrong) == (verdict, verdict == "differs")
    assert (find_traffic(state(snapshot)) is None) == (verdict == "varies")


def test_other_calls_than_expected_are_a_reason() -> None:
    snapshot = _of(2700.0, 2700.0)
    snapshot = msgspec.structs.replace(snapshot, expected=(_expect(2000.0, calls=1.0),))
    assert _row(snapshot).reason == "2 calls a step, and 1 were expected"


def test_bytes_that_meet_the_expectation_need_no_reason() -> None:
    row = _row(_of(2000.0, 2000.0, expected=2000.0))
    assert (row.verdict, row.reason, row.is_wrong) == ("equal", None, False)


def test_the_stages_of_a_pipeline_are_judged_by_their_mean() -> None:
    snapshot = mesh_job({"pipeline": 2, "data": 2}, expected=(_expect(4e6),))
    heavy = (total(bytes_per_step=6e6),)
    for number in (2, 3):  # the second stage has more parameters
        snapshot = change_rank(snapshot, number, collectives=heavy)
    row = next(row for row in traffic_rows(snapshot) if row.axis == "data")
    assert (row.payload_bytes, row.verdict, row.ratio) == (4e6, "equal", 1.0)
    assert row.has_uneven_ranks


def test_sums_stand_for_axes_of_several_operators_and_for_all_axes() -> None:
    both = (total(), total(operator="broadcast", bytes_per_step=1000.0), total("tensor"))
    ranks = (rank(0, collectives=both), rank(1, collectives=both[:1]))
    totals = axis_totals(traffic_rows(job(ranks=ranks)), num_ranks=2)
    sums = {each.axis: (each.payload_bytes, each.calls, each.seconds) for each in totals}
    # Rank 0 moves 5,000 bytes and rank 1 2,000, a mean of 3,500.
    assert sums == {"data": (2500.0, 3.0, None), "all axes": (3500.0, 4.0, None)}


def test_one_operator_needs_no_sum() -> None:
    assert axis_totals(traffic_rows(_of(2000.0)), num_ranks=1) == []


def test_a_difference_is_a_sign_a_word_and_a_sentence() -> None:
    text = _drawn(_of(4000.0, 4000.0, expected=2000.0))
    assert "≠ 2x" in text
    assert "≠ data all_reduce moves 2x the expected bytes: all of it is moved 2 times a" in text
    ascii_lines = draw_traffic(state(_of(4000.0, expected=2000.0)), 150, 9, Style(ASCII))
    assert any("! 2x" in line.plain for line in ascii_lines)


def test_what_was_never_seen_is_said_in_words() -> None:
    snapshot = mesh_job({"data": 2}, expected=(_expect(9e6, operator="reduce_scatter"),))
    text = _drawn(snapshot)
    assert "≠ never seen" in text
    assert "data reduce_scatter should move 9.00 MB a step: no rank that is seen" in text


def test_a_healthy_job_has_no_sentence() -> None:
    lines = _drawn(mesh_job({"data": 2}, expected=(_expect(2e6),))).splitlines()
    assert [line.split()[0] for line in lines[1:]] == ["axis", "data", "world", "all"]


def test_the_note_comes_instead_of_figures_that_are_not_counted() -> None:
    note = "communication is not counted: another library holds the kernels"
    text = _drawn(job(communication_note=note))
    assert text.count("communication is not counted") == 1
    assert "another library holds the kernels" in text
    assert "0" not in text
    assert "nothing sent yet" in _drawn(job())
    assert "one rank, nothing to send" in _drawn(job(ranks=(rank(),)))


def test_the_selected_row_is_told_in_full() -> None:
    snapshot = _of(1000.0, 4000.0, expected=2000.0)
    text = _drawn(snapshot, table=TableView(selected=0))
    assert "min 1.00 kB on rank 0" in text
    assert "max 4.00 kB on rank 1" in text
    assert "formula: gradients, once" in text
    assert "counted by 2 of 2 ranks" in text


def test_the_table_can_be_sorted_by_every_column_and_filtered() -> None:
    snapshot = mesh_job({"pipeline": 2, "data": 2, "tensor": 2}, expected=(_expect(1.0),))
    every = shown_traffic(state(snapshot), TableView())
    for title in COLUMNS:
        rows = shown_traffic(state(snapshot), TableView(sort=title))
        assert sorted(map(id, rows)) == sorted(map(id, every))
    assert shown_traffic(state(snapshot), TableView(sort="expected"))[0].axis == "data"
    rows = shown_traffic(state(snapshot), TableView(filter="axis=tensor payload>1e6"))
    assert [row.axis for row in rows] == ["tensor"]
    assert "all axes" in _drawn(snapshot)
    assert "all axes" not in _drawn(snapshot, table=TableView(filter="data"))
    assert "nothing fits the filter" in _drawn(snapshot, table=TableView(filter="nowhere"))


def test_a_sorted_column_is_marked() -> None:
    snapshot = mesh_job({"data": 2})
    header = _drawn(snapshot, table=TableView(sort="payload", is_descending=True)).splitlines()[1]
    assert "payload ↓" in header
    assert "↑" not in header


def test_the_overview_has_the_table_in_short() -> None:
    snapshot = _of(4000.0, 4000.0, expected=2000.0)
    lines = [line.plain for line in draw_communication(state(snapshot), 120, 9, LOOK)]
    assert len(lines) == 3
    assert "≠ 2x" in lines[2]
    assert "2 times" in lines[2]


def test_on_the_overview_the_most_bytes_come_first() -> None:
    lines = [line.plain for line in draw_communication(state(demo().job), 120, 3, LOOK)]
    assert lines[0].rstrip(" ─").endswith("13.3 GB a rank")
    assert lines[2].split()[:2] == ["tensor", "all_reduce"]


def test_groups_without_calls_in_a_step_take_no_time_of_it() -> None:
    idle = total(group="setup", calls_per_step=0.0, bytes_per_step=0.0)
    busy = total(seconds_per_step=0.01)
    for found in ((idle, busy), (busy, idle)):
        row = _row(job(ranks=(rank(0, collectives=found),)))
        assert (row.seconds, row.num_groups, row.payload_bytes) == (0.01, 1, 2000.0)
    expected = (_expect(2000.0),)
    row = _row(job(ranks=(rank(0, collectives=(idle,)),), expected=expected))
    assert (row.seconds, row.num_groups, row.verdict) == (None, 0, "differs")


@pytest.mark.parametrize(("axis", "size"), [("expert", 4), ("data", 2)])
def test_bandwidth_counts_the_ranks_of_the_groups(axis: str, size: int) -> None:
    """Of experts, which are no axis of the mesh; of data, where replicas are no group."""
    group = GroupProgress(axis, "own", tuple(range(size)), 1, None, None, None)
    sent = total(axis, "alltoall_base", group="own", seconds_per_step=0.5)
    seen = job(ranks=(rank(0, collectives=(sent,), groups=(group,)),), mesh={"data": 8})
    assert _row(seen).wire_bytes_per_second == pytest.approx(2000 * (size - 1) / size / 0.5)


def test_one_line_names_the_operators_with_most_bytes() -> None:
    found = state(mesh_job({"pipeline": 2, "data": 2, "tensor": 2}))
    lines = draw_communication(found, 78, 2, LOOK)
    largest = max(traffic_rows(found.job), key=lambda row: row.payload_bytes or 0)
    assert len(lines) == 2
    assert lines[1].plain.startswith(f"{largest.axis} ")
    assert lines[1].width <= 78
