"""Compares two runs of a step.

``difference`` does not depend on how sums are distributed: gradients are compared relative to their
own size, but at least to a thousandth of the largest one, because gradients of key biases are zero
up to rounding. A rounding may decide which expert a token goes to. A third run, of the whole model
with parameters that differ by little more than roundings, shows how far apart two right runs can
be.
"""

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from boltmesh.strategies.checkpoint.chunks import DimDivision
from boltmesh.strategies.dry_run.step import DryRunOutcome

TOLERANCE = 1e-4
"""For fp32 sums in another order: prototypes differed by up to 2.2e-5 over 27 models."""

ROUGH = 0.05
"""For sums in bf16: about six roundings."""

PART = 2**24
"""Number of elements that are compared at once, so that fp64 copies of large gradients fit."""

_TIMES = 10
"""Allowed difference relative to that of the third run: about ``TOLERANCE`` without discrete
decisions, more if a token was routed elsewhere."""

_MOST = 0.1
"""Larger differences are errors, whatever roundings decide."""

_SMALL = 1e-3
"""Size relative to the largest gradient, below which gradients may be rounding alone."""


def difference(
    whole: DryRunOutcome,
    planned: DryRunOutcome,
    divided: Mapping[str, DimDivision],
    nudged: DryRunOutcome | None = None,
    *,
    tolerance: float = TOLERANCE,
) -> str | None:
    """Return a message about the first difference of a planned run; None without one.

    Args:
        whole: Outcome of the whole model.
        planned: Outcome by the plan.
        divided: This rank's division of each divided parameter.
        nudged: Outcome of the whole model with parameters ``NUDGE`` from its own, which shows how
            far apart right runs can be.
        tolerance: Relative distance that is always allowed.
    """
    nudged = nudged or whole

    def allowed(one: Tensor, third: Tensor, least: float) -> float:
        return min(max(tolerance, _TIMES * _apart(one, third, least)), _MOST)

    if len(whole.values) != len(planned.values):
        return f"gives {len(planned.values)} values for {len(whole.values)}"
    triples = zip(whole.values, planned.values, nudged.values, strict=True)
    for place, (one, other, third) in enumerate(triples):
        if one.shape != other.shape:
            return f"gives a value of shape {tuple(other.shape)} for {tuple(one.shape)}"
        apart = _apart(one, other, 0.0)
        if not apart <= allowed(one, third, 0.0):
            return f"gives a value (the {_ordinal(place)}) that is {apart:.2g} off"
    comparable = _comparable(whole, planned, nudged)
    if not (comparable or whole.values or whole.gradients):
        return "gives nothing that could be compared: it returns and logs nothing"
    for name, one, other, third in comparable:
        apart = _apart(one, other, 0.0)
        if not apart <= allowed(one, third, 0.0):
            return f"gives an output of {name} that is {apart:.2g} off"
    for name, one, other, third in _kept(whole, planned, nudged):
        if not _apart(one, third, 0.0) <= _MOST:
            continue  # such as a duration, or memory that was not set
        if one.shape != other.shape:
            return f"leaves {tuple(other.shape)} for {tuple(one.shape)} in the attribute {name}"
        apart = _apart(one, other, 0.0)
        if not apart <= allowed(one, third, 0.0):
            return f"leaves a value in the attribute {name} that is {apart:.2g} off"
    if whole.gradients.keys() != planned.gradients.keys():
        name = min(whole.gradients.keys() ^ planned.gradients.keys())
        return f"gives {'no' if name in whole.gradients else 'a'} gradient of {name}"
    sizes = (
        float(gradient.abs().max()) for gradient in whole.gradients.values() if gradient.numel()
    )
    largest = max(sizes, default=0.0)
    for name, one in whole.gradients.items():
        expected = divided[name].cut(one) if name in divided else one
        apart = _apart(expected, planned.gradients[name], _SMALL * largest)
        if not apart <= allowed(one, nudged.gradients.get(name, one), _SMALL * largest):
            return f"gives a gradient of {name} that is {apart:.2g} off"
    return None


def _comparable(
    whole: DryRunOutcome, planned: DryRunOutcome, nudged: DryRunOutcome
) -> list[tuple[str, Tensor, Tensor, Tensor]]:
    """Return the outputs of blocks that have the same shape in all runs; others are parts."""
    return [
        (name, one, other, third)
        for name, several in whole.probed.items()
        for one, other, third in zip(
            several, planned.probed.get(name, []), nudged.probed[name], strict=False
        )
        if one.shape == other.shape
    ]


def _kept(
    whole: DryRunOutcome, planned: DryRunOutcome, nudged: DryRunOutcome
) -> Iterator[tuple[str, Tensor, Tensor, Tensor]]:
    """Yield what both runs left in attributes, and what the third run did."""
    for name, several in whole.kept.items():
        third = nudged.kept.get(name, several)
        for each in zip(several, planned.kept.get(name, []), third, strict=False):
            yield name, *each


def _apart(one: Tensor, other: Tensor, least: float) -> float:
    """Return the largest difference relative to the size of the first tensor, or to ``least``."""
    if one.shape != other.shape:
        return float("inf")
    if not one.numel():
        return 0.0
    if not one.is_floating_point():
        return 0.0 if torch.equal(one, other) else float("inf")
    if one is other:  # without a third run
        return 0.0
    largest = float(one.abs().nan_to_num(nan=0.0, posinf=torch.inf).max())
    size = max(largest, least, torch.finfo(torch.float32).tiny)
    parts = zip(*(torch.split(tensor.flatten(), PART) for tensor in (one, other)), strict=True)
    # torch's maximum propagates NaN, which fails every comparison.
    return float(torch.stack([_most_apart(*pair) for pair in parts]).max()) / size


def _most_apart(one: Tensor, other: Tensor) -> Tensor:
    is_same = (one == other) | (one.isnan() & other.isnan())
    return (one.double() - other.double()).abs().masked_fill(is_same, 0.0).max()


def _ordinal(place: int) -> str:
    return "first" if place == 0 else f"{place + 1}th"
