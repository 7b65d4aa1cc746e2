"""The whole plan of each model by hand: what is divided, how, and what that asks of the rest."""

import pytest

from boltmesh.strategies.blocks import find_blocks
from boltmesh.strategies.tensor.analysis.analyse import analyse
from boltmesh.strategies.tensor.planning import make_plan
from tests.support.planned import Expected, analysed, division
from tests.support.tensor_models import example

DIVISIONS = {
    "gpt_separate": {
        "tokens.weight": "vocabulary 0: 96x1",
        "blocks.*.attention.q.weight": "column 0: 4x16",
        "blocks.*.attention.q.bias": "column 0: 4x16",
        "blocks.*.attention.k.weight": "column 0: 4x16",
        "blocks.*.attention.k.bias": "column 0: 4x16",
        "blocks.*.attention.v.weight": "column 0: 4x16",
        "blocks.*.attention.v.bias": "column 0: 4x16",
        "blocks.*.attention.out.weight": "row 1: 4x16",
        "blocks.*.mlp.up.weight": "column 0: 256x1",
        "blocks.*.mlp.up.bias": "column 0: 256x1",
        "blocks.*.mlp.down.weight": "row 1: 256x1",
        "head.weight": "vocabulary 0: 96x1",
    },
    "gpt_tied": {
        "tokens.weight": "vocabulary 0: 96x1",
        "blocks.*.attention.q.weight": "column 0: 4x16",
        "blocks.*.attention.q.bias": "column 0: 4x16",
        "blocks.*.attention.k.weight": "column 0: 4x16",
        "blocks.*.attention.k.bias": "column 0: 4x16",
        "blocks.*.attention.v.weight": "column 0: 4x16",
        "blocks.*.attention.v.bias": "column 0: 4x16",
        "blocks.*.attention.out.weight": "row 1: 4x16",
        "blocks.*.mlp.up.weight": "column 0: 256x1",
        "blocks.*.mlp.up.bias": "column 0: 256x1",
        "blocks.*.mlp.down.weight": "row 1: 256x1",
    },
    "gpt_grouped": {
        "tokens.weight": "vocabulary 0: 96x1",
        "blocks.*.attention.q.weight": "column 0: 2x32",
        "blocks.*.attention.q.bias": "column 0: 2x32",
        "blocks.*.attention.k.weight": "column 0: 2x16",
        "blocks.*.attention.k.bias": "column 0: 2x16",
        "blocks.*.attention.v.weight": "column 0: 2x16",
        "blocks.*.attention.v.bias": "column 0: 2x16",
        "blocks.*.attention.out.weight": "row 1: 2x32",
        "blocks.*.mlp.up.weight": "column 0: 256x1",
        "blocks.*.mlp.up.bias": "column 0: 256x1",
        "blocks.*.mlp.down.weight": "row 1: 256x1",
        "head.weight": "vocabulary 0: 96x1",
    },
    "gpt_one_key_head": {
        "tokens.weight": "vocabulary 0: 96x1",
        "blocks.*.attention.q.weight": "column 0: 4x16",
        "blocks.*.attention.q.bias": "column 0: 4x16",
        "blocks.*.attention.out.weight": "row 1: 4x16",
        "blocks.*.mlp.up.weight": "column 0: 256x1",
        "blocks.*.mlp.up.bias": "column 0: 256x1",
        "blocks.*.mlp.down.weight": "row 1: 256x1",
        "head.weight": "vocabulary 0: 96x1",
    },
    "gpt_one_key_head_norm": {
        "tokens.weight": "vocabulary 0: 96x1",
        "blocks.*.attention.q.weight": "column 0: 4x16",
        "blocks.*.attention.q.bias": "column 0: 4x16",
        "blocks.*.attention.out.weight": "row 1: 4x16",
        "blocks.*.mlp.up.weight": "column 0: 256x1",
        "blocks.*.mlp.up.bias": "column 0: 256x1",
        "blocks.*.mlp.down.weight": "row 1: 256x1",
        "head.weight": "vocabulary 0: 96x1",
    },
    "gpt_three_heads": {
        "tokens.weight": "vocabulary 0: 96x1",
        "blocks.*.mlp.up.weight": "column 0: 240x1",
        "blocks.*.mlp.up.bias": "column 0: 240x1",
        "blocks.*.mlp.down.weight": "row 1: 240x1",
        "head.weight": "vocabulary 0: 96x1",
    },
    "gpt_odd_vocabulary": {
        "tokens.weight": "vocabulary 0: 97x1",
        "head.weight": "vocabulary 0: 97x1",
        "blocks.*.attention.q.weight": "column 0: 4x16",
        "blocks.*.attention.q.bias": "column 0: 4x16",
        "blocks.*.attention.k.weight": "column 0: 4x16",
        "blocks.*.attention.k.bias": "column 0: 4x16",
        "blocks.*.attention.v.weight": "column 0: 4x16",
        "blocks.*.attention.v.bias": "column 0: 4x16",
        "blocks.*.attention.out.weight": "row 1: 4x16",
        "blocks.*.mlp.up.weight": "column 0: 256x1",
        "blocks.*.mlp.up.bias": "column 0: 256x1",
        "blocks.*.mlp.down.weight": "row 1: 256x1",
    },
    "gpt_fused": {
        "tokens.weight": "vocabulary 0: 96x1",
        "blocks.*.attention.qkv.weight": "column 0: 4x16 + 4x16 + 4x16",
        "blocks.*.attention.qkv.bias": "column 0: 4x16 + 4x16 + 4x16",
        "blocks.*.attention.out.weight": "row 1: 4x16",
        "blocks.*.mlp.up.weight": "column 0: 256x1",
        "blocks.*.mlp.up.bias": "column 0: 256x1",
        "blocks.*.mlp.down.weight": "row 1: 256x1",
        "head.weight": "vocabulary 0: 96x1",
    },
    "gpt_dropout": {
        "tokens.weight": "vocabulary 0: 96x1",
        "blocks.*.attention.qkv.weight": "column 0: 4x16 + 4x16 + 4x16",
        "blocks.*.attention.qkv.bias": "column 0: 4x16 + 4x16 + 4x16",
        "blocks.*.attention.out.weight": "row 1: 4x16",
        "blocks.*.mlp.up.weight": "column 0: 256x1",
        "blocks.*.mlp.up.bias": "column 0: 256x1",
        "blocks.*.mlp.down.weight": "row 1: 256x1",
        "head.weight": "vocabulary 0: 96x1",
    },
    "gpt_torch_attention": {
        "tokens.weight": "vocabulary 0: 96x1",
        "blocks.*.attention.inner.in_proj_weight": "column 0: 4x16 + 4x16 + 4x16",
        "blocks.*.attention.inner.in_proj_bias": "column 0: 4x16 + 4x16 + 4x16",
        "blocks.*.attention.inner.out_proj.weight": "row 1: 4x16",
        "blocks.*.mlp.up.weight": "column 0: 256x1",
        "blocks.*.mlp.up.bias": "column 0: 256x1",
        "blocks.*.mlp.down.weight": "row 1: 256x1",
        "head.weight": "vocabulary 0: 96x1",
    },
    "gpt_torch_attention_weights": {
        "tokens.weight": "vocabulary 0: 96x1",
        "blocks.*.attention.inner.in_proj_weight": "column 0: 4x16 + 4x16 + 4x16",
        "blocks.*.attention.inner.in_proj_bias": "column 0: 4x16 + 4x16 + 4x16",
        "blocks.*.attention.inner.out_proj.weight": "row 1: 4x16",
        "blocks.*.mlp.up.weight": "column 0: 256x1",
        "blocks.*.mlp.up.bias": "column 0: 256x1",
        "blocks.*.mlp.down.weight": "row 1: 256x1",
        "head.weight": "vocabulary 0: 96x1",
    },
    "vit_by_hand": {
        "blocks.*.attention.qkv.weight": "column 0: 3x4x16",
        "blocks.*.attention.qkv.bias": "column 0: 3x4x16",
        "blocks.*.attention.out.weight": "row 1: 4x16",
        "blocks.*.mlp.up.weight": "column 0: 256x1",
        "blocks.*.mlp.up.bias": "column 0: 256x1",
        "blocks.*.mlp.down.weight": "row 1: 256x1",
    },
}

