"""Batches with padding train as in one process behind a first batch without it.

Attention of Hugging Face then gets a mask, and calls other operators than those that the tensor
plan was verified with.
"""

import warnings
from typing import Any

import pytest

from boltmesh.strategies import Parallel3DStrategy, TensorParallelStrategy
from tests.support.numbered import Settings, by_a_plain_loop, by_a_strategy
from tests.support.ranks import run_ranks

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
