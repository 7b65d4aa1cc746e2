"""How blocks are run, and what a plan says where some stay whole."""

from boltmesh.strategies.tensor.plan import (
    PlannedDim,
    Section,
    ShardedParameter,
    SizeAttribute,
    TensorPlan,
    backend_of,
    backends_of_axes,
    without_replicated,
    without_sequence,
)
from boltmesh.strategies.tensor.planning import make_plan
from tests.support.planned import analysed


def _plan(**backends: str) -> TensorPlan:
    """Two blocks of one kind, one of another that shares an axis with a fourth, and a head."""
    homes = [("a.0",), ("a.1",), ("b", "c"), ("c",), ()]
    names = ["a.0.w", "a.1.w", "b.w", "c.w", "head"]
    return TensorPlan(
        2,
        tuple(PlannedDim(4, (name,), home) for name, home in zip(names, homes, strict=True)),
        {
            name: ShardedParameter(name, (name,), (4, 4), 0, (Section(1, 4, 1),), "column", axis)
            for axis, name in enumerate(names)
        },
        partial=("a.0.norm", "a.10.norm", "b.norm", "norm"),
        boundaries=("a.1.k", "outside"),
        local_dropouts=("c.drop", "a.0.drop"),
        attributes=(SizeAttribute("b", "heads", 4), SizeAttribute("", "heads", 4)),
        region_axes=(0, 2, 3),
        kinds={"a.1": "a.0"},
        backends={name.replace("_", "."): each for name, each in backends.items()},  # type: ignore[misc]
    )


def test_a_block_is_run_as_the_first_of_its_kind() -> None:
    plan = _plan(a_0="region")
    assert [backend_of(plan, each) for each in ("a.0", "a.1", "b", "")] == [
        "region", "region", "local", "local",
    ]  # fmt: skip


def test_blocks_that_share_an_axis_are_run_as_the_hardest_of_them() -> None:
    assert backends_of_axes(_plan(c="region")) == ["local", "local", "region", "region", "local"]
    assert backends_of_axes(_plan(b="replicated"))[2:] == ["replicated", "replicated", "local"]


def test_a_plan_without_a_block_that_stays_whole_says_nothing_of_it() -> None:
    left = without_replicated(_plan(b="replicated"))
    assert list(left.sharded) == ["a.0.w", "a.1.w", "head"]
    assert [each.name for each in left.whole] == ["b.w", "c.w"]
    assert left.partial == ("a.0.norm", "a.10.norm", "norm")
    assert left.boundaries == ("a.1.k", "outside")
    assert left.local_dropouts == ("a.0.drop",)
    assert [each.module for each in left.attributes] == [""]
    assert left.region_axes == (0,)


def test_what_lies_in_no_block_can_stay_whole_alone() -> None:
    plan = _plan()
    left = without_replicated(TensorPlan(**{**vars(plan), "backends": {"": "replicated"}}))
    assert list(left.sharded) == ["a.0.w", "a.1.w", "b.w", "c.w"]
    assert left.partial == ("a.0.norm", "b.norm")
    assert left.boundaries == ("a.1.k",)


def test_a_plan_all_of_which_is_divided_is_left_as_it_is() -> None:
    plan = _plan(a_0="region")
    assert without_replicated(plan) is plan


def test_with_whole_sequences_nothing_is_left_of_what_divided_ones_ask_for():
    analysis = analysed("gpt_fused")
    plan = make_plan(analysis, 2, sequence_parallel=True)
    plain = make_plan(analysis, 2)

    assert set(plan.partial) > set(plain.partial)
    assert without_sequence(plan) == plain
    assert without_sequence(plain) is plain
