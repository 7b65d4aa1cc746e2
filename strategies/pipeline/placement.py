"""Decides which rank holds what of a model: units, parameters and buffers of every stage."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch.nn import Module

from boltmesh.errors import ConfigError
from boltmesh.strategies.pipeline.options import Split
from boltmesh.strategies.pipeline.replay.costs import UnitUse, units_in_call_order
from boltmesh.strategies.pipeline.replay.plans import StagePlans
from boltmesh.strategies.pipeline.replay.probe import probe
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
    """By the buffer's name, each of several, the pipeline rank whose value is the model's."""
    loose_buffers: tuple[str, ...]
    """Buffers outside of units."""
    rank_of_unit: Mapping[str, int]
    last_rank: int
    """The rank of the last stage."""

    def rank_of_state(self, name: str) -> int:
        """Return the pipeline rank that has the model's value of what is no parameter.

        What belongs to no unit is what the step's end has made of it, on the last stage's rank.
        """
        if name in self.rank_of_buffer:
            return self.rank_of_buffer[name]
        unit = _unit_holding(name, self.rank_of_unit)
        return self.last_rank if unit is None else self.rank_of_unit[unit]


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
    trace = probe(module, units, step, args, seed=seed, counts_flops=True)
    uses = units_in_call_order(trace, units)
    costs = {each.name: _cost(each) for each in uses if each.is_called}
    names = _cut(split, list(costs.values()), num_stages)
    stage_of_unit = {name: stage for stage, members in enumerate(names) for name in members}
    stage = 0
    for each in uses:  # one that this step does not call stands with its neighbour
        stage = stage_of_unit.setdefault(each.name, stage)
    plans = StagePlans(module, units, stage_of_unit)
    rank_of_unit = {unit: rank_of_stage[each] for unit, each in stage_of_unit.items()}
    last_rank = rank_of_stage[num_stages - 1]
    unit_of_buffer = _units_of_buffers(module, units)
    used = [run.plan.parameters for run in plans.stages(step, *args, seed=seed)]
    return Placement(
        plans=plans,
        stages=tuple(tuple(costs[name] for name in members) for members in names),
        ranks_of_parameter=_ranks_of_parameters(module, plans, used, rank_of_stage),
        rank_of_buffer={
            name: last_rank if unit is None else rank_of_unit[unit]
            for name, unit in unit_of_buffer.items()
        },
        loose_buffers=tuple(name for name, unit in unit_of_buffer.items() if unit is None),
        rank_of_unit=rank_of_unit,
        last_rank=last_rank,
    )


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


def _units_of_buffers(module: Module, units: Mapping[str, Module]) -> dict[str, str | None]:
    """The unit that holds a buffer, by each of its names, that of a tensor outside too."""
    holding = {id(each): unit for unit, part in units.items() for each in part.buffers()}
    named = module.named_buffers(remove_duplicate=False)
    return {name: holding.get(id(each)) for name, each in named}


def _unit_holding(name: str, units: Iterable[str]) -> str | None:
    return next((unit for unit in units if name.startswith(f"{unit}.")), None)
