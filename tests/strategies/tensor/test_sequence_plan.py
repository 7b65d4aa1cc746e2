"""Where sequences are divided, and why not where they are not."""

import pytest

from boltmesh.errors import ConfigError
from boltmesh.strategies.tensor.plan import ExitPoint, GatherPoint
from boltmesh.strategies.tensor.planning import make_plan
from tests.support.planned import analysed, pattern, patterns

GATHERS = {
    "gpt_separate": {("blocks.*.attention", 0), ("blocks.*.mlp", 0)},
    "gpt_fused": {("blocks.*.attention", 0), ("blocks.*.mlp", 0)},
    "gpt_one_key_head": {("blocks.*.attention", 0), ("blocks.*.mlp", 0)},
    "gpt_torch_attention": {("blocks.*.attention", 0), ("blocks.*.mlp", 0)},
    "vit_by_hand": {("blocks.*.attention", 0), ("blocks.*.mlp", 0)},
    "llama": {("model.layers.*.self_attn", "hidden_states"), ("model.layers.*.mlp", 0)},
    "qwen3": {("model.layers.*.self_attn", "hidden_states"), ("model.layers.*.mlp", 0)},
    "gpt2": {("transformer.h.*.attn", 0), ("transformer.h.*.mlp", 0)},
    "bert": {
        ("bert.encoder.layer.*.attention.self", 0),
        ("bert.encoder.layer.*.intermediate", 0),
    },
    "bloom": {("transformer.h.*.self_attention", 0), ("transformer.h.*.mlp", 0)},
    "t5": {
        ("encoder.block.*.layer.*.SelfAttention", 0),
        ("encoder.block.*.layer.*.DenseReluDense", 0),
        ("decoder.block.*.layer.*.SelfAttention", 0),
        ("decoder.block.*.layer.*.EncDecAttention", 0),
        ("decoder.block.*.layer.*.DenseReluDense", 0),
    },
}


def planned(name):
    return make_plan(analysed(name), 2, sequence_parallel=True)


@pytest.mark.parametrize("name", sorted(GATHERS))
def test_the_sequence_is_gathered_once_for_all_columns_of_a_module(name):
    sequence = planned(name).sequence

    assert {(pattern(each.module), each.argument) for each in sequence.gathers} == GATHERS[name]
    assert sequence.dim == 1


def test_a_stack_is_divided_from_its_first_block_to_its_last():
    sequence = planned("llama").sequence

    assert sequence.stacks == (("model.layers.0", "model.layers.1"),)
    assert sequence.entries == (GatherPoint("model.layers.0", 0),)
    assert sequence.exits == (ExitPoint("model.layers.1", None),)


def test_two_stacks_are_divided_each_for_itself_and_give_the_first_of_what_they_give():
    sequence = planned("t5").sequence

    assert sequence.stacks == (
        ("encoder.block.0", "encoder.block.2"),
        ("decoder.block.0", "decoder.block.2"),
    )
    assert sequence.exits == (ExitPoint("encoder.block.2", 0), ExitPoint("decoder.block.2", 0))


def test_keys_and_values_of_the_other_stack_are_fed_by_no_gather():
    fed = patterns(planned("t5").sequence.fed)

    assert "decoder.block.*.layer.*.EncDecAttention.q" in fed
    assert "decoder.block.*.layer.*.EncDecAttention.k" not in fed
    assert "decoder.block.*.layer.*.SelfAttention.k" in fed


def test_norms_and_biases_behind_rows_see_some_of_the_tokens():
    plan = planned("gpt2")

    assert patterns(plan.partial) == {
        "transformer.h.*.attn.c_proj.bias",
        "transformer.h.*.ln_1.bias",
        "transformer.h.*.ln_1.weight",
        "transformer.h.*.ln_2.bias",
        "transformer.h.*.ln_2.weight",
        "transformer.h.*.mlp.c_proj.bias",
    }


def test_behind_a_gather_no_boundary_sums_a_second_time():
    without, plan = make_plan(analysed("gemma"), 2), planned("gemma")

    assert patterns(without.boundaries) == {
        "model.layers.*.self_attn.k_proj",
        "model.layers.*.self_attn.v_proj",
    }
    assert plan.boundaries == ()
    assert "model.layers.0.self_attn.k_proj.weight" in plan.partial


def test_mixtures_of_experts_run_on_the_whole_sequence():
    sequence = planned("mixtral").sequence

    assert [point.module for point in sequence.whole] == [
        "model.layers.0.mlp",
        "model.layers.1.mlp",
    ]
    assert {(point.argument, point.place) for point in sequence.whole} == {(0, None)}


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("gpt_three_heads", "attention_for_cpu in blocks.0.attention looks at several tokens"),
        ("opt", "fc2 does not give the sequence in a dimension of its own"),
        ("chain", "no stack of blocks"),
    ],
)
def test_a_sequence_that_cannot_be_divided_is_refused_with_the_reason(name, why):
    with pytest.raises(ConfigError, match=f"sequence_parallel=True, but .*{why}"):
        planned(name)
