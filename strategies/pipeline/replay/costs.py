"""What a split weighs: units in the order in which a step calls them, with what each costs."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from torch.nn import Module

from boltmesh.strategies.pipeline.replay.trace import TensorSpec, Trace


@dataclass(frozen=True)
class UnitUse:
    """One unit of a model, as one step on one batch uses it."""

    name: str
    num_parameters: int
    """Its own and those that it shares with other units."""
    parameter_bytes: int
    output_bytes: int
    """Of all its calls together."""
    flops: int
    """Floating point operations of its forward calls, as torch counts them."""
    is_called: bool
    """Whether this step calls it at all; another batch may."""


def units_in_call_order(trace: Trace, units: Mapping[str, Module]) -> tuple[UnitUse, ...]:
    """Return all units, in the order in which the step first calls them.

    Units that it does not call stand behind the one that precedes them in the model: layers that a
    batch skips stay among their neighbours.

    Args:
        trace: One run of the step, probed with ``counts_flops=True``.
        units: All units by name, in the order of the model.
    """
    events = trace.unit_events()
    order = list(dict.fromkeys(trace.events[event].name for event in events))
    called = set(order)
    previous: str | None = None
    for name in units:
        if name not in called:
            order.insert(0 if previous is None else order.index(previous) + 1, name)
        previous = name
    sizes: dict[str, int] = dict.fromkeys(order, 0)
    for event in events:
        sizes[trace.events[event].name] += sum(map(_bytes, trace.outputs[event].leaves))
    return tuple(
        UnitUse(
            name=name,
            num_parameters=sum(each.numel() for each in units[name].parameters()),
            parameter_bytes=sum(
                each.numel() * each.element_size() for each in units[name].parameters()
            ),
            output_bytes=sizes[name],
            flops=trace.flops.get(name, 0),
            is_called=name in called,
        )
        for name in order
    )


def _bytes(leaf: object) -> int:
    if not isinstance(leaf, TensorSpec):
        return 0
    return math.prod(leaf.shape) * leaf.dtype.itemsize
