import pytest

from boltmesh.errors import ConfigError
from boltmesh.strategies.tensor.plan import (
    GatherPoint,
    PlannedDim,
    Section,
    SequencePlan,
    ShardedParameter,
    SizeAttribute,
    TensorPlan,
    Unsharded,
    from_json,
    to_json,
)

PLAN = TensorPlan(
    2,
    (PlannedDim(4, ("a.weight", "b.weight"), ("a",)),),
    {
        "a.weight": ShardedParameter(
            "a.weight",
            ("a.weight", "tied.weight"),
            (24, 6),
            0,
            (Section(1, 4, 3), Section(1, 4, 3)),
            "column",
            0,
        )
    },
    (Unsharded("norm.weight", "layer norm"),),
    partial=("c",),
    attributes=(SizeAttribute("a", "heads", 4),),
    region_axes=(0,),
    sequence=SequencePlan((("a", "b"),), (GatherPoint("a", 0), GatherPoint("b", "hidden"))),
    backends={"a": "region"},
    unknown={"aten.odd.default": 2},
)


def test_a_plan_comes_back_from_its_text_as_it_was():
    assert from_json(to_json(PLAN)) == PLAN


@pytest.mark.parametrize("text", ["", "{}", '{"size": "two"}', '{"size": 2, "partial": 3}'])
def test_a_text_that_is_no_plan_is_refused(text):
    with pytest.raises(ConfigError, match="no tensor plan"):
        from_json(text)
