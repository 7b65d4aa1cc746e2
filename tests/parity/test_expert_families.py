"""Every family of transformers with routed experts: equal to one process, or a true reason."""

from functools import partial

import pytest

from tests.support.expert_runs import differences, train, train_alone
from tests.support.ranks import RankFailure, run_ranks

pytestmark = pytest.mark.ranks

EQUAL = (
    "afmoe", "aria_text", "axk1", "axk2", "bailing_hybrid", "beam", "cohere2_moe", "deepseek_v2",
    "deepseek_v3", "deepseek_v32", "deepseek_v4", "dots1", "dots3_note_text", "ernie4_5_moe",
    "exaone_moe", "flex_olmo", "flint", "glm4_moe", "glm4_moe_lite", "glm_moe_dsa", "granitemoe",
    "granitemoe_swa", "granitemoehybrid", "granitemoeshared", "hunyuan_v1_moe", "hy_v3", "hy_v4",
    "inkling2_text", "inkling_text", "jamba", "jetmoe", "kimi_linear", "kolibri1", "laguna",
    "lfm2_moe", "llama4_text", "mellum", "mimo_v2_flash", "minimax", "minimax_m2",
    "minimax_m3_vl_text", "nemotron_h", "olmoe", "phimoe", "qwen2_moe", "qwen3_5_moe",
    "qwen3_5_moe_text", "qwen3_next", "qwen4_exp", "qwen4_exp_text", "solar_open",
)  # fmt: skip
WHOLE = {
    "longcat_flash": "its experts share",  # experts that give back their rows have no parameters
}


@pytest.mark.sample("deepseek_v3", "jetmoe")
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
