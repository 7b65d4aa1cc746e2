"""Without gradients, operators tell what a mean was taken over."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from boltmesh.strategies.pipeline.counting import Counts

LOGITS = torch.randn(4, 6, 10, generator=torch.Generator().manual_seed(0))
LABELS = torch.arange(24).reshape(4, 6) % 10
LABELS[1, 2:] = -100
MASK = LABELS != -100


@pytest.mark.parametrize(
    ("value", "count"),
    [
        (lambda: F.cross_entropy(LOGITS.flatten(0, 1), LABELS.flatten()), 20),
        (lambda: F.cross_entropy(LOGITS.transpose(1, 2), LABELS) * 2 + 1, 20),
        (lambda: LOGITS.square().mean(), 240),
        (lambda: F.mse_loss(LOGITS, LOGITS + 1), 240),
        (lambda: (LOGITS[..., 0] * MASK).sum() / MASK.sum(), 20),
        (lambda: LOGITS.mean() + LOGITS.square().mean(), 240),
    ],
)
def test_means_have_counts(value: Callable[[], Tensor], count: int) -> None:
    counts = Counts()
    with torch.no_grad(), counts:
        made = value()
    found = counts.of(made)
    assert found is not None
    assert found.kind == "mean"
    assert float(found.count) == count


def test_sums_are_sums_and_other_scalars_unknown() -> None:
    counts = Counts()
    with torch.no_grad(), counts:
        total, largest = LOGITS.sum(), LOGITS.max()
        mixed = LOGITS.mean() + LOGITS[0].mean()
    found = counts.of(total)
    assert found is not None
    assert found.kind == "sum"
    assert counts.of(largest) is None
    assert counts.of(mixed) is None
