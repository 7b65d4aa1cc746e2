"""Cross entropy of divided logits is torch's, number by number, and moves no logits."""

import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from boltmesh.errors import ConfigError
from tests.support.ranks import run_ranks
from tests.support.vocabularies import (
    counted_messages,
    divided_leaf,
    relative,
    vocabulary_of,
)

pytestmark = pytest.mark.ranks

POSITIONS = 12


def _batch(tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(tokens)
    logits = 4 * torch.randn(POSITIONS, tokens)
    targets = torch.randint(0, tokens, (POSITIONS,))
    targets[[1, 5]] = -100
    # Classes of weight 0 are legal; the first and the last token are on different ranks.
    weight = torch.rand(tokens)
    weight[0] = 0.0
    targets[2], targets[3] = 0, tokens - 1
    return logits, targets, weight


def _check(logits: Tensor, targets: Tensor, tolerance: float, **settings: Any) -> None:
    whole = logits.clone().requires_grad_()
    vocabulary = vocabulary_of(logits.shape[1])
    part, divided = divided_leaf(logits, vocabulary, 1)
    expected = F.cross_entropy(whole, targets, **settings)
    found = F.cross_entropy(divided, targets, **settings)
    assert found.dtype == expected.dtype
    assert found.shape == expected.shape
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance, equal_nan=True)
    # Rows count differently, so that no error hides in a sum.
    weights = torch.arange(1.0, expected.numel() + 1).view(expected.shape).to(expected.dtype)
    (expected * weights).sum().backward()
    (found * weights).sum().backward()
    assert part.grad is not None
    assert whole.grad is not None
    torch.testing.assert_close(
        part.grad, vocabulary.own(whole.grad, 1), rtol=10 * tolerance, atol=10 * tolerance
    )
    assert vocabulary.gathered_for == {}


