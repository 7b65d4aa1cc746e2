from boltmesh.strategies.tensor.plan import rows, without_numbers
from boltmesh.strategies.tensor.planning import make_plan
from tests.support.planned import analysed


def table(name, **kwargs):
    return {each.pattern: each for each in rows(make_plan(analysed(name), 2, **kwargs))}


def test_blocks_are_told_in_one_row_with_what_a_rank_keeps_of_all_of_them():
    row = table("gpt_fused")["blocks.*.attention.qkv.weight"]

    assert (row.count, row.shape) == (2, (192, 64))
    assert row.style == "column of dim 0: 4x16 + 4x16 + 4x16"
    assert row.rank_bytes == 2 * 192 * 64 // 2 * 4
    assert row.collectives == "sum backward"
    assert "before blocks.*.attention.out.weight sums over them" in row.why


def test_what_is_whole_says_why_and_is_counted_whole():
    row = table("gpt_three_heads")["blocks.*.attention.q.weight"]

    assert row.style == "whole"
    assert row.rank_bytes == row.count * 60 * 60 * 4
    assert "3 is no multiple of 2" in row.why


def test_a_vocabulary_that_does_not_divide_is_counted_for_the_rank_with_most_tokens():
    assert table("gpt_odd_vocabulary")["tokens.weight"].rank_bytes == 49 * 64 * 4


def test_every_byte_of_a_rank_is_in_the_table():
    plan = make_plan(analysed("llama"), 2)

    whole = sum(each.elements // 2 for each in plan.sharded.values())
    whole += sum(each.elements for name, each in analysed("llama").parameters.items()
                 if name not in plan.sharded)  # fmt: skip
    assert sum(each.rank_bytes for each in rows(plan)) == whole * 4


def test_gradients_that_are_summed_are_told():
    assert table("qwen3")["model.layers.*.self_attn.q_norm.weight"].collectives == (
        "sum of its gradient"
    )
    assert table("gemma")["model.layers.*.self_attn.k_proj.weight"].collectives == (
        "sum backward of what it gives"
    )
    assert table("qwen3")["model.norm.weight"].collectives == ""


def test_a_divided_sequence_is_gathered_and_scattered():
    found = table("llama", sequence_parallel=True)

    assert found["model.layers.*.self_attn.o_proj.weight"].collectives == (
        "scattered sum forward, gather backward"
    )
    assert found["model.layers.*.self_attn.q_proj.weight"].collectives.startswith("gather forward")


def test_numbers_of_blocks_are_replaced_and_others_are_not():
    assert without_numbers("layers.0.conv1.2.weight") == "layers.*.conv1.*.weight"
    assert without_numbers("97 tokens are no multiple of 2") == "97 tokens are no multiple of 2"
    assert without_numbers("0.weight; norm in layers.3") == "*.weight; norm in layers.*"