BOUNDARIES = {
    "gpt_one_key_head": {"blocks.*.attention.k", "blocks.*.attention.v"},
    "gpt_one_key_head_norm": {"blocks.*.attention.k_norm", "blocks.*.attention.v"},
}
LOCAL_DROPOUTS = {"gpt_dropout": {"blocks.*.attention.dropout"}}
EXPECTED = Expected(DIVISIONS, boundaries=BOUNDARIES, local_dropouts=LOCAL_DROPOUTS)


@pytest.mark.parametrize("name", sorted(DIVISIONS))
def test_the_plan_is_the_one_that_is_expected(name):
    EXPECTED.check(name)


def test_layers_without_norms_are_divided_in_turn_by_columns_and_rows():
    plan = make_plan(analysed("chain"), 2)

    assert {name: division(each) for name, each in plan.sharded.items()} == {
        "layers.0.weight": "column 0: 64x1",
        "layers.0.bias": "column 0: 64x1",
        "layers.1.weight": "row 1: 64x1",
        "layers.2.weight": "column 0: 64x1",
        "layers.2.bias": "column 0: 64x1",
        "layers.3.weight": "row 1: 64x1",
    }


@pytest.mark.parametrize("size", [2, 4])
def test_heads_that_do_not_divide_leave_attention_whole_and_say_so(size):
    plan = make_plan(analysed("gpt_three_heads"), size)

    assert not any("attention" in name for name in plan.sharded)
    why = {each.name: each.why for each in plan.whole}["blocks.0.attention.q.weight"]
    assert f"3 is no multiple of {size}" in why


