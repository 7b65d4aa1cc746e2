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

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "tensor": (2, {}),
    "recomputed": (2, {"activation_checkpointing": "full"}),
    "selectively recomputed": (2, {"activation_checkpointing": "selective"}),
    "sequence": (2, {"sequence_parallel": True}),
    "ZeRO": (4, {"data": 2, "tensor": 2, "zero_stage": 3}),
    "pipeline": (4, {"pipeline": 2, "tensor": 2, "microbatches": 2}),
}


def train(
    rank: int, world_size: int, cases: list[Settings], layout: str
) -> list[tuple[list[float], list[str]]]:
    options = LAYOUTS[layout][1]
    kind = Parallel3DStrategy if "tensor" in options else TensorParallelStrategy
    found = []
    for settings in cases:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            losses = by_a_strategy(settings, kind(telemetry=False, **options), world_size)
        found.append((losses, [str(each.message) for each in caught]))
    return found


@pytest.mark.sample("tensor", "pipeline")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_mask_behind_a_batch_without_one(layout: str) -> None:
    cases = [TWO_KEY_HEADS] if layout == "sequence" else [ONE_KEY_HEAD, TWO_KEY_HEADS]
    wanted = [by_a_plain_loop(settings) for settings in cases]
    told: list[list[str]] = [[] for _ in cases]
    for found in run_ranks(train, LAYOUTS[layout][0], cases, layout, timeout_s=170):
        for place, (losses, messages) in enumerate(found):
            assert losses == pytest.approx(wanted[place], rel=1e-5), cases[place]
            told[place] += [each for each in messages if "runs whole on every rank" in each]
    if layout != "sequence":
        assert told[0]
        assert "attention_mask" in told[0][0]
    assert not told[-1]
