"""Batches that differ have other digests, and the difference is told."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from boltmesh.strategies.dry_run.batch_check import BatchDigest, batch_digest, explain_difference

DTYPES = (
    *(torch.float32, torch.bfloat16, torch.complex64, torch.bool, torch.int64, torch.uint8),
    *(torch.uint16, torch.float8_e4m3fn),
)


@dataclass
class Batch:
    tokens: Tensor
    names: list[str]


def tokens() -> Tensor:
    return torch.arange(64 * 128).view(64, 128) % 97


def masked(share: float) -> Tensor:
    """Tokens with another choice of masked ones each time."""
    made = tokens()
    made[torch.rand(made.shape) < share] = 1000
    return made


def test_equal_batches_have_equal_digests_wherever_their_memory_lies() -> None:
    one = Batch(tokens(), ["a", "b"])
    other = Batch(tokens().t().contiguous().t(), ["a", "b"])
    assert not other.tokens.is_contiguous()
    assert batch_digest(one) == batch_digest(other)
    assert 0 < batch_digest(one).number < 2**56


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"x": tokens()}, {"x": tokens() + 1}),
        ({"x": tokens()}, {"x": tokens().int()}),
        ({"x": tokens()}, {"y": tokens()}),
        ([tokens(), 1], [tokens(), 2]),
        ({"x": ["a", "b"]}, {"x": ["a", "c"]}),
        ({"x": "a"}, {"x": "b"}),
        ({"x": None}, {"x": 0}),
        ({"x": np.arange(5)}, {"x": np.arange(5) + 1}),
        ({"x": np.array(["a", {}], object)}, {"x": np.array(["b", {}], object)}),
        (Batch(tokens(), ["a"]), Batch(tokens(), ["b"])),
        ({"x": torch.tensor(1.0)}, {"x": torch.tensor(2.0)}),
        ({"x": torch.zeros(0, 2)}, {"x": torch.zeros(0, 3)}),
    ],
)
def test_what_differs_is_seen(one: Any, other: Any) -> None:
    assert batch_digest(one).number != batch_digest(other).number


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_elements_of_every_type_count(dtype: torch.dtype) -> None:
    x = torch.zeros(70, 70).to(dtype)
    assert batch_digest(x).number != batch_digest(torch.ones(70, 70).to(dtype)).number


def test_masks_drawn_apart_are_told_apart() -> None:
    torch.manual_seed(0)
    digests = {batch_digest({"ids": masked(0.02), "labels": tokens()}).number for _ in range(200)}
    assert len(digests) == 200


@pytest.mark.parametrize("width", [128, 127, 8, 1])
def test_every_column_of_a_tensor_is_looked_at(width: int) -> None:
    whole = torch.zeros(65536 // width, width)
    for column in range(width):
        changed = whole.clone()
        changed[:, column] = 1.0
        assert batch_digest(whole).number != batch_digest(changed).number


def test_other_devices_are_not_waited_for() -> None:
    on_device = torch.zeros(4, 4, device="meta")
    assert batch_digest(on_device).number != batch_digest(torch.zeros(4, 5, device="meta")).number


def test_a_difference_is_told_in_words() -> None:
    short, long = batch_digest([torch.zeros(2)]), batch_digest([torch.zeros(3)])
    said = explain_difference({4: short, 6: short, 7: long})
    assert said.startswith("Rank 4 has a batch of [0] float32 (2,), and rank 7 one of [0] float32")
    last = batch_digest([torch.zeros(2)], is_last=True)
    assert explain_difference({0: last, 1: short}).startswith("The data of rank 0 ends with this")
    assert explain_difference({0: BatchDigest(1, "x"), 1: BatchDigest(3, "x")}).startswith(
        "Ranks 0 and 1 have batches of the same shapes with other values."
    )