def _every_setting(rank: int, size: int, tokens: int) -> int:
    logits, targets, weight = _batch(tokens)
    checked = 0
    for reduction, smoothing, has_weight in itertools.product(
        ["none", "mean", "sum"], [0.0, 0.1], [False, True]
    ):
        _check(
            logits,
            targets,
            1e-6,
            reduction=reduction,
            label_smoothing=smoothing,
            weight=weight if has_weight else None,
        )
        checked += 1
    _check(logits, targets.clamp(min=0), 1e-6, ignore_index=0)
    for reduction, smoothing in itertools.product(["none", "mean", "sum"], [0.0, 0.1]):
        nothing = torch.full_like(targets, -100)
        _check(logits, nothing, 1e-6, reduction=reduction, label_smoothing=smoothing)
    # One rank's tokens may all be ruled out at a position.
    half = tokens // size
    masked = logits.clone()
    masked[:4, :half] = -torch.inf
    masked[4:, tokens - half :] = -torch.inf
    reachable = torch.full_like(targets, tokens // 2 if size == 2 else half)
    reachable[:4] = tokens - 1
    reachable[4:] = 0
    _check(masked, reachable, 1e-6)
    _check(1e4 * logits, targets, 1e-6)
    _check(logits.double(), targets, 1e-12, weight=weight.double(), label_smoothing=0.3)
    return checked


@pytest.mark.sample("2-16")
@pytest.mark.parametrize(("size", "tokens"), [(2, 16), (2, 17), (4, 18)])
def test_every_setting_gives_the_loss_and_gradient_of_torch(size: int, tokens: int) -> None:
    assert run_ranks(_every_setting, size, tokens) == [12] * size


def _low_precision(rank: int, size: int) -> None:
    logits, targets, _ = _batch(64)
    for kind, digits in ((torch.bfloat16, 8), (torch.float16, 11)):
        low = logits.to(kind)
        vocabulary = vocabulary_of(64)
        part, divided = divided_leaf(low, vocabulary, 1)
        exact = low.float().requires_grad_()
        expected = F.cross_entropy(exact, targets, label_smoothing=0.1)
        expected.backward()
        found = F.cross_entropy(divided, targets, label_smoothing=0.1)
        assert found.dtype == kind
        found.backward()
        assert part.grad is not None
        assert exact.grad is not None
        # Sums are in fp32 and only results are rounded, once: half a unit of the last digit.
        assert relative(found, expected.detach()) < 0.51 * 2.0 ** (1 - digits)
        assert relative(part.grad, vocabulary.own(exact.grad, 1)) < 2.0 ** (1 - digits)


@pytest.mark.full
def test_sums_of_16_bit_logits_are_taken_in_32() -> None:
    run_ranks(_low_precision, 2)


def _sure(rank: int, size: int) -> tuple[float, float]:
    """Logits far from zero, of which one is so likely that little is left to the others."""
    logits = torch.randn(POSITIONS, 16, generator=torch.Generator().manual_seed(2)) + 60.0
    targets = torch.arange(POSITIONS)
    logits[targets, targets] += 12.0
    vocabulary = vocabulary_of(16)
    part, divided = divided_leaf(logits, vocabulary, 1)
    exact = logits.double().requires_grad_()
    expected = F.cross_entropy(exact, targets)
    expected.backward()
    found = F.cross_entropy(divided, targets)
    found.backward()
    assert part.grad is not None
    assert exact.grad is not None
    own = vocabulary.own(exact.grad, 1)
    return relative(found.detach(), expected.detach()), relative(part.grad, own)


@pytest.mark.full
def test_a_sure_prediction_keeps_the_digits_of_its_small_loss() -> None:
    # The loss is 2e-4. Half a unit of the last digit of 72 would be 2 % of it; of a sum near 1,
    # which is what torch has to round as well, it is 3e-4. A gradient is rounded so twice.
    for loss_error, gradient_error in run_ranks(_sure, 2):
        assert loss_error < 3e-4
        assert gradient_error < 6e-4


def _messages(rank: int, size: int, smoothing: float, tokens: int) -> list[tuple[str, int]]:
    logits, targets, _ = _batch(tokens)
    _, divided = divided_leaf(logits, vocabulary_of(tokens), 1)
    with counted_messages() as messages:
        F.cross_entropy(divided, targets, label_smoothing=smoothing).backward()
    return messages.sent


@pytest.mark.full
@pytest.mark.parametrize("tokens", [64, 1000])
def test_ranks_exchange_three_numbers_per_position_however_many_tokens(tokens: int) -> None:
    floats = 4 * POSITIONS
    for smoothing, numbers in ((0.0, 2), (0.1, 3)):
        expected = [("allreduce_", floats), ("allreduce_", numbers * floats)]
        assert run_ranks(_messages, 2, smoothing, tokens) == [expected] * 2


def _wrong_targets(rank: int, size: int) -> list[str]:
    logits, targets, _ = _batch(16)
    said = []
    for wrong in (16, 99, -1):
        targets[0] = wrong
        _, divided = divided_leaf(logits, vocabulary_of(16), 1)
        with pytest.raises(IndexError) as raised:
            F.cross_entropy(divided, targets)
        said.append(str(raised.value))
    return said


def test_a_target_that_no_rank_has_is_refused_by_all() -> None:
    run_ranks(_wrong_targets, 2)


def _probabilities(rank: int, size: int, loss_parallel: Any) -> dict[str, int]:
    logits, _, _ = _batch(17)
    soft = torch.softmax(torch.randn(POSITIONS, 17, generator=torch.manual_seed(1)), 1)
    vocabulary = vocabulary_of(17, loss_parallel)
    part, divided = divided_leaf(logits, vocabulary, 1)
    whole = logits.clone().requires_grad_()
    if loss_parallel is True:
        with pytest.raises(ConfigError, match="loss_parallel=auto"):
            F.cross_entropy(divided, soft)
        return {}
    F.cross_entropy(whole, soft).backward()
    found = F.cross_entropy(divided, soft)
    found.backward()
    assert part.grad is not None
    assert whole.grad is not None
    torch.testing.assert_close(part.grad, vocabulary.own(whole.grad, 1))
    return vocabulary.gathered_for


@pytest.mark.full
def test_probabilities_as_targets_gather_with_a_right_gradient_or_are_refused() -> None:
    assert run_ranks(_probabilities, 2, "auto") == [{"cross_entropy": 1}] * 2
    run_ranks(_probabilities, 2, True)


def _gathered_before(rank: int, size: int) -> tuple[float, float, float]:
    """Megatron's loss took gathered logits for divided ones: too high by log 2, wrong gradient."""
    logits, targets, _ = _batch(16)
    vocabulary = vocabulary_of(16)
    part, divided = divided_leaf(logits, vocabulary, 1)
    whole = logits.clone().requires_grad_()
    expected = F.cross_entropy(whole, targets)
    expected.backward()
    found = F.cross_entropy(torch.sort(divided, stable=True).values, targets.clamp(max=15))
    again = F.cross_entropy(divided.cumsum(1).diff(dim=1, prepend=torch.zeros(12, 1)), targets)
    again.backward()
    assert part.grad is not None
    assert whole.grad is not None
    return (
        abs(float(again - expected)),
        relative(part.grad, vocabulary.own(whole.grad, 1)),
        float(found),
    )


@pytest.mark.full
def test_logits_that_were_gathered_before_the_loss_give_the_same_loss_and_gradient() -> None:
    for loss_error, gradient_error, _ in run_ranks(_gathered_before, 2):
        assert loss_error < 1e-5
        assert gradient_error < 1e-5
