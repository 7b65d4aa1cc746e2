"""The whole plan of each small model of Hugging Face."""

import pytest

from boltmesh.strategies.tensor.planning import make_plan
from tests.support.planned import analysed, divisions, patterns

DIVISIONS = {
    "llama": {
        "model.embed_tokens.weight": "vocabulary 0: 96x1",
        "model.layers.*.self_attn.q_proj.weight": "column 0: 2x32",
        "model.layers.*.self_attn.k_proj.weight": "column 0: 2x16",
        "model.layers.*.self_attn.v_proj.weight": "column 0: 2x16",
        "model.layers.*.self_attn.o_proj.weight": "row 1: 2x32",
        "model.layers.*.mlp.gate_proj.weight": "column 0: 128x1",
        "model.layers.*.mlp.up_proj.weight": "column 0: 128x1",
        "model.layers.*.mlp.down_proj.weight": "row 1: 128x1",
        "lm_head.weight": "vocabulary 0: 96x1",
    },
    "llama_tied": {
        "model.embed_tokens.weight": "vocabulary 0: 96x1",
        "model.layers.*.self_attn.q_proj.weight": "column 0: 2x32",
        "model.layers.*.self_attn.k_proj.weight": "column 0: 2x16",
        "model.layers.*.self_attn.v_proj.weight": "column 0: 2x16",
        "model.layers.*.self_attn.o_proj.weight": "row 1: 2x32",
        "model.layers.*.mlp.gate_proj.weight": "column 0: 128x1",
        "model.layers.*.mlp.up_proj.weight": "column 0: 128x1",
        "model.layers.*.mlp.down_proj.weight": "row 1: 128x1",
    },
    "qwen2": {
        "model.embed_tokens.weight": "vocabulary 0: 96x1",
        "model.layers.*.self_attn.q_proj.weight": "column 0: 2x32",
        "model.layers.*.self_attn.q_proj.bias": "column 0: 2x32",
        "model.layers.*.self_attn.k_proj.weight": "column 0: 2x16",
        "model.layers.*.self_attn.k_proj.bias": "column 0: 2x16",
        "model.layers.*.self_attn.v_proj.weight": "column 0: 2x16",
        "model.layers.*.self_attn.v_proj.bias": "column 0: 2x16",
        "model.layers.*.self_attn.o_proj.weight": "row 1: 2x32",
        "model.layers.*.mlp.gate_proj.weight": "column 0: 128x1",
        "model.layers.*.mlp.up_proj.weight": "column 0: 128x1",
        "model.layers.*.mlp.down_proj.weight": "row 1: 128x1",
        "lm_head.weight": "vocabulary 0: 96x1",
    },
    "qwen3": {
        "model.embed_tokens.weight": "vocabulary 0: 96x1",
        "model.layers.*.self_attn.q_proj.weight": "column 0: 2x32",
        "model.layers.*.self_attn.k_proj.weight": "column 0: 2x16",
        "model.layers.*.self_attn.v_proj.weight": "column 0: 2x16",
        "model.layers.*.self_attn.o_proj.weight": "row 1: 2x32",
        "model.layers.*.mlp.gate_proj.weight": "column 0: 128x1",
        "model.layers.*.mlp.up_proj.weight": "column 0: 128x1",
        "model.layers.*.mlp.down_proj.weight": "row 1: 128x1",
        "lm_head.weight": "vocabulary 0: 96x1",
    },
    "mistral": {
        "model.embed_tokens.weight": "vocabulary 0: 96x1",
        "model.layers.*.self_attn.q_proj.weight": "column 0: 2x32",
        "model.layers.*.self_attn.k_proj.weight": "column 0: 2x16",
        "model.layers.*.self_attn.v_proj.weight": "column 0: 2x16",
        "model.layers.*.self_attn.o_proj.weight": "row 1: 2x32",
        "model.layers.*.mlp.gate_proj.weight": "column 0: 128x1",
        "model.layers.*.mlp.up_proj.weight": "column 0: 128x1",
        "model.layers.*.mlp.down_proj.weight": "row 1: 128x1",
        "lm_head.weight": "vocabulary 0: 96x1",
    },
    "gemma": {
        "model.embed_tokens.weight": "vocabulary 0: 96x1",
        "model.layers.*.self_attn.q_proj.weight": "column 0: 4x16",
        "model.layers.*.self_attn.o_proj.weight": "row 1: 4x16",
        "model.layers.*.mlp.gate_proj.weight": "column 0: 128x1",
        "model.layers.*.mlp.up_proj.weight": "column 0: 128x1",
        "model.layers.*.mlp.down_proj.weight": "row 1: 128x1",
    },
    "gemma2": {
        "model.embed_tokens.weight": "vocabulary 0: 96x1",
        "model.layers.*.self_attn.q_proj.weight": "column 0: 2x32",
        "model.layers.*.self_attn.k_proj.weight": "column 0: 2x16",
        "model.layers.*.self_attn.v_proj.weight": "column 0: 2x16",
        "model.layers.*.self_attn.o_proj.weight": "row 1: 2x32",
        "model.layers.*.mlp.gate_proj.weight": "column 0: 128x1",
        "model.layers.*.mlp.up_proj.weight": "column 0: 128x1",
        "model.layers.*.mlp.down_proj.weight": "row 1: 128x1",
    },
    "gpt2": {
        "transformer.wte.weight": "vocabulary 0: 96x1",
        "transformer.h.*.attn.c_attn.weight": "column 1: 4x16 + 4x16 + 4x16",
        "transformer.h.*.attn.c_attn.bias": "column 0: 4x16 + 4x16 + 4x16",
        "transformer.h.*.attn.c_proj.weight": "row 0: 4x16",
        "transformer.h.*.mlp.c_fc.weight": "column 1: 256x1",
        "transformer.h.*.mlp.c_fc.bias": "column 0: 256x1",
        "transformer.h.*.mlp.c_proj.weight": "row 0: 256x1",
    },
    "gpt2_eager": {
        "transformer.wte.weight": "vocabulary 0: 96x1",
        "transformer.h.*.attn.c_attn.weight": "column 1: 4x16 + 4x16 + 4x16",
        "transformer.h.*.attn.c_attn.bias": "column 0: 4x16 + 4x16 + 4x16",
        "transformer.h.*.attn.c_proj.weight": "row 0: 4x16",
        "transformer.h.*.mlp.c_fc.weight": "column 1: 256x1",
        "transformer.h.*.mlp.c_fc.bias": "column 0: 256x1",
        "transformer.h.*.mlp.c_proj.weight": "row 0: 256x1",
    },
    "bert": {
        "bert.embeddings.word_embeddings.weight": "vocabulary 0: 96x1",
        "bert.encoder.layer.*.attention.self.query.weight": "column 0: 4x16",
        "bert.encoder.layer.*.attention.self.query.bias": "column 0: 4x16",
        "bert.encoder.layer.*.attention.self.key.weight": "column 0: 4x16",
        "bert.encoder.layer.*.attention.self.key.bias": "column 0: 4x16",
        "bert.encoder.layer.*.attention.self.value.weight": "column 0: 4x16",
        "bert.encoder.layer.*.attention.self.value.bias": "column 0: 4x16",
        "bert.encoder.layer.*.attention.output.dense.weight": "row 1: 4x16",
        "bert.encoder.layer.*.intermediate.dense.weight": "column 0: 128x1",
        "bert.encoder.layer.*.intermediate.dense.bias": "column 0: 128x1",
        "bert.encoder.layer.*.output.dense.weight": "row 1: 128x1",
        "cls.predictions.bias": "vocabulary 0: 96x1",
    },
    "t5": {
        "shared.weight": "vocabulary 0: 96x1",
        "encoder.block.*.layer.*.SelfAttention.q.weight": "column 0: 4x16",
        "encoder.block.*.layer.*.SelfAttention.k.weight": "column 0: 4x16",
        "encoder.block.*.layer.*.SelfAttention.v.weight": "column 0: 4x16",
        "encoder.block.*.layer.*.SelfAttention.o.weight": "row 1: 4x16",
        "encoder.block.*.layer.*.SelfAttention.relative_attention_bias.weight": "table 1: 4x1",
        "encoder.block.*.layer.*.DenseReluDense.wi.weight": "column 0: 128x1",
        "encoder.block.*.layer.*.DenseReluDense.wo.weight": "row 1: 128x1",
        "decoder.block.*.layer.*.SelfAttention.q.weight": "column 0: 4x16",
        "decoder.block.*.layer.*.SelfAttention.k.weight": "column 0: 4x16",
        "decoder.block.*.layer.*.SelfAttention.v.weight": "column 0: 4x16",
        "decoder.block.*.layer.*.SelfAttention.o.weight": "row 1: 4x16",
        "decoder.block.*.layer.*.SelfAttention.relative_attention_bias.weight": "table 1: 4x1",
        "decoder.block.*.layer.*.EncDecAttention.q.weight": "column 0: 4x16",
        "decoder.block.*.layer.*.EncDecAttention.k.weight": "column 0: 4x16",
        "decoder.block.*.layer.*.EncDecAttention.v.weight": "column 0: 4x16",
        "decoder.block.*.layer.*.EncDecAttention.o.weight": "row 1: 4x16",
        "decoder.block.*.layer.*.DenseReluDense.wi.weight": "column 0: 128x1",
        "decoder.block.*.layer.*.DenseReluDense.wo.weight": "row 1: 128x1",
    },
    "vit": {
        "vit.layers.*.attention.q_proj.weight": "column 0: 4x16",
        "vit.layers.*.attention.q_proj.bias": "column 0: 4x16",
        "vit.layers.*.attention.k_proj.weight": "column 0: 4x16",
        "vit.layers.*.attention.k_proj.bias": "column 0: 4x16",
        "vit.layers.*.attention.v_proj.weight": "column 0: 4x16",
        "vit.layers.*.attention.v_proj.bias": "column 0: 4x16",
        "vit.layers.*.attention.o_proj.weight": "row 1: 4x16",
        "vit.layers.*.mlp.fc1.weight": "column 0: 128x1",
        "vit.layers.*.mlp.fc1.bias": "column 0: 128x1",
        "vit.layers.*.mlp.fc2.weight": "row 1: 128x1",
    },
    "neox": {
        "gpt_neox.embed_in.weight": "vocabulary 0: 96x1",
        "gpt_neox.layers.*.attention.query_key_value.weight": "column 0: 4x48",
        "gpt_neox.layers.*.attention.query_key_value.bias": "column 0: 4x48",
        "gpt_neox.layers.*.attention.dense.weight": "row 1: 4x16",
        "gpt_neox.layers.*.mlp.dense_h_to_4h.weight": "column 0: 128x1",
        "gpt_neox.layers.*.mlp.dense_h_to_4h.bias": "column 0: 128x1",
        "gpt_neox.layers.*.mlp.dense_4h_to_h.weight": "row 1: 128x1",
        "lm_head.weight": "vocabulary 0: 96x1",
    },
    "bloom": {
        "transformer.word_embeddings.weight": "vocabulary 0: 96x1",
        "transformer.h.*.self_attention.query_key_value.weight": "column 0: 4x48",
        "transformer.h.*.self_attention.query_key_value.bias": "column 0: 4x48",
        "transformer.h.*.self_attention.dense.weight": "row 1: 4x16",
        "transformer.h.*.mlp.dense_h_to_4h.weight": "column 0: 256x1",
        "transformer.h.*.mlp.dense_h_to_4h.bias": "column 0: 256x1",
        "transformer.h.*.mlp.dense_4h_to_h.weight": "row 1: 256x1",
    },
    "phi3": {
        "model.embed_tokens.weight": "vocabulary 0: 96x1",
        "model.layers.*.self_attn.o_proj.weight": "row 1: 2x32",
        "model.layers.*.self_attn.qkv_proj.weight": "column 0: 2x32 + 2x16 + 2x16",
        "model.layers.*.mlp.gate_up_proj.weight": "column 0: 128x1 + 128x1",
        "model.layers.*.mlp.down_proj.weight": "row 1: 128x1",
        "lm_head.weight": "vocabulary 0: 96x1",
    },
    "opt": {
        "model.decoder.embed_tokens.weight": "vocabulary 0: 96x1",
        "model.decoder.layers.*.self_attn.k_proj.weight": "column 0: 4x16",
        "model.decoder.layers.*.self_attn.k_proj.bias": "column 0: 4x16",
        "model.decoder.layers.*.self_attn.v_proj.weight": "column 0: 4x16",
        "model.decoder.layers.*.self_attn.v_proj.bias": "column 0: 4x16",
        "model.decoder.layers.*.self_attn.q_proj.weight": "column 0: 4x16",
        "model.decoder.layers.*.self_attn.q_proj.bias": "column 0: 4x16",
        "model.decoder.layers.*.self_attn.out_proj.weight": "row 1: 4x16",
        "model.decoder.layers.*.fc1.weight": "column 0: 128x1",
        "model.decoder.layers.*.fc1.bias": "column 0: 128x1",
        "model.decoder.layers.*.fc2.weight": "row 1: 128x1",
    },
    "falcon": {
        "transformer.word_embeddings.weight": "vocabulary 0: 96x1",
        "transformer.h.*.self_attention.query_key_value.weight": "column 0: 2x64",
        "transformer.h.*.self_attention.dense.weight": "row 1: 2x32",
        "transformer.h.*.mlp.dense_h_to_4h.weight": "column 0: 256x1",
        "transformer.h.*.mlp.dense_4h_to_h.weight": "row 1: 256x1",
    },
    "mixtral": {
        "model.embed_tokens.weight": "vocabulary 0: 96x1",
        "model.layers.*.self_attn.q_proj.weight": "column 0: 2x32",
        "model.layers.*.self_attn.k_proj.weight": "column 0: 2x16",
        "model.layers.*.self_attn.v_proj.weight": "column 0: 2x16",
        "model.layers.*.self_attn.o_proj.weight": "row 1: 2x32",
        "model.layers.*.mlp.experts.gate_up_proj": "expert 1: 128x1 + 128x1",
        "model.layers.*.mlp.experts.down_proj": "expert 2: 128x1",
        "lm_head.weight": "vocabulary 0: 96x1",
    },
}

PARTIAL = {
    "qwen3": {
        "model.layers.*.self_attn.k_norm.weight",
        "model.layers.*.self_attn.q_norm.weight",
    }
}
BOUNDARIES = {"gemma": {"model.layers.*.self_attn.k_proj", "model.layers.*.self_attn.v_proj"}}
LOCAL_DROPOUTS = dict[str, set[str]]()


@pytest.mark.parametrize("name", sorted(DIVISIONS))
def test_the_plan_is_the_one_that_is_expected(name):
    analysis = analysed(name)

    plan = make_plan(analysis, 2)

    assert divisions(plan) == DIVISIONS[name]
    assert {*plan.sharded, *(each.name for each in plan.whole)} == set(analysis.parameters)
    assert all(each.why for each in plan.whole)
    assert patterns(plan.partial) == PARTIAL.get(name, set())
    assert patterns(plan.boundaries) == BOUNDARIES.get(name, set())
    assert patterns(plan.local_dropouts) == LOCAL_DROPOUTS.get(name, set())
    assert plan.unknown == {}
    assert not analysis.trace.guessed
