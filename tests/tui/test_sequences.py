"""Who is missing where a collective does not advance, and where those are."""

import msgspec
import pytest

from boltmesh.telemetry.snapshot import JobSnapshot, RankSnapshot
from boltmesh.telemetry.stall import STALL_AT_LEAST_S
from boltmesh.tui.metrics.hangs import first_to_go, hangs, last_collective
from boltmesh.tui.metrics.sequences import GroupRow, group_rows
from boltmesh.tui.panels.sequences import COLUMNS, draw_sequences, shown_groups
from boltmesh.tui.render.style import ASCII, UNICODE, Style
from boltmesh.tui.view import TableView
from tests.tui.meshes import SEQUENCE, Mesh, change_group, change_rank, mesh_job
from tests.tui.samples import NOW, job, rank, state, step, total

CUBE = {"pipeline": 2, "data": 2, "tensor": 2}
LATE_S = 31.0
LOOK = Style(UNICODE)


def silence(snapshot: JobSnapshot, *, seconds: float = LATE_S) -> JobSnapshot:
    """Nothing was heard of any rank since."""
    ranks = tuple(
        msgspec.structs.replace(
            each,
            last_seen=NOW - seconds,
            groups=tuple(
                msgspec.structs.replace(group, time=NOW - seconds) for group in each.groups
            ),
        )
        for each in snapshot.ranks
    )
    return msgspec.structs.replace(snapshot, ranks=ranks)


def wait_for(
    snapshot: JobSnapshot, missing: int, axis: str, *, is_done: bool | None = False
) -> JobSnapshot:
    """All but ``missing`` of its group of ``axis`` have entered one collective more."""
    members = next(group.ranks for group in snapshot.ranks[missing].groups if group.axis == axis)

    def enter(each: RankSnapshot) -> RankSnapshot:
        if each.rank not in members or each.rank == missing:
            return each
        waiting = change_group(each, axis, sequence=SEQUENCE + 1, is_done=is_done)
        return msgspec.structs.replace(waiting, phase="communication")

    return msgspec.structs.replace(snapshot, ranks=tuple(map(enter, snapshot.ranks)))


def hung(mesh: Mesh, missing: int, axis: str = "data", *, seconds: float = LATE_S) -> JobSnapshot:
    return wait_for(silence(mesh_job(mesh), seconds=seconds), missing, axis)


def _texts(snapshot: JobSnapshot) -> list[str]:
    return [hang.text for hang in hangs(state(snapshot))]


def _row(snapshot: JobSnapshot, axis: str = "data") -> GroupRow:
    return next(row for row in group_rows(state(snapshot)) if row.axis == axis)


def _drawn(snapshot: JobSnapshot, width: int = 120, height: int = 30, **options: object) -> str:
    lines = draw_sequences(state(snapshot), width, height, LOOK, **options)  # type: ignore[arg-type]
    return "\n".join(line.plain for line in lines)


def test_a_rank_that_never_entered_is_named_with_its_place_and_for_how_long() -> None:
    assert _texts(hung({"data": 8}, 5)) == [
        (
            "rank 5 never entered all_reduce #1,842 of data; it has been in forward for 31s; "
            "ranks 0-4, 6, 7 wait for 31s"
        )
    ]
    row = _row(hung({"data": 8}, 5))
    assert (row.missing, row.blocked, row.status) == ((5,), 1842, "stuck")
    assert row.waiting == (0, 1, 2, 3, 4, 6, 7)


def test_a_thousand_ranks_wait_for_one() -> None:
    (text,) = _texts(hung({"data": 1024}, 700))
    assert text.startswith("rank 700 never entered all_reduce #1,842 of data;")
    assert text.endswith("ranks 0-699, 701-1023 wait for 31s")


@pytest.mark.parametrize("seconds", [0.0, 5.0, STALL_AT_LEAST_S - 1])
def test_ranks_that_differ_for_a_moment_are_no_hang(seconds: float) -> None:
    snapshot = hung({"data": 4}, 1, seconds=seconds)
    assert _texts(snapshot) == []
    assert _row(snapshot).status == "apart"
    assert "no collective waits for a rank" in _drawn(snapshot)


def test_a_job_of_long_steps_is_given_more_time() -> None:
    slow = tuple(step(index, seconds=30.0) for index in range(9))
    patient = wait_for(silence(mesh_job({"data": 4}, steps=slow)), 1, "data")
    assert _texts(patient) == []
    later = wait_for(silence(mesh_job({"data": 4}, steps=slow), seconds=151.0), 1, "data")
    assert len(_texts(later)) == 1


def test_one_advance_of_any_member_ends_the_silence() -> None:
    snapshot = hung({"data": 4}, 1)
    moved = change_group(snapshot.ranks[3], "data", time=NOW - 2)
    assert _texts(change_rank(snapshot, 3, groups=moved.groups)) == []


