import pytest

from boltmesh.errors import ConfigError
from boltmesh.strategies.tensor.planning import make_plan, with_user_plan
from tests.support.planned import analysed, divisions


def changed(name, mapping, **kwargs):
    plan = make_plan(analysed(name), 2, **kwargs)
    return with_user_plan(plan, analysed(name), mapping)


def test_whole_is_whole_with_all_that_is_divided_together_and_says_so():
    plan = changed("gpt_separate", {"blocks.*.attention.q": "whole"})

    assert not any("attention" in name for name in plan.sharded)
    assert "blocks.1.mlp.up.weight" in plan.sharded
    assert any("blocks.0.attention.out.weight" in each for each in plan.notes)
    why = {each.name: each.why for each in plan.whole}["blocks.0.attention.v.weight"]
    assert "'blocks.*.attention.q'" in why


def test_what_is_found_anyway_may_be_said_again():
    mapping = {"blocks.*.mlp.up": "column", "blocks.*.mlp.down.weight": "row"}

    assert changed("gpt_fused", mapping) == make_plan(analysed("gpt_fused"), 2)


def test_another_choice_of_axes_is_taken_where_it_is_wanted():
    plan = changed("chain", {"layers.1.weight": "column"})

    assert {name: each.style for name, each in plan.sharded.items() if name[-6:] == "weight"} == {
        "layers.1.weight": "column",
        "layers.2.weight": "row",
    }


def test_one_pattern_of_many_leaves_the_rest_as_it_was():
    plan = changed("llama", {"model.layers.1.mlp.*": "whole"})

    whole = {each.name for each in plan.whole}
    assert {"model.layers.1.mlp.up_proj.weight", "model.layers.1.mlp.down_proj.weight"} <= whole
    assert "model.layers.0.mlp.up_proj.weight" in plan.sharded


def test_an_unmatched_pattern_is_refused_by_name():
    with pytest.raises(ConfigError, match=r"'blocks.0.atention.q'.*Did you mean 'blocks.0.attent"):
        changed("gpt_separate", {"blocks.0.atention.q": "whole"})


def test_a_style_that_there_is_not_is_refused_with_those_that_there_are():
    with pytest.raises(ConfigError, match=r"'colwise'.*column, row"):
        changed("gpt_separate", {"blocks.*.mlp.up": "colwise"})


def test_what_cannot_be_divided_so_is_refused_with_the_reason():
    with pytest.raises(ConfigError, match=r"layer_norm in blocks\.0\.first needs it whole"):
        changed("gpt_separate", {"blocks.*.mlp.down": "column"})


def test_two_dimensions_of_one_parameter_are_refused():
    with pytest.raises(ConfigError, match="two dimensions"):
        changed("chain", {"layers.1": "column", "layers.0": "column"})


def test_one_axis_both_divided_and_whole_is_refused():
    with pytest.raises(ConfigError, match="Give them all one style"):
        changed("chain", {"layers.1": "row", "layers.0": "whole"})


def test_what_was_asked_for_besides_stays():
    plan = changed("gpt_separate", {"blocks.*.mlp": "whole"}, loss_parallel=False)

    assert "head.weight" not in plan.sharded


def test_whole_layers_stop_a_sequence_that_is_divided_between_them():
    with pytest.raises(ConfigError, match="sequence_parallel"):
        changed("gpt_separate", {"blocks.*.attention.*": "whole"}, sequence_parallel=True)


def test_divisions_of_a_tied_parameter_go_by_any_of_its_names():
    plan = changed("gpt_tied", {"head.weight": "whole"})

    assert "tokens.weight" not in divisions(plan)
