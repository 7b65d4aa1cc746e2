"""Decides which rank holds what of a model: units, parameters and buffers of every stage.

The first rank of the pipeline decides, by its sample of the data, and the others do as it says: a
sample of other lengths could make another split, and parameters that nobody holds.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

from torch.distributed import ProcessGroup
from torch.nn import Module

from boltmesh.errors import ConfigError
from boltmesh.strategies.pipeline.alike import of_first_rank
from boltmesh.strategies.pipeline.options import Split
from boltmesh.strategies.pipeline.replay.absent import is_absent
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
class Division:
    """What stands where, in names. The same on every rank."""

    rank_of_stage: tuple[int, ...]
    stage_of_unit: Mapping[str, int]
    stages: tuple[tuple[UnitCost, ...], ...]
    """The units of each stage, in the order of their calls."""
    ranks_of_parameter: Mapping[str, tuple[int, ...]]
    """By the parameter's first name, the pipeline ranks that hold it; the first one counts it."""
    rank_of_buffer: Mapping[str, int]
    """By the buffer's name, the pipeline rank whose value is the model's."""
    parameters: tuple[str, ...]
    """All names of the module, by which ranks see that they have the same one."""


_DIVISIONS: "WeakKeyDictionary[Module, Division]" = WeakKeyDictionary()
"""Of modules that are divided already, of which this process has no more than its part."""


@dataclass(frozen=True)
class Placement:
    """A division, and how steps run on it."""

    plans: StagePlans
    division: Division

    @property
    def stages(self) -> tuple[tuple[UnitCost, ...], ...]:
        """The units of each stage, in the order of their calls."""
        return self.division.stages

    @property
    def ranks_of_parameter(self) -> Mapping[str, tuple[int, ...]]:
        """By the parameter's first name, the ranks that hold it; the first one counts it."""
        return self.division.ranks_of_parameter

    @property
    def rank_of_buffer(self) -> Mapping[str, int]:
        """By the buffer's name, the pipeline rank whose value is the model's."""
        return self.division.rank_of_buffer


def place(
    module: Module,
    step: str,
    args: tuple[Any, ...],
    *,
    rank_of_stage: Sequence[int],
    split: Split,
    seed: int,
    group: ProcessGroup,
) -> Placement:
    """Cut a model into stages, as its first rank says. Collective over the pipeline.

    A model that another strategy has divided for as many ranks and stages stays divided so.

    Args:
        module: The whole model; nothing of it is computed.
        step: The method that is run as a pipeline, such as ``training_step``.
        args: What it is called with.
        rank_of_stage: The rank of each stage of the pipeline.
        split: As the user gave it.
        seed: What the step's random numbers start from.
        group: The ranks of the pipeline.

    Raises:
        ConfigError: When the model cannot be cut so, or is divided otherwise already.
    """
    mine: Division | ConfigError | None = None
    plans: StagePlans | None = None
    if group.rank() == 0:
        try:
            mine = _DIVISIONS.get(module)
            if mine is None:
                mine, plans = _divide(
                    module, step, args, rank_of_stage=rank_of_stage, split=split, seed=seed
                )
        except ConfigError as error:
            mine = error
    answer = of_first_rank(mine, group)
    assert answer is not None
    if isinstance(answer, ConfigError):
        raise answer
    _check_module(module, answer, rank_of_stage, group)
    _DIVISIONS[module] = answer
    if plans is None:
        plans = StagePlans(module, find_stage_units(module), answer.stage_of_unit)
    return Placement(plans, answer)


def _divide(
    module: Module,
    step: str,
    args: tuple[Any, ...],
    *,
    rank_of_stage: Sequence[int],
    split: Split,
    seed: int,
) -> tuple[Division, StagePlans]:
    """Cut a model into stages, by a look at what a step does with one microbatch.

    Args:
        module: The whole model; nothing of it is computed.
        step: The method that is run as a pipeline, such as ``training_step``.
        args: What it is called with.
        rank_of_stage: The rank of each stage.
        split: As the user gave it.
        seed: What the step's random numbers start from.

    Raises:
        ConfigError: When the model cannot be cut so.
    """
    _refuse_parts(module)
    num_stages = len(rank_of_stage)
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
    used = [run.plan.parameters for run in plans.stages(step, *args, seed=seed)]
    division = Division(
        rank_of_stage=tuple(rank_of_stage),
        stage_of_unit=stage_of_unit,
        stages=tuple(tuple(costs[name] for name in members) for members in names),
        ranks_of_parameter=_ranks_of_parameters(module, plans, used, rank_of_stage),
        rank_of_buffer={
            name: rank_of_stage[_stage_holding(name, stage_of_unit)]
            for name, _ in module.named_buffers()
        },
        parameters=tuple(name for name, _ in module.named_parameters()),
    )
    return division, plans


def _refuse_parts(module: Module) -> None:
    """Refuse a copy of a model that has been divided: most of its values are elsewhere."""
    absent = [name for name, each in module.named_parameters() if is_absent(each)]
    if absent:
        raise ConfigError(
            f"{type(module).__name__} was part of a pipeline before, and this rank does not have "
            f"the values of {_told(absent)}. Go on with the module that was trained itself and as "
            f"many ranks and stages, or make a new module and give the Trainer the run's "
            f"checkpoint as ckpt_path."
        )


def _check_module(
    module: Module, division: Division, rank_of_stage: Sequence[int], group: ProcessGroup
) -> None:
    """Refuse a module that does not fit to what the first rank has decided."""
    if division.rank_of_stage != tuple(rank_of_stage):
        before = division.rank_of_stage
        raise ConfigError(
            f"{type(module).__name__} was divided into {len(before)} stages on {max(before) + 1} "
            f"ranks by an earlier run, and this one has {len(rank_of_stage)} stages on "
            f"{max(rank_of_stage) + 1}. Use the same schedule and ranks again, or make a new "
            f"module and give the Trainer the run's checkpoint as ckpt_path."
        )
    own = dict(module.named_parameters())
    differing = sorted(set(own) ^ set(division.parameters))
    if differing:
        raise ConfigError(
            f"{type(module).__name__} has other parameters on rank {group.rank()} of the pipeline "
            f"than on its first rank: {_told(differing)} on one of them only. Every rank has to "
            f"build the same module."
        )
    lost = [
        name
        for name, ranks in division.ranks_of_parameter.items()
        if group.rank() in ranks and is_absent(own[name])
    ]
    if lost:
        raise ConfigError(
            f"{type(module).__name__} was part of a pipeline before, and rank {group.rank()} does "
            f"not have the values of {_told(lost)}. Make a new module and give the Trainer the "
            f"run's checkpoint as ckpt_path."
        )


def _told(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


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