@pytest.mark.parametrize("size", [2, 4])
def test_a_vocabulary_that_does_not_divide_gives_the_first_rank_one_token_more(size):
    sharded = make_plan(analysed("gpt_odd_vocabulary"), size).sharded

    for name in ("head.weight", "tokens.weight"):
        rows = [sharded[name].local_shape(size, rank)[0] for rank in range(size)]
        assert rows == [97 // size + 1] + [97 // size] * (size - 1)


def test_a_vocabulary_of_fewer_tokens_than_ranks_is_whole_and_says_so():
    why = {each.name: each.why for each in make_plan(analysed("gpt_odd_vocabulary"), 98).whole}

    assert "97 tokens are fewer than 98 ranks" in why["head.weight"]


def test_heads_of_keys_that_do_not_divide_leave_the_group_whole():
    plan = make_plan(analysed("gpt_grouped"), 4)

    assert not any("attention" in name for name in plan.sharded)


@pytest.mark.parametrize("name", ["gpt_separate", "gpt_fused", "gpt_torch_attention"])
def test_views_name_sizes_of_heads_and_not_of_channels(name):
    plan = make_plan(analysed(name), 2)

    named = {each for number in plan.region_axes for each in plan.axes[number].parameters}
    assert not any("mlp" in each for each in named)
    # Torch's attention is run as layers of our own, whose sizes are theirs.
    assert bool(named) == (name != "gpt_torch_attention")


def test_attributes_are_sizes_of_the_model_and_not_of_the_batch():
    """Four rows of four heads make sixteen, the channels of a head: torch multiplies by rows."""
    made = example("gpt2_eager", rows=4)

    plan = make_plan(analyse(made.module, made.loss, blocks=find_blocks(made.module)), 2)

    names = {each.name for each in plan.attributes if each.module == "transformer.h.0.attn"}
    assert "num_heads" in names
    assert "head_dim" not in names


def test_all_names_of_a_tied_parameter_are_told():
    plan = make_plan(analysed("gpt_tied"), 2)

    assert plan.sharded["tokens.weight"].names == ("tokens.weight", "head.weight")


def test_an_axis_tells_its_block():
    plan = make_plan(analysed("gpt_fused"), 2)

    axis = plan.axes[plan.sharded["blocks.1.attention.qkv.weight"].axis]
    assert (axis.size, axis.blocks) == (4, ("blocks.1",))
