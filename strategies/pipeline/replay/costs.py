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
    flops: int
    """Floating point operations of its forward calls, as torch counts them."""
    is_called: bool
    """Whether this step calls it at all; another batch may."""
    trained_bytes: int = 0
    """Of its parameters that get a gradient."""
    kept_bytes: int | None = None
    """What autograd keeps of one call of the step, up to the next unit; None where nobody noted."""


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
    return tuple(
        UnitUse(
            name=name,
            num_parameters=sum(each.numel() for each in units[name].parameters()),
            parameter_bytes=sum(
                each.numel() * each.element_size() for each in units[name].parameters()
            ),
            flops=trace.flops.get(name, 0),
            is_called=name in called,
            trained_bytes=sum(
                each.nbytes for each in units[name].parameters() if each.requires_grad
            ),
            kept_bytes=sum(trace.kept.get(name, {}).values()) if trace.kept else None,
        )
        for name in order
    )


def kept_by_stage(trace: Trace, stage_of_unit: Mapping[str, int]) -> tuple[int, ...] | None:
    """Return the bytes that each stage keeps of one microbatch, from its forward to its backward.

    That is what autograd saves, without parameters and the batch, and what the stage received, also
    where it only hands it on. None where nobody noted it.

    Args:
        trace: One run of the step, probed with ``notes_kept=True``.
        stage_of_unit: The stage of each unit, from 0 without gaps.
    """
    if not trace.kept:
        return None
    kept: list[dict[int, int]] = [{} for _ in range(max(stage_of_unit.values()) + 1)]
    for name, storages in trace.kept.items():
        kept[stage_of_unit.get(name, 0)].update(storages)
    first_call: dict[int, int] = {}
    for event in trace.unit_events():
        first_call.setdefault(stage_of_unit[trace.events[event].name], event)
    for stage, begin in first_call.items():
        for value in trace.values:
            if stage and value.made_at < begin and any(use >= begin for use in value.uses):
                kept[stage].setdefault(value.storage, _bytes(value.spec))
    return tuple(sum(each.values()) for each in kept)


def units_in_model_order(units: Mapping[str, Module]) -> tuple[UnitUse, ...]:
    """Return all units as the model has them, where no step can tell how it calls them."""
    return tuple(
        UnitUse(
            name=name,
            num_parameters=sum(each.numel() for each in unit.parameters()),
            parameter_bytes=sum(each.numel() * each.element_size() for each in unit.parameters()),
            flops=0,
            is_called=True,
        )
        for name, unit in units.items()
    )


def _bytes(leaf: object) -> int:
    if not isinstance(leaf, TensorSpec):
        return 0
    return math.prod(leaf.shape) * leaf.dtype.itemsize
