"""Decides which rank holds what of a model: units, parameters and buffers of every stage."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch.nn import Module

from boltmesh.errors import ConfigError
from boltmesh.strategies.pipeline.options import Split
from boltmesh.strategies.pipeline.replay.costs import (
    UnitUse,
    kept_by_stage,
    units_in_call_order,
)
from boltmesh.strategies.pipeline.replay.plans import StagePlans
from boltmesh.strategies.pipeline.replay.probe import probe
from boltmesh.strategies.pipeline.replay.trace import Trace
from boltmesh.strategies.pipeline.replay.units import find_stage_units
from boltmesh.strategies.pipeline.split import UnitCost, balanced_split, named_split

BYTES_PER_PARAMETER = 16
"""Parameter, gradient and two moments in fp32: what the rank of a unit keeps for it."""

SECONDS_PER_ELEMENT = 0.5
"""A parameter that is only looked up (an embedding) costs about this part of one that is
multiplied: reading it and adding to its gradient, in units of its floating point operations."""


@dataclass(frozen=True)
class Placement:
    """What stands where. Alike on every rank."""

    plans: StagePlans
    stages: tuple[tuple[UnitCost, ...], ...]
    """The units of each stage, in the order of their calls."""
    ranks_of_parameter: Mapping[str, tuple[int, ...]]
    """By the parameter's first name, the pipeline ranks that hold it; the first one counts it."""
    rank_of_buffer: Mapping[str, int]
    """By the buffer's name, the pipeline rank whose value is the model's."""
    kept_bytes: tuple[int, ...] | None
    """What each stage keeps of a microbatch like the one it was cut by, from its forward to its
    backward pass; None where that cannot be seen."""


def place(
    module: Module,
    step: str,
    args: tuple[Any, ...],
    *,
    num_stages: int,
    rank_of_stage: Sequence[int],
    split: Split,
    seed: int,
) -> Placement:
    """Cut a model into stages, by a look at what a step does with one microbatch.

    Args:
        module: The whole model; nothing of it is computed.
        step: The method that is run as a pipeline, such as ``training_step``.
        args: What it is called with.
        num_stages: Of the whole pipeline.
        rank_of_stage: The rank of each.
        split: As the user gave it.
        seed: What the step's random numbers start from.

    Raises:
        ConfigError: When the model cannot be cut so.
    """
    units = find_stage_units(module)
    trace = _probe_costs(module, units, step, args, seed)
    uses = units_in_call_order(trace, units)
    costs = {each.name: _cost(each) for each in uses if each.is_called}
    names = _cut(split, list(costs.values()), num_stages)
    stage_of_unit = {name: stage for stage, members in enumerate(names) for name in members}
    stage = 0
    for each in uses:  # one that this step does not call stands with its neighbour
        stage = stage_of_unit.setdefault(each.name, stage)
    plans = StagePlans(module, units, stage_of_unit)
    used = [run.plan.parameters for run in plans.stages(step, *args, seed=seed)]
    return Placement(
        plans=plans,
        stages=tuple(tuple(costs[name] for name in members) for members in names),
        ranks_of_parameter=_ranks_of_parameters(module, plans, used, rank_of_stage),
        rank_of_buffer={
            name: rank_of_stage[_stage_holding(name, stage_of_unit)]
            for name, _ in module.named_buffers()
        },
        kept_bytes=kept_by_stage(trace, stage_of_unit),
    )


def _probe_costs(
    module: Module, units: Mapping[str, Module], step: str, args: tuple[Any, ...], seed: int
) -> Trace:
    try:
        return probe(module, units, step, args, seed=seed, counts_flops=True, notes_kept=True)
    except ConfigError:
        # What is saved cannot be seen under torch.func. Any other error comes once more.
        return probe(module, units, step, args, seed=seed, counts_flops=True)


def _cost(unit: UnitUse) -> UnitCost:
    # A backward pass computes two gradients: three times the forward in all.
    work = 3.0 * unit.flops + SECONDS_PER_ELEMENT * unit.num_parameters
    return UnitCost(unit.name, work, float(BYTES_PER_PARAMETER * unit.num_parameters))


def _cut(split: Split, costs: Sequence[UnitCost], num_stages: int) -> Sequence[Sequence[str]]:
    if callable(split):
        return _checked(split(costs, num_stages), costs, num_stages)
    if isinstance(split, str):
        return balanced_split(costs, num_stages)
    return _checked(named_split(split, [each.name for each in costs]), costs, num_stages)


def _checked(
    stages: Sequence[Sequence[str]], costs: Sequence[UnitCost], num_stages: int
) -> Sequence[Sequence[str]]:

    given = [name for stage in stages for name in stage]
    wanted = [each.name for each in costs]
    if len(stages) != num_stages:
        raise ConfigError(
            f"split makes {len(stages)} stages, and the pipeline has {num_stages}. "
            f"Name {num_stages - 1} modules at which a stage begins."
        )
    if given != wanted or not all(stages):
        raise ConfigError(
            f"split gives {given}, and the model calls {wanted}: every part belongs to one stage, "
            f"in the order of the calls, and every stage holds one at least."
        )
    return stages


def _ranks_of_parameters(
    module: Module,
    plans: StagePlans,
    used: Sequence[frozenset[str]],
    rank_of_stage: Sequence[int],
) -> dict[str, tuple[int, ...]]:
    ranks: dict[str, tuple[int, ...]] = {}
    for name, _ in module.named_parameters():
        stages = [stage for stage, names in enumerate(used) if name in names]
        if not stages:
            units = [unit for unit, held in plans.parameters_of_unit.items() if name in held]
            last = len(rank_of_stage) - 1
            stages = [min(plans.stage_of_unit[unit] for unit in units)] if units else [last]
        ranks[name] = tuple(sorted({rank_of_stage[stage] for stage in stages}))
    return ranks


def _stage_holding(name: str, stage_of_unit: Mapping[str, int]) -> int:
    for unit, stage in stage_of_unit.items():
        if name.startswith(f"{unit}."):
            return stage
    return 0