def test_nobody_waits_where_all_that_entered_are_through() -> None:
    # The source of a broadcast is done before the others have come.
    through = wait_for(silence(mesh_job({"data": 2})), 1, "data", is_done=True)
    assert _texts(through) == []


def test_a_backend_that_does_not_tell_is_judged_by_who_is_missing() -> None:
    unknown = wait_for(silence(mesh_job({"data": 4})), 2, "data", is_done=None)
    assert len(_texts(unknown)) == 1
    idle = silence(mesh_job({"data": 4}))
    for each in idle.ranks:
        idle = change_rank(idle, each.rank, groups=change_group(each, "data", is_done=None).groups)
    assert _texts(idle) == []


def test_the_others_wait_for_the_first_collective_that_somebody_has_not_entered() -> None:
    snapshot = hung({"data": 4}, 1)
    ahead = change_group(snapshot.ranks[0], "data", sequence=SEQUENCE + 9, operator="broadcast")
    middle = change_group(snapshot.ranks[2], "data", sequence=SEQUENCE + 4, operator="broadcast")
    snapshot = change_rank(snapshot, 0, groups=ahead.groups)
    snapshot = change_rank(snapshot, 2, groups=middle.groups)
    (text,) = _texts(snapshot)
    assert text.startswith("rank 1 never entered all_reduce #1,842 of data")
    snapshot = change_rank(snapshot, 3, groups=middle.groups)
    (text,) = _texts(snapshot)  # nobody is in it any more, so what it was is not known
    assert text.startswith("rank 1 never entered collective #1,842 of data")


def test_a_subgroup_is_named_by_its_ranks() -> None:
    (text,) = _texts(hung(CUBE, 5, "tensor"))
    assert text.startswith("rank 5 never entered all_reduce #1,842 of tensor (ranks 4, 5); it has")
    assert text.endswith("rank 4 waits for 31s")


def test_groups_of_one_axis_may_share_a_name() -> None:
    snapshot = hung(CUBE, 5, "tensor")
    for each in snapshot.ranks:
        same = tuple(msgspec.structs.replace(group, group=group.axis) for group in each.groups)
        snapshot = change_rank(snapshot, each.rank, groups=same)
    assert len(group_rows(state(snapshot))) == 13
    (text,) = _texts(snapshot)
    assert "tensor (ranks 4, 5)" in text


def test_a_group_that_waits_for_a_waiting_rank_comes_after_the_one_where_it_began() -> None:
    snapshot = wait_for(hung(CUBE, 5, "tensor"), 4, "data")
    first, second = hangs(state(snapshot))
    assert (first.is_first, first.row.axis) == (True, "tensor")
    assert (second.is_first, second.row.axis) == (False, "data")
    assert second.text == (
        "rank 4 never entered all_reduce #1,842 of data (ranks 4, 6); it waits in all_reduce "
        "#1,842 of tensor (ranks 4, 5); rank 6 waits for 31s"
    )
    assert [row.axis for row in shown_groups(state(snapshot), TableView())[:2]] == [
        "tensor",
        "data",
    ]


def test_a_rank_that_waits_in_several_groups_is_where_it_came_last() -> None:
    snapshot = wait_for(silence(mesh_job(CUBE)), 0, "pipeline")
    earlier = change_group(snapshot.ranks[4], "pipeline", time=NOW - 90)
    snapshot = change_rank(snapshot, 4, groups=earlier.groups)
    snapshot = wait_for(wait_for(snapshot, 5, "tensor"), 4, "data")
    text = next(hang.text for hang in hangs(state(snapshot)) if hang.row.axis == "data")
    assert "it waits in all_reduce #1,842 of tensor (ranks 4, 5)" in text


def test_a_dead_rank_waits_for_nobody() -> None:
    snapshot = wait_for(hung(CUBE, 5, "tensor"), 7, "data")  # rank 5 waits for 7, and 4 for 5
    assert [hang.row.axis for hang in hangs(state(snapshot)) if hang.is_first] == ["data"]
    dead = change_rank(snapshot, 5, state="dead")
    firsts = {hang.row.axis for hang in hangs(state(dead)) if hang.is_first}
    assert firsts == {"data", "tensor"}
    assert any("it died in communication" in text for text in _texts(dead))


def test_two_groups_that_wait_for_each_other_are_both_shown() -> None:
    snapshot = wait_for(wait_for(silence(mesh_job(CUBE)), 4, "data"), 5, "tensor")
    ring = wait_for(snapshot, 6, "tensor")
    assert len(hangs(state(ring))) == 3


