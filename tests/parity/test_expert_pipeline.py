"""Experts of a stage, divided over its data ranks, equal one process that sees all batches.

Rows are exchanged for each microbatch. Batches are of different size on each rank unless the
schedule weighs microbatches by what their losses were divided by.
"""

from functools import partial
from typing import Any

import pytest

from boltmesh.errors import ConfigError
from tests.support.expert_runs import differences, strategy_of, train, train_alone
from tests.support.ranks import RankFailure, run_ranks

pytestmark = pytest.mark.ranks

Options = dict[str, Any]
EVEN = {"is_even": True}
CASES: dict[str, tuple[str, int, int, Options, Options]] = {
    "auto": ("qwen3_moe:no aux", 4, 2, {}, {"optimizer": "adamw", "accumulate": 2}),
    "stage 3": ("mixtral:no aux", 4, 2, {"zero_stage": 3}, {"accumulate": 2}),
    "stage 0": ("deepseek_v3", 4, 2, {"zero_stage": 0}, {}),
    "starved": ("stacked", 4, 2, {"zero_stage": 2}, {"is_starved": True, "optimizer": "adamw"}),
    "grouped_mm, bias": ("gpt_oss:no aux", 4, 2, {"zero_stage": 2}, {}),
    "batched": ("capacity", 4, 2, {"microbatches": 1}, {"optimizer": "adamw"}),
    "recomputed": ("stacked", 4, 2, {"activation_checkpointing": "full"}, {}),
    "tensor": ("mixtral:no aux", 4, 1, {"tensor": 2}, {"optimizer": "adamw"}),
    "2 of 4": ("stacked", 8, 4, {"zero_stage": 1}, {"accumulate": 2}),
    "1f1b": (
        "stacked",
        4,
        2,
        {"schedule": "1f1b", "zero_stage": 2},
        {**EVEN, "optimizer": "adamw", "accumulate": 2},
    ),
    "interleaved": ("mixtral:no aux", 4, 2, {"schedule": "interleaved_1f1b"}, EVEN),
    "zero_bubble, starved": (
        "stacked",
        4,
        2,
        {"schedule": "zero_bubble"},
        {**EVEN, "is_starved": True},
    ),
    "router logits": ("mixtral", 4, 2, {"microbatches": 1}, {"optimizer": "adamw"}),
    "offloaded": (
        "stacked",
        4,
        2,
        {"zero_stage": 3, "offload_optimizer": "cpu", "offload_parameters": "cpu"},
        {"optimizer": "adamw", "reads_gradients": False, "accumulate": 2},
    ),
}


def beside_stages(options: Options) -> Options:
    return {"pipeline": 2, "expert": 2, "microbatches": 2, "zero_stage": 1, **options}


@pytest.mark.full
@pytest.mark.parametrize("case", CASES)
def test_experts_of_stages_equal_one_process(case: str) -> None:
    kind, world_size, data, strategy, options = CASES[case]
    worker = partial(train, kind=kind, strategy=beside_stages(strategy), **options)
    alone = {key: value for key, value in options.items() if key != "reads_gradients"}
    gaps = differences(run_ranks(worker, world_size), train_alone(data, kind, **alone))
    assert max(gaps.values()) < 2e-6, gaps


@pytest.mark.full
@pytest.mark.parametrize(
    ("kind", "strategy", "text"),
    [
        ("stacked", {"schedule": "1f1b"}, "weigh their microbatches differently"),
        ("stacked", {"microbatches": 3}, "are cut into 2 to 3 microbatches"),
        ("list", {}, "experts of a list are brought for a batch"),
        ("stacked, LoRA", {}, "adapters of stacked experts are brought for a batch"),
        ("gpt_oss", {}, r"of shape .* has no dimension of rows. Use microbatches=1"),
    ],
    ids=["1f1b", "parts", "list", "LoRA", "balancing loss"],
)
def test_what_would_give_other_numbers_is_refused(kind: str, strategy: Options, text: str) -> None:
    with pytest.raises(RankFailure, match=text):
        run_ranks(partial(train, kind=kind, strategy=beside_stages(strategy)), 4)


def test_a_schedule_with_two_versions_of_weights_is_refused() -> None:
    with pytest.raises(ConfigError, match="computes with two versions of the weights"):
        strategy_of(zero_stage=1, pipeline=2, expert=2, schedule="pipedream_2bw")
