"""The checks of a schedule find what is wrong with it."""

import dataclasses

import pytest

from boltmesh.schedule_sim import Order
from boltmesh.strategies.pipeline.schedules.registry import (
    ScheduleTable,
    check_order,
    schedule_table,
)


@pytest.mark.parametrize(
    ("order", "said"),
    [
        ((("0F0",), ("1F0", "1B0")), "0 \\+ 0/0 times backward through stage 0"),
        ((("0F0", "0B0"), ("1F0", "1B0", "1B0")), "2 \\+ 0/0 times backward through stage 1"),
        ((("0F0", "0I0"), ("1F0", "1B0")), "0 \\+ 1/0 times backward"),
        ((("0F0", "0B0"), ("1F0", "1B0", "1W0")), "1 \\+ 0/1 times backward"),
        ((("0F0", "0F0", "0B0"), ("1F0", "1B0")), "2 times forward"),
        ((("0F0", "0B0", "0F1"), ("1F0", "1B0")), "0F1 is not part of the step"),
        ((("0F0", "0B0", "1F0"), ("1B0",)), "ranks 0 and 1 both work on stage 1"),
        ((("1F0", "1B0"), ("0F0", "0B0")), "other ranks than rank_of_stage says"),
        ((("0B0", "0F0"), ("1F0", "1B0")), "rank 0 waits forever before 0B0"),
    ],
)
def test_work_that_is_missing_double_or_out_of_order_is_found(order: Order, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        check_order(ScheduleTable("broken", 2, 2, 1, order, (0, 1)))


def test_a_table_is_a_value() -> None:
    table = schedule_table("1f1b", num_ranks=2, num_microbatches=2)
    assert dataclasses.replace(table) == table
    assert hash(dataclasses.replace(table)) == hash(table)
