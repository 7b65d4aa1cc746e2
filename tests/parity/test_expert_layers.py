"""Experts whose layers the tensor axis divides, too, equal one process that sees all batches."""

from functools import partial
from typing import Any

import pytest
from torch import Tensor

from boltmesh.errors import ConfigError
from boltmesh.strategies import Parallel3DStrategy
from tests.support import expert_models, expert_runs
from tests.support.expert_runs import differences, train, train_alone
from tests.support.ranks import RankFailure, run_ranks

pytestmark = pytest.mark.ranks

LAYERS = {"expert": 2, "tensor": 2, "expert_tensor": "tensor", "zero_stage": 1}
CASES: dict[str, tuple[str, int, int, dict[str, Any], dict[str, Any]]] = {
    "grouped_mm": ("qwen3_moe:grouped_mm", 4, 2, {}, {}),
    "recomputed": (
        "stacked",
        4,
        2,
        {"zero_stage": 2, "activation_checkpointing": "full"},
        {"optimizer": "adamw", "is_starved": True},
    ),
    "stage 3": ("mixtral", 4, 2, {"zero_stage": 3}, {"accumulate": 2}),
    "2 of 4, stage 0": ("deepseek_v3", 8, 4, {"zero_stage": 0}, {}),
    "batched": ("capacity", 4, 2, {}, {"optimizer": "adamw"}),
    "bmm": ("llama4", 4, 2, {}, {}),
    "sequence": ("mixtral", 4, 2, {"sequence_parallel": True}, {}),
    "context": ("qwen3_moe", 8, 2, {"context": 2}, {}),
    "pipeline": ("stacked", 8, 2, {"pipeline": 2, "microbatches": 1}, {"optimizer": "adamw"}),
    "offloaded": (
        "stacked",
        4,
        2,
        {"zero_stage": 3, "offload_optimizer": "cpu", "offload_parameters": "cpu"},
        {"optimizer": "adamw", "reads_gradients": False, "accumulate": 2},
    ),
}


@pytest.mark.full
@pytest.mark.parametrize("case", CASES)
def test_divided_layers_of_experts_equal_one_process(case: str) -> None:
    kind, world_size, data, strategy, options = CASES[case]
    worker = partial(train, kind=kind, strategy={**LAYERS, **strategy}, **options)
    alone = {key: value for key, value in options.items() if key != "reads_gradients"}
    gaps = differences(run_ranks(worker, world_size), train_alone(data, kind, **alone))
    assert max(gaps.values()) < 2e-6, gaps


def short_tokens(number: int, rank: int) -> Tensor:
    """Return a batch that has one row on one rank in one step, unlike those before."""
    whole = expert_models.tokens(number, rank)
    return whole[:1] if (number, rank) == (1, 1) else whole


def train_short(rank: int, world_size: int, strategy: dict[str, Any]) -> expert_runs.Outcome:
    vars(expert_runs)["tokens"] = short_tokens
    return train(rank, world_size, "stacked", strategy=strategy)


@pytest.mark.full
@pytest.mark.parametrize(
    "strategy",
    [
        {"expert": 4, "tensor": 2, "zero_stage": 1},
        {"expert": 2, "tensor": 2, "zero_stage": 1},
        LAYERS,
    ],
    ids=["all ranks", "tensor ranks", "layers"],
)
def test_a_batch_of_one_row_on_one_replica_leaves_none_waiting(
    strategy: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = run_ranks(partial(train_short, strategy=strategy), 4)
    monkeypatch.setattr(expert_runs, "tokens", short_tokens)
    gaps = differences(ranks, train_alone(2, "stacked"))
    assert max(gaps.values()) < 2e-6, gaps


def masked_step(self: expert_models.MoeModule, batch: Tensor, batch_idx: int) -> Any:
    """Take a step that masks words in the batches of one row alone."""
    mask = {"attention_mask": (batch != batch[0, 0]).long()} if len(batch) == 1 else {}
    return self.net(input_ids=batch, labels=batch, **mask).loss


def train_masked(rank: int, world_size: int, strategy: dict[str, Any]) -> expert_runs.Outcome:
    vars(expert_runs)["tokens"] = short_tokens
    vars(expert_models)["MoeModule"].training_step = masked_step
    return train(rank, world_size, "mixtral:no aux", strategy=strategy)


WHOLE = {"expert": 4, "tensor": 2, "zero_stage": 1}


@pytest.mark.full
@pytest.mark.filterwarnings("default:Tensor plan.*runs whole:UserWarning")
@pytest.mark.parametrize(
    "strategy",
    [WHOLE, {**WHOLE, "sequence_parallel": True}, {**WHOLE, "zero_stage": 2}],
    ids=["whole", "sequence", "stage 2"],
)
def test_a_block_that_gets_a_mask_on_one_replica_runs_whole_there(
    strategy: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = run_ranks(partial(train_masked, strategy=strategy), 4)
    monkeypatch.setattr(expert_runs, "tokens", short_tokens)
    monkeypatch.setattr(expert_models.MoeModule, "training_step", masked_step)
    gaps = differences(ranks, train_alone(2, "mixtral:no aux"))
    assert max(gaps.values()) < 2e-6, gaps


@pytest.mark.full
def test_a_mask_where_experts_are_divided_too_ends_the_run() -> None:
    with pytest.raises(RankFailure, match="experts get rows of ranks that do not verify it"):
        run_ranks(partial(train_masked, strategy=LAYERS), 4)


@pytest.mark.full
@pytest.mark.parametrize(
    ("kind", "options", "world_size", "text"),
    [
        ("list", {}, 4, "does not divide the layers of each expert. Leave expert_tensor out"),
        ("stacked", {"expert": 4}, 4, "expert=4 needs a multiple of 4 ranks, and there are 2"),
        (
            "jetmoe",
            {},
            4,
            "input_linear.* does not divide the layers of each expert. Leave",
        ),
    ],
    ids=["list", "ranks", "jetmoe"],
)
def test_experts_whose_layers_cannot_be_divided_are_refused(
    kind: str, options: dict[str, Any], world_size: int, text: str
) -> None:
    with pytest.raises(RankFailure, match=text):
        run_ranks(partial(train, kind=kind, strategy={**LAYERS, **options}), world_size)


@pytest.mark.full
@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"tensor": 4, "expert": 2, "expert_tensor": 2}, "divided as all others, over tensor=4"),
        ({"tensor": 2, "expert_tensor": "tensor"}, "is about experts of an expert axis"),
    ],
    ids=["some", "alone"],
)
def test_other_parts_of_an_expert_are_refused(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        Parallel3DStrategy(**options)
