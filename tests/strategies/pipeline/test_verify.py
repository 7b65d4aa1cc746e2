"""The checks of a schedule find what is wrong with it."""

import dataclasses

import pytest

from boltmesh.strategies.pipeline.schedules.orders import (
    check_communication,
    check_order,
    schedule_table,
    with_communication,
)
from boltmesh.strategies.pipeline.schedules.registry import ScheduleTable
from boltmesh.telemetry.schedule import DeadlockError, Order


@pytest.mark.parametrize(
    ("order", "said"),
    [
        ((("0F0",), ("1F0", "1B0")), "0 \\+ 0/0 times backward through stage 0"),
        ((("0F0", "0B0"), ("1F0", "1B0", "1B0")), "2 \\+ 0/0 times backward through stage 1"),
        ((("0F0", "0I0"), ("1F0", "1B0")), "0 \\+ 1/0 times backward"),
        ((("0F0", "0B0"), ("1F0", "1B0", "1W0")), "1 \\+ 0/1 times backward"),
        ((("0F0", "0F0", "0B0"), ("1F0", "1B0")), "2 times forward"),
        ((("0F0", "0B0", "0F1"), ("1F0", "1B0")), "there is no such work as .*microbatch=1"),
        ((("0F0", "0B0", "1F0"), ("1B0",)), "ranks 0 and 1 both work on stage 1"),
        ((("1F0", "1B0"), ("0F0", "0B0")), "other ranks than rank_of_stage says"),
        ((("0B0", "0F0"), ("1F0", "1B0")), "rank 0 waits forever before 0B0"),
    ],
)
def test_work_that_is_missing_double_or_out_of_order_is_found(order: Order, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        check_order(ScheduleTable("broken", 2, 2, 1, order, (0, 1)))


def test_two_ranks_that_both_send_first_are_stuck_unless_sends_are_buffered() -> None:
    rows = (
        ("0F0", "0SEND_F0", "0F1", "0SEND_F1", "0RECV_B0", "0B0", "0RECV_B1", "0B1"),
        ("1RECV_F0", "1F0", "1B0", "1SEND_B0", "1RECV_F1", "1F1", "1B1", "1SEND_B1"),
    )
    check_communication(rows, (0, 1), is_buffered=True)
    stuck = "rank 0 waits forever in 0SEND_F1; rank 1 waits forever in 1SEND_B0"
    with pytest.raises(DeadlockError, match=stuck):
        check_communication(rows, (0, 1), is_buffered=False)


@pytest.mark.parametrize(
    ("first", "last", "said"),
    [
        ("0F0 0SEND_F0", "1F0", "rank 1 waits forever in 1F0"),
        ("0SEND_F0 0F0", "1RECV_F0 1F0", "rank 0 waits forever in 0SEND_F0"),
        ("0F0 0SEND_F0", "", "nobody receives"),
        ("0F0 0F1 0SEND_F1 0SEND_F0", "1RECV_F0 1RECV_F1 1F0 1F1", "rank 1 receives .* in 1RECV"),
        ("0F0 0SEND_F0", "1RECV_F0 1F0 1I0 1W1", "rank 1 waits forever in 1W1"),
        ("0F0 0SEND_F0", "1RECV_F0 1F0 1B1", "rank 1 waits forever in 1B1"),
    ],
)  # fmt: skip
def test_steps_without_what_they_need_are_found(first: str, last: str, said: str) -> None:
    with pytest.raises(DeadlockError, match=said):
        check_communication((first.split(), last.split()), (0, 1), is_buffered=True)


def test_every_step_of_a_schedule_is_needed() -> None:
    """Without any one of them, somebody waits or is not waited for."""
    table = schedule_table("zbv", num_ranks=2, num_microbatches=4)
    rows = with_communication(table)
    for rank, row in enumerate(rows):
        for at, text in enumerate(row):
            if "W" in text:
                continue
            broken = [list(each) for each in rows]
            del broken[rank][at]
            with pytest.raises(DeadlockError):
                check_communication(broken, table.rank_of_stage, is_buffered=False)


def test_a_step_that_nobody_knows_is_refused() -> None:
    with pytest.raises(ValueError, match="'0UNSHARD' is no step of a schedule"):
        check_communication((("0UNSHARD",),), (0,), is_buffered=True)


def test_a_table_is_a_value() -> None:
    table = schedule_table("1f1b", num_ranks=2, num_microbatches=2)
    assert dataclasses.replace(table) == table
    assert hash(dataclasses.replace(table)) == hash(table)
