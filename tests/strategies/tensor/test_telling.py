"""What the telemetry of a run is told of its plan."""

from dataclasses import replace

from boltmesh.strategies.tensor.plan import plan_table, without_replicated
from boltmesh.strategies.tensor.planning import make_plan
from boltmesh.telemetry.tensor_plan import WHOLE, PlannedBlocks
from tests.support.planned import analysed


def proven(name, backend):
    plan = make_plan(analysed(name), 2)
    first, second = dict.fromkeys(block for axis in plan.axes for block in axis.blocks)
    return replace(plan, kinds={first: first, second: first}, backends={first: backend})


def test_the_whole_is_counted_whole_and_a_rank_keeps_half_of_what_is_divided():
    table = plan_table(proven("gpt_fused", "local"))
    found = analysed("gpt_fused").parameters.values()
    assert table.whole_bytes == sum(4 * each.elements for each in found)
    for row in table.rows:
        assert row.rank_bytes * (1 if row.style == WHOLE else 2) == row.whole_bytes


def test_blocks_are_told_by_kind_with_how_they_run():
    (kind,) = plan_table(proven("gpt_fused", "region")).blocks
    assert kind == PlannedBlocks("blocks.0", 2, "region")


def test_what_did_not_verify_is_whole():
    table = plan_table(without_replicated(proven("gpt_fused", "replicated")))
    inside = [row for row in table.rows if row.pattern.startswith("blocks.")]
    assert {row.style for row in inside} == {WHOLE}
    assert all(row.rank_bytes == row.whole_bytes for row in inside)
    assert "its block did not verify" in {row.why for row in inside}


def test_notes_are_told_once_for_all_blocks_that_they_are_about():
    plan = replace(make_plan(analysed("gpt_fused"), 2), notes=("blocks.0 is", "blocks.1 is"))
    assert plan_table(plan).notes == ("blocks.* is",)
