"""Calls of blocks that the first batch did not have are verified before they count.

Batches with padding train as in one process behind a first batch without it.

Attention of Hugging Face then gets a mask, and calls other operators than those that the tensor
plan was verified with.
"""

import warnings
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from boltmesh.check.differences import Trace, find_differences
from boltmesh.check.parity import Problem, trace_layout, trace_one_process
from boltmesh.strategies import Parallel3DStrategy, TensorParallelStrategy
from tests.support.numbered import Settings, by_a_plain_loop, by_a_strategy
from tests.support.ranks import run_ranks
from tests.support.stack import Stack, token_data

pytest.importorskip("transformers")
pytestmark = pytest.mark.ranks

ONE_KEY_HEAD: Settings = {
    "kind": "Qwen2", "vocab_size": 40, "hidden_size": 16, "intermediate_size": 32,
    "num_attention_heads": 4, "num_key_value_heads": 1, "num_hidden_layers": 2,
    "padded": [False, True, True],
}  # fmt: skip
"""Divided over queries alone: the code that repeats keys for a mask needs the whole."""

TWO_KEY_HEADS: Settings = {**ONE_KEY_HEAD, "kind": "Llama", "num_key_value_heads": 2}
"""Right with and without a mask."""

STATE_SPACES: Settings = {
    **TWO_KEY_HEADS, "kind": "Jamba", "num_hidden_layers": 3, "num_experts": 1,
    "attn_layer_period": 2, "attn_layer_offset": 1, "mamba_d_state": 4, "mamba_d_conv": 3,
    "mamba_dt_rank": 2, "use_mamba_kernels": False,
}  # fmt: skip
"""Layers 0 and 2 have no keys, whose length could tell whether the cache is in use."""

MODELS = {"one": ONE_KEY_HEAD, "two": TWO_KEY_HEADS}

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "tensor": (2, {}),
    "recomputed": (2, {"activation_checkpointing": "full"}),
    "selectively recomputed": (2, {"activation_checkpointing": "selective"}),
    "sequence": (2, {"sequence_parallel": True}),
    "ZeRO": (4, {"data": 2, "tensor": 2, "zero_stage": 3}),
    "pipeline": (4, {"pipeline": 2, "tensor": 2, "microbatches": 2}),
}


def train(
    rank: int, world_size: int, settings: Settings, layout: str
) -> tuple[list[float], list[str]]:
    options = LAYOUTS[layout][1]
    kind = Parallel3DStrategy if "tensor" in options else TensorParallelStrategy
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        losses = by_a_strategy(settings, kind(telemetry=False, **options), world_size)
    return losses, [str(each.message) for each in caught]


@pytest.mark.full
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("key_heads", MODELS)
def test_a_mask_behind_a_batch_without_one(key_heads: str, layout: str) -> None:
    if key_heads == "one" and layout == "sequence":
        pytest.skip("its sequence is not divided")
    settings = MODELS[key_heads]
    wanted = by_a_plain_loop(settings)
    told: list[str] = []
    for losses, messages in run_ranks(train, LAYOUTS[layout][0], settings, layout):
        assert losses == pytest.approx(wanted, rel=1e-5)
        told += [each for each in messages if "runs whole on every rank" in each]
    if key_heads == "one":
        assert told
        assert "attention_mask" in told[0]
    else:
        assert not told


@pytest.mark.parametrize(
    "settings", [STATE_SPACES, {**ONE_KEY_HEAD, "recomputes": True}], ids=["states", "recomputed"]
)
def test_a_mask_behind_a_batch_without_one_by_other_layers(settings: Settings) -> None:
    wanted = by_a_plain_loop(settings)
    for losses, _ in run_ranks(train, 2, settings, "tensor"):
        assert losses == pytest.approx(wanted, rel=1e-5)


class RelativePositions(nn.Module):
    """Attention with a table of distances, as a Conformer has: an odd number of rows."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(12)
        self.query, self.key = nn.Linear(12, 12, bias=False), nn.Linear(12, 12, bias=False)
        self.value, self.out = nn.Linear(12, 12, bias=False), nn.Linear(12, 12)
        self.distances = nn.Embedding(129, 6)
        self.dropout = nn.Dropout(0.0)

    def forward(self, x: Tensor) -> Tensor:
        normed, places = self.norm(x), torch.arange(x.shape[1])
        q, k, v = (
            each(normed).unflatten(-1, (2, 6)).transpose(1, 2)
            for each in (self.query, self.key, self.value)
        )
        table = self.distances((places[:, None] - places).clamp(-64, 64) + 64)
        scores = q @ k.mT + torch.einsum("bhnd,nrd->bhnr", q, table)
        mixed = self.dropout(scores.softmax(-1)) @ v
        return x + self.out(mixed.transpose(1, 2).flatten(2))


class Distances(Stack):
    def __init__(self) -> None:
        super().__init__(width=12)
        self.blocks = nn.ModuleList([RelativePositions(), RelativePositions()])


PROBLEM = Problem(
    module=Distances,
    train=partial(token_data, 16, 4),
    validation=partial(token_data, 8, 4),
    steps=4,
    trainer={"accelerator": "cpu"},
)


def one_process(rank: int, world_size: int) -> Trace:
    return trace_one_process(PROBLEM, data_size=1, is_dealt=False)


def divided(rank: int, world_size: int) -> Trace:
    strategy = TensorParallelStrategy(telemetry=False)
    trace = trace_layout(PROBLEM, strategy, devices=world_size)
    assert strategy.plan.sharded["blocks.0.distances.weight"].style == "vocabulary"
    return trace


def test_a_block_whose_parameter_is_divided_unevenly_is_verified_in_evaluation_mode() -> None:
    reference = run_ranks(one_process, 1)[0]
    for trace in run_ranks(divided, 2):
        assert find_differences(reference, trace) == []
