"""Every family of transformers with routed experts: equal to one process, or a true reason."""

from functools import partial

import pytest

from tests.support.expert_runs import differences, train, train_alone
from tests.support.ranks import RankFailure, run_ranks

pytestmark = pytest.mark.ranks

EQUAL = (
    "afmoe", "aria_text", "axk1", "axk2", "bailing_hybrid", "beam", "cohere2_moe", "dbrx",
    "deepseek_ocr2_text", "deepseek_v2", "deepseek_v3", "deepseek_v32", "deepseek_v4",
    "diffusion_gemma_text", "dots1", "dots3_note_text", "ernie4_5_moe", "ernie4_5_vl_moe_text",
    "exaone_moe", "flex_olmo", "flint", "gemma4_text", "glm4_moe", "glm4_moe_lite",
    "glm4v_moe_text", "glm5_next_text", "glm_moe_dsa", "gpt_oss", "granitemoe", "granitemoe_swa",
    "granitemoehybrid", "granitemoeshared", "hunyuan_v1_moe", "hy_v3", "hy_v4", "inkling2_text",
    "inkling_text", "jamba", "jetmoe", "kimi_linear", "kolibri1", "laguna", "lfm2_moe",
    "llama4_text", "mellum", "mimo_v2_flash", "minimax", "minimax_m2", "minimax_m3_vl_text",
    "mistral4", "mistral_large4_text", "mixtral", "nemotron_h", "nllb-moe", "olmoe",
    "openai_privacy_filter", "phimoe", "qwen2_moe", "qwen3_5_moe_text", "qwen3_moe", "qwen3_next",
    "qwen3_omni_moe_text", "qwen3_vl_moe_text", "qwen4_exp_text", "solar_open", "step3p7",
    "switch_transformers", "unlimited_ocr_text", "zaya",
)  # fmt: skip
WHOLE = {
    "longcat_flash": "its experts share",  # experts that give back their rows have no parameters
    "muse_spark_text": "its experts share .*post_expert_norm",
}


@pytest.mark.sample("deepseek_v3")
@pytest.mark.parametrize("kind", EQUAL)
def test_a_family_equals_one_process(kind: str) -> None:
    worker = partial(train, kind=kind, strategy={"stage": 2, "expert": 2}, steps=2)
    gaps = differences(run_ranks(worker, 2), train_alone(2, kind, steps=2))
    assert max(gaps.values()) < 5e-6, gaps


@pytest.mark.sample("longcat_flash")
@pytest.mark.parametrize("kind", WHOLE)
def test_a_family_is_refused_with_the_reason(kind: str) -> None:
    with pytest.raises(RankFailure, match=WHOLE[kind]):
        run_ranks(partial(train, kind=kind, steps=1), 2)
