import pytest

from boltmesh.strategies.tensor.hugging_face import disagreements
from boltmesh.strategies.tensor.planning import make_plan, with_user_plan
from tests.support.planned import analysed
from tests.support.tensor_models import example, hugging_face


@pytest.mark.parametrize(
    "name", ["gemma2", "llama", "mistral", "mixtral", "neox", "qwen2", "qwen3"]
)
def test_plans_agree_with_those_of_hugging_face(name):
    assert disagreements(make_plan(analysed(name), 2), hugging_face(name)) == ()


@pytest.mark.parametrize("name", ["gpt2", "bert", "t5"])
def test_a_model_without_a_plan_of_its_own_has_nothing_to_disagree_with(name):
    assert disagreements(make_plan(analysed(name), 2), hugging_face(name)) == ()


def test_a_model_by_hand_has_none():
    module = example("gpt_fused").module
    assert disagreements(make_plan(analysed("gpt_fused"), 2), module) == ()


def test_what_hugging_face_gathers_and_we_do_not_is_told():
    notes = disagreements(make_plan(analysed("phi3"), 2), hugging_face("phi3"))

    assert len(notes) == 4
    assert (
        "model.layers.*.self_attn.qkv_proj: Hugging Face gathers what is behind it, and this "
        "plan keeps that divided"
    ) in notes


def test_what_hugging_face_divides_and_we_do_not_is_told_with_the_reason_once_for_all_blocks():
    plan = with_user_plan(
        make_plan(analysed("llama"), 2), analysed("llama"), {"model.layers.*.mlp.up_proj": "whole"}
    )

    notes = disagreements(plan, hugging_face("llama"))

    assert len(notes) == 3
    assert notes[0].startswith(
        "model.layers.*.mlp.gate_proj: Hugging Face divides it (colwise), and this plan does not:"
    )
    assert "the plan that was given says 'whole'" in notes[0]


def test_what_hugging_face_leaves_whole_is_told(monkeypatch):
    model = hugging_face("llama")
    plan = dict(model.config.base_model_tp_plan)
    del plan["layers.*.mlp.down_proj"]
    plan["layers.*.self_attn.o_proj"] = "colwise"
    plan["layers.*.input_layernorm.weight"] = "replicated_with_grad_allreduce"
    monkeypatch.setattr(type(model.config), "base_model_tp_plan", plan)

    assert set(disagreements(make_plan(analysed("llama"), 2), model)) == {
        (
            "model.layers.*.mlp.down_proj.weight: Hugging Face leaves it whole, and this plan "
            "divides it"
        ),
        "model.layers.*.self_attn.o_proj: Hugging Face divides it colwise, and this plan by row",
        (
            "model.layers.*.input_layernorm.weight: Hugging Face sums its gradient over ranks, and "
            "this plan does not"
        ),
    }
