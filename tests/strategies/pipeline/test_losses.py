"""The losses of microbatches, weighed, are the loss of the batch."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from boltmesh.errors import ConfigError
from boltmesh.strategies.pipeline.losses import StepWeights, reductions

Loss = Callable[[Tensor, Tensor], Tensor]


def mask(labels: Tensor) -> Tensor:
    return labels != -100


def smoothed(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), label_smoothing=0.1)


def weighted(logits: Tensor, labels: Tensor) -> Tensor:
    weight = torch.arange(1.0, 11.0)
    return F.cross_entropy(logits.transpose(1, 2), labels, weight=weight)


def masked(logits: Tensor, labels: Tensor) -> Tensor:
    each = logits.square().mean(-1)
    return (each * mask(labels)).sum() / mask(labels).sum()


def with_penalty(logits: Tensor, labels: Tensor) -> Tensor:
    penalty = 0.01 * PENALISED.square().sum().sqrt()
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten()) * 3 + penalty.clone()


PENALISED = torch.ones(3, requires_grad=True)

LOSSES: dict[str, Loss] = {
    "tokens that count": lambda x, y: F.cross_entropy(x.flatten(0, 1), y.flatten()),
    "tokens of two dimensions": lambda x, y: F.cross_entropy(x.transpose(1, 2), y),
    "weights of classes": weighted,
    "smoothed labels": smoothed,
    "mean": lambda x, _: x.square().mean(),
    "mean of means": lambda x, _: x.square().mean((1, 2)).mean(),
    "sum of means over rows": lambda x, _: x.square().mean(0).sum(),
    "mse": lambda x, _: F.mse_loss(x, torch.zeros_like(x)),
    "two means over the same": lambda x, _: x.abs().mean() + 0.5 * x.square().mean(),
    "a mask": masked,
    "sum": lambda x, _: x.square().sum(),
    "sum over a constant": lambda x, _: x.square().sum() / 1000,
    "sum over the rows": lambda x, _: x.square().sum() / x.shape[0],
    "sum over the tokens": lambda x, _: x.square().sum() / (x.shape[0] * x.shape[1]),
    "batch mean": lambda x, _: F.kl_div(x, x.detach().exp(), reduction="batchmean"),
    "binary": lambda x, _: F.binary_cross_entropy_with_logits(x, torch.zeros_like(x)),
    "sum of token losses": lambda x, y: F.cross_entropy(x.transpose(1, 2), y, reduction="sum"),
    "a stack": lambda x, _: torch.stack([x.abs().mean(), x.square().mean()]).sum(),
}


@pytest.fixture
def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(7, 6, 10, generator=generator, requires_grad=True)
    labels = torch.randint(0, 10, (7, 6), generator=generator)
    labels[0, :5] = -100
    labels[3:5] = -100
    return logits, labels


@pytest.mark.parametrize("name", LOSSES)
def test_weighed_microbatches_give_the_batch(name: str, batch: tuple[Tensor, Tensor]) -> None:
    logits, labels = batch
    whole = LOSSES[name](logits, labels)
    (wanted,) = torch.autograd.grad(whole, logits)
    weights = StepWeights()
    parts = zip(logits.split([3, 2, 2]), labels.split([3, 2, 2]), strict=True)
    total, gradient = torch.zeros(()), torch.zeros_like(logits)
    for part, target in parts:
        loss = LOSSES[name](part, target)
        scaled, _ = weights.weigh(loss, len(part))
        total = total + scaled.detach()
        if scaled.requires_grad:  # a part in which nothing counts need not
            gradient = gradient + torch.autograd.grad(scaled, logits)[0]
    torch.testing.assert_close(total / weights.total, whole.detach())
    torch.testing.assert_close(gradient / weights.total, wanted)


def test_a_penalty_on_weights_counts_once(batch: tuple[Tensor, Tensor]) -> None:
    logits, labels = batch
    whole = with_penalty(logits, labels)
    (wanted,) = torch.autograd.grad(whole, PENALISED)
    weights, gradient = StepWeights(), torch.zeros(3)
    for part, target in zip(logits.split([3, 4]), labels.split([3, 4]), strict=True):
        loss = with_penalty(part, target)
        scaled, _ = weights.weigh(loss, len(part))
        gradient = gradient + torch.autograd.grad(scaled, PENALISED)[0]
    torch.testing.assert_close(gradient / weights.total, wanted)


def test_means_over_different_things_are_refused(batch: tuple[Tensor, Tensor]) -> None:
    logits, labels = batch
    weights = StepWeights()

    def mixed(logits: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten()) + logits.square().mean()

    weights.weigh(mixed(logits[:3], labels[:3]), 3)
    second = mixed(logits[3:], labels[3:])
    with pytest.raises(ConfigError, match=r"NllLoss over 12, Mean over 240.*microbatches=1"):
        weights.weigh(second, 4)


def test_a_mean_and_a_sum_are_refused(batch: tuple[Tensor, Tensor]) -> None:
    logits, _ = batch
    loss = logits.mean() + logits.sum()
    with pytest.raises(ConfigError, match="adds a mean and a sum"):
        StepWeights().weigh(loss, len(logits))


def test_counts_are_those_that_torch_divides_by(batch: tuple[Tensor, Tensor]) -> None:
    logits, labels = batch
    (found,) = reductions(F.cross_entropy(logits.flatten(0, 1), labels.flatten()))
    assert found.kind == "mean"
    assert float(found.count) == int(mask(labels).sum())