def test_several_missing_ranks_are_named_by_their_places() -> None:
    snapshot = hung({"data": 8}, 5)
    for number, phase in ((2, "data"), (6, "forward")):
        groups = change_group(snapshot.ranks[number], "data", sequence=SEQUENCE).groups
        snapshot = change_rank(snapshot, number, groups=groups, phase=phase)
    (text,) = _texts(snapshot)
    assert text == (
        "ranks 2, 5, 6 never entered all_reduce #1,842 of data; rank 2 has been in data for 31s, "
        "ranks 5, 6 have been in forward for 31s; ranks 0, 1, 3, 4, 7 wait for 31s"
    )


@pytest.mark.parametrize(
    ("changes", "place"),
    [
        ({"state": "dead"}, "it died in forward at step 10"),
        ({"state": "failed"}, "it failed in forward at step 10"),
        ({"state": "finished"}, "it has finished"),
        ({"phase": None}, "it has been in an unknown phase for 31s"),
    ],
)
def test_where_a_missing_rank_is(changes: dict[str, object], place: str) -> None:
    (text,) = _texts(change_rank(hung({"data": 4}, 1), 1, **changes))
    assert text.split("; ")[1] == place


def test_a_rank_that_has_entered_nothing_is_missing_and_one_that_is_not_seen_is_not() -> None:
    snapshot = hung({"data": 4}, 1)
    without = change_rank(snapshot, 1, groups=snapshot.ranks[1].groups[:1])
    assert _row(without).missing == (1,)
    assert _row(without).blocked == 1
    unseen = change_rank(snapshot, 1, state="missing", groups=())
    assert _row(unseen).missing == ()
    assert _row(unseen).unseen == (1,)
    for state_of_it in ("running", "dead"):
        changes = {"is_summary": True, "groups": (), "state": state_of_it}
        assert _row(change_rank(snapshot, 1, **changes)).unseen == (1,)


def test_a_checkpoint_is_waited_for_before_it_is_called_a_hang() -> None:
    writing = change_rank(hung({"data": 4}, 0), 0, phase="checkpoint")
    assert _texts(writing) == []
    assert _row(writing).status == "waiting"
    assert (
        "! rank 0 has not entered all_reduce #1,842 of data; it has been in checkpoint for 31s; "
        "ranks 1-3 wait for 31s"
    ) in _drawn(writing, width=150)
    assert "no collective waits for a rank" not in _drawn(writing)
    long = change_rank(hung({"data": 4}, 0, seconds=601.0), 0, phase="checkpoint")
    assert len(_texts(long)) == 1


def test_before_the_first_step_one_rank_may_load_what_the_others_wait_for() -> None:
    starting = wait_for(silence(mesh_job({"data": 4}, steps=())), 0, "data")
    assert _texts(starting) == []
    assert _row(starting).status == "waiting"
    later = wait_for(silence(mesh_job({"data": 4}, steps=()), seconds=601.0), 0, "data")
    assert len(_texts(later)) == 1
    dead = change_rank(starting, 0, state="dead")
    assert len(_texts(dead)) == 1


def test_a_collective_that_all_entered_and_none_completes() -> None:
    snapshot = silence(mesh_job({"data": 2}))
    for each in snapshot.ranks:
        groups = change_group(each, "data", is_done=False).groups
        snapshot = change_rank(snapshot, each.rank, groups=groups)
    assert _texts(snapshot) == [
        (
            "all ranks of data entered all_reduce #1,841, and it is not complete; "
            "ranks 0, 1 wait for 31s"
        )
    ]


def test_different_collectives_under_one_number_are_told_apart() -> None:
    snapshot = silence(mesh_job({"data": 4}))
    for each in snapshot.ranks:
        operator = "broadcast" if each.rank == 2 else "allreduce"
        groups = change_group(each, "data", is_done=False, operator=operator).groups
        snapshot = change_rank(snapshot, each.rank, groups=groups)
    assert _texts(snapshot) == [
        (
            "ranks of data entered different collectives as #1,841: ranks 0, 1, 3 all_reduce, "
            "rank 2 broadcast; ranks 0-3 wait for 31s"
        )
    ]


def test_numbers_of_point_to_point_calls_are_not_compared() -> None:
    snapshot = silence(mesh_job({"pipeline": 4}))
    calls = (total("pipeline", "recv", group="pipeline of 0"),)
    for each in snapshot.ranks:
        groups = change_group(each, "pipeline", sequence=100 * (each.rank + 1)).groups
        snapshot = change_rank(snapshot, each.rank, groups=groups, collectives=calls)
    assert _texts(snapshot) == []
    assert _row(snapshot, "pipeline").status == "paired"
    groups = change_group(snapshot.ranks[1], "pipeline", operator="recv", is_done=False).groups
    (text,) = _texts(change_rank(snapshot, 1, groups=groups))
    assert text == (
        "rank 1 waits for 31s in recv of pipeline; ranks 0, 2, 3 have been in forward for 31s"
    )


