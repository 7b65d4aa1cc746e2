"""A convolution along the sequence fetches the neighbours that its kernel looks at."""

from typing import Any, cast

from torch.nn import functional

from boltmesh.strategies.context.cut import CutTensor
from boltmesh.strategies.context.exchange import fetch
from boltmesh.strategies.context.rules.table import cut_rule, named


def _one(value: Any) -> Any:
    return value[0] if isinstance(value, (tuple, list)) else value


@cut_rule("conv1d")
def conv1d(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Without strides, and where each rank has one stretch."""
    names = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")
    given = named(names, args, kwargs)
    value, weight = given.pop("input"), given.pop("weight")
    stride, padding = _one(given.pop("stride", 1)), _one(given.pop("padding", 0))
    dilation = _one(given.pop("dilation", 1))
    if (
        not isinstance(value, CutTensor)
        or value.ndim != 3
        or value.cut_dim != 2
        or not value.is_simple
        or isinstance(weight, CutTensor)
        or stride != 1
        or not isinstance(padding, int)
    ):
        return NotImplemented
    reach = dilation * (weight.shape[-1] - 1)
    if value.positions.length + 2 * padding <= reach:
        return NotImplemented
    padded = cast("CutTensor", functional.pad(value, (padding, padding))) if padding else value
    positions = padded.positions.narrowed(0, padded.positions.length - reach)
    if any(len(each) > 1 for each in positions.parts):
        return NotImplemented
    wants = [((own[0][0], own[0][1] + reach),) if own else () for own in positions.parts]
    state = value.state
    seen = fetch(padded.local, 2, padded.positions, wants, state.group, "halo")
    if positions.count(state.rank):
        made = func(seen, weight, dilation=dilation, **given)
    else:  # its edges of the graph stay, for other ranks wait for its backward pass
        made = seen.new_zeros(seen.shape[0], weight.shape[0], 0) + 0 * (seen.sum() + weight.sum())
    return value.like(made, positions=positions)
