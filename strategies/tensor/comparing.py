"""Says in words where a planned run of a step differs from the run of the whole model.

What is compared does not depend on how much of a sum a rank does: gradients relative to their own
size, but at least to a thousandth of the largest one, for those of key biases are zero in truth.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from boltmesh.strategies.checkpoint.parts import Division
from boltmesh.strategies.tensor.rehearsal import Outcome

TOLERANCE = 1e-4
"""Of fp32 sums in another order: prototypes differed by up to 2.2e-5 over 27 models."""

_SMALL = 1e-3
"""Of the largest gradient: below it a gradient may be rounding alone."""


def difference(whole: Outcome, planned: Outcome, divided: Mapping[str, Division]) -> str | None:
    """Say where a planned run differs first; None if it does not."""
    if len(whole.values) != len(planned.values):
        return f"gives {len(planned.values)} values for {len(whole.values)}"
    for place, (one, other) in enumerate(zip(whole.values, planned.values, strict=True)):
        if one.shape != other.shape:
            return f"gives a value of shape {tuple(other.shape)} for {tuple(one.shape)}"
        apart = _apart(one, other, 0.0)
        if not apart <= TOLERANCE:
            return f"gives a value (the {_ordinal(place)}) that is {apart:.2g} off"
    comparable = _comparable(whole, planned)
    if not (comparable or whole.values or whole.gradients):
        return "gives nothing that could be compared: it returns and logs nothing"
    for name, one, other in comparable:
        apart = _apart(one, other, 0.0)
        if not apart <= TOLERANCE:
            return f"gives an output of {name} that is {apart:.2g} off"
    if whole.gradients.keys() != planned.gradients.keys():
        name = min(whole.gradients.keys() ^ planned.gradients.keys())
        return f"gives {'no' if name in whole.gradients else 'a'} gradient of {name}"
    largest = max((float(each.abs().max()) for each in whole.gradients.values()), default=0.0)
    for name, one in whole.gradients.items():
        expected = divided[name].cut(one) if name in divided else one
        apart = _apart(expected, planned.gradients[name], _SMALL * largest)
        if not apart <= TOLERANCE:
            return f"gives a gradient of {name} that is {apart:.2g} off"
    return None


def _comparable(whole: Outcome, planned: Outcome) -> list[tuple[str, Tensor, Tensor]]:
    """Return the outputs of blocks that are whole in both; a layer by itself may give its part."""
    return [
        (name, one, other)
        for name, several in whole.probed.items()
        for one, other in zip(several, planned.probed.get(name, []), strict=False)
        if one.shape == other.shape
    ]


def _apart(one: Tensor, other: Tensor, least: float) -> float:
    """Return the distance relative to the size of the first, or to a least size."""
    if one.shape != other.shape:
        return float("inf")
    if not one.numel():
        return 0.0
    if not one.is_floating_point():
        return 0.0 if torch.equal(one, other) else float("inf")
    size = max(float(one.abs().max()), least, torch.finfo(torch.float32).tiny)
    is_same = (one == other) | (one.isnan() & other.isnan())
    apart = (one.double() - other.double()).abs().masked_fill(is_same, 0.0)
    return float(apart.max()) / size


def _ordinal(place: int) -> str:
    return "first" if place == 0 else f"{place + 1}th"
