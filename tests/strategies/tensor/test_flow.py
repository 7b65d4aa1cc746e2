"""What is whole and meets something divided: where its gradient is summed, and that it is once."""

from tests.support.tensor_runs import built, planned


def test_what_shared_keys_are_made_of_leaves_the_sum_of_other_columns_to_them() -> None:
    plan = planned(*built("gpt_latent"), 2, "local")
    blocks = [f"blocks.{number}.attention" for number in range(2)]
    assert plan.boundaries == tuple(f"{each}.down" for each in blocks)
    assert plan.fed == tuple(f"{each}.up" for each in blocks)
    norms = {f"{each}.norm.{name}" for each in blocks for name in ("weight", "bias")}
    assert set(plan.partial) == norms
    assert {f"{each}.{name}.weight" for each in blocks for name in "qo"} < plan.sharded.keys()


def test_what_enters_with_experts_has_no_boundary_in_front_of_them() -> None:
    plan = planned(*built("experts_scaled"), 2, "local")
    assert plan.boundaries == ()
    assert "blocks.0.mlp.experts.up" in plan.sharded