def test_a_finished_job_has_no_hang_and_a_crashed_one_needs_no_patience() -> None:
    recent = hung({"data": 4}, 1, seconds=1.0)
    assert _texts(msgspec.structs.replace(recent, state="finished")) == []
    dead = change_rank(recent, 1, state="dead")
    assert _texts(msgspec.structs.replace(dead, state="crashed")) == [
        (
            "rank 1 never entered all_reduce #1,842 of data; it died in forward at step 10; "
            "ranks 0, 2, 3 had entered it"
        )
    ]


def test_a_collective_that_was_given_up_is_done_and_was_entered_all_the_same() -> None:
    snapshot = change_rank(hung({"data": 2}, 1), 1, state="dead")
    given_up = change_group(snapshot.ranks[0], "data", is_done=True)
    snapshot = change_rank(snapshot, 0, groups=given_up.groups)
    assert _texts(snapshot) == []
    (text,) = _texts(msgspec.structs.replace(snapshot, state="crashed"))
    assert text.endswith("it died in forward at step 10; rank 0 had entered it")


def test_the_rank_that_went_first_is_the_one_that_the_cause_names() -> None:
    snapshot = msgspec.structs.replace(mesh_job({"data": 4}), state="crashed")
    for number, seen in ((1, NOW - 9), (2, NOW - 5)):
        snapshot = change_rank(snapshot, number, state="dead", last_seen=seen)
    assert first_to_go(mesh_job({"data": 4})) is None
    first = first_to_go(snapshot)
    assert first is not None
    assert first.rank == 1
    told = first_to_go(msgspec.structs.replace(snapshot, cause="rank 2 was killed, in forward."))
    assert told is not None
    assert told.rank == 2


def test_an_error_about_another_ranks_end_comes_first_only_if_there_is_no_other() -> None:
    snapshot = msgspec.structs.replace(mesh_job({"data": 4}), state="failed")
    lost = {"state": "failed", "error": "Connection closed by peer", "last_seen": NOW - 9}
    snapshot = change_rank(snapshot, 1, **lost)
    snapshot = change_rank(snapshot, 2, state="failed", error="ValueError: x", last_seen=NOW - 5)
    first = first_to_go(snapshot)
    assert first is not None
    assert first.rank == 2


def test_a_crashed_job_tells_in_which_collective_the_first_rank_was() -> None:
    snapshot = change_rank(mesh_job({"data": 4}), 1, state="dead", error="killed")
    groups = change_group(snapshot.ranks[1], "data", is_done=False).groups
    crashed = msgspec.structs.replace(change_rank(snapshot, 1, groups=groups), state="crashed")
    text = _drawn(crashed)
    assert "rank 1 went first: it died in forward at step 10" in text
    assert "rank 1: it was inside all_reduce #1,841 of data" in text
    (told,) = [each for each in crashed.ranks if each.rank == 2]
    assert last_collective(told, state(crashed)) == "it had completed all_reduce #1,841 of world"
    assert last_collective(rank(), state(crashed)) is None


def test_the_groups_are_a_table_with_the_ranks_of_the_selected_one() -> None:
    snapshot = hung(CUBE, 5, "tensor")
    text = _drawn(snapshot)
    assert "✗ stuck" in text
    assert "#1,841-1,842" in text
    assert "#1,841 all_reduce  rank 5 has been in forward for 31s" in text
    assert "#1,842 all_reduce  rank 4 waits in it" in text
    healthy = _drawn(mesh_job(CUBE), table=TableView(selected=12))
    assert "#1,841 all_reduce  ranks 0-7 have been in forward for 0s" in healthy
    assert healthy.count("✓ in sync") == 13


def test_the_groups_can_be_sorted_by_every_column_and_filtered() -> None:
    seen = state(hung(CUBE, 5, "tensor"))
    for title in COLUMNS:
        assert len(shown_groups(seen, TableView(sort=title, is_descending=True))) == 13
    (row,) = shown_groups(seen, TableView(filter="state=stuck"))
    assert row.missing == (5,)
    assert len(shown_groups(seen, TableView(filter="axis=data size=2"))) == 4


def test_without_groups_the_reason_is_said() -> None:
    assert "no collective yet" in _drawn(job())
    assert "no hook" in _drawn(job(communication_note="no hook"))
    assert group_rows(state(job())) == ()


def test_signs_and_words_are_ascii_where_that_is_wanted() -> None:
    lines = draw_sequences(state(hung(CUBE, 5, "tensor")), 100, 30, Style(ASCII))
    text = "\n".join(line.plain for line in lines)
    assert text.isascii()
    assert "X stuck" in text
