"""Outcomes are compared in parts, with the result of a comparison at once."""

import math

import pytest
import torch

from boltmesh.strategies.dry_run import comparison
from boltmesh.strategies.dry_run.comparison import _apart, difference
from boltmesh.strategies.dry_run.step import DryRunOutcome


@pytest.mark.parametrize("part", [1, 7, 2**24])
def test_the_largest_difference_is_found_in_any_part(
    part: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(comparison, "PART", part)
    one = torch.arange(24.0).reshape(4, 6).t()
    other = one.clone()
    assert _apart(one, other, 0.0) == 0.0
    other[5, 3] += 2.3
    assert _apart(one, other, 0.0) == pytest.approx(2.3 / 23, rel=1e-6)
    one[0, 0] = other[0, 0] = math.nan
    other[1, 1] = math.inf
    assert _apart(one, other, 0.0) == math.inf
    other[1, 1] = one[1, 1]
    assert _apart(one, other, 0.0) == pytest.approx(2.3 / 23, rel=1e-6)


def test_a_gradient_without_elements_is_compared() -> None:
    outcome = DryRunOutcome(gradients={"tokens": torch.zeros(0, 7), "weight": torch.ones(2)})
    assert difference(outcome, outcome, {}) is None
