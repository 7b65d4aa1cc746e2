"""Decides which rank holds what of a model: units, parameters and buffers of every stage.

The first rank of the job decides, by its sample of the data, and the others do as it says: a sample
of other lengths could make another split, and parameters that nobody holds, or that are on another
stage in the next pipeline, with whose gradients theirs are averaged.
"""

from collections.abc import Callable, Mapping, Sequence, Set
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.nn import Module

from boltmesh.errors import ConfigError, first_of
from boltmesh.strategies.object_collectives import broadcast_from_rank0
from boltmesh.strategies.pipeline.options import PipelineContext, Split
from boltmesh.strategies.pipeline.partition.choose import (
    MemoryBudget,
    cut_units,
    kept_by_stage,
    measure_units,
    unit_cost,
    units_in_call_order,
    units_in_model_order,
)
from boltmesh.strategies.pipeline.partition.materialize import DeferredModel
from boltmesh.strategies.pipeline.partition.split import UnitCost, refuse_too_few
from boltmesh.strategies.pipeline.stage.cut import StageBoundaries
from boltmesh.strategies.pipeline.stage.fake_unit import UnitError
from boltmesh.strategies.pipeline.stage.plan_cache import TRAINING, StagePlans
from boltmesh.strategies.pipeline.stage.trace import (
    StepTrace,
    TensorSpec,
    UnitOutput,
    refuse_writes,
)
from boltmesh.strategies.pipeline.stage.trace_step import probe
from boltmesh.strategies.pipeline.stage.units import find_stage_units


@dataclass(frozen=True)
class StageAssignment:
    """What stands where, in names. The same on every rank."""

    rank_of_stage: tuple[int, ...]
    stage_of_unit: Mapping[str, int]
    stages: tuple[tuple[UnitCost, ...], ...]
    """The units of each stage, in the order of their calls."""
    ranks_of_parameter: Mapping[str, tuple[int, ...]]
    """By the parameter's first name, the pipeline ranks that hold it; the first one counts it."""
    rank_of_buffer: Mapping[str, int]
    """By the buffer's name, each of several, the pipeline rank whose value is the model's."""
    loose_buffers: tuple[str, ...]
    """Buffers outside of units."""
    kept_bytes: tuple[int, ...] | None
    """What each stage keeps of a microbatch like the one it was cut by, from its forward to its
    backward pass; None where that cannot be seen."""
    sees_one_value: bool
    """Whether norms have one value for each channel of a row, and so no moments of one row."""
    parameters: tuple[str, ...]
    """All names of the module, by which ranks see that they have the same one."""

    def rank_of_state(self, name: str) -> int:
        """Return the pipeline rank that has the model's value of what is no parameter.

        What belongs to no unit is what the step's end has made of it, on the last stage's rank.
        """
        if name in self.rank_of_buffer:
            return self.rank_of_buffer[name]
        for unit, stage in self.stage_of_unit.items():
            if name.startswith(f"{unit}."):
                return self.rank_of_stage[stage]
        return self.rank_of_stage[-1]


_DIVISIONS: "WeakKeyDictionary[Module, StageAssignment]" = WeakKeyDictionary()
"""Of modules that are divided already, of which this process has no more than its part."""


@dataclass(frozen=True)
class StagePlacement:
    """A division, and how steps run on it."""

    plans: StagePlans
    division: StageAssignment


def place(
    module: Module,
    step: str,
    args: tuple[Any, ...],
    *,
    rank_of_stage: Sequence[int],
    split: Split,
    context: PipelineContext,
    budget: MemoryBudget,
    unmade: DeferredModel,
) -> StagePlacement:
    """Cut a model into stages, as the job's first rank says. Collective over all ranks.

    A model that another strategy has divided for as many ranks and stages stays divided so.

    Args:
        module: The whole model; nothing of it is computed.
        step: The method that is run as a pipeline, such as ``training_step``.
        args: What it is called with.
        rank_of_stage: The rank of each stage of the pipeline.
        split: As the user gave it.
        context: Where the pipeline finds itself.
        budget: What memory its ranks have for it.
        unmade: What of the model does not exist yet.

    Raises:
        ConfigError: When the model cannot be cut so, or is divided otherwise already.
    """
    mine: StageAssignment | ConfigError | None = None
    plans: StagePlans | None = None
    if dist.get_rank() == 0:
        try:
            mine = _DIVISIONS.get(module)
            if mine is None:
                _refuse_parts(module, unmade)
                mine, plans = divide(
                    module,
                    step,
                    args,
                    rank_of_stage=rank_of_stage,
                    split=split,
                    seed=context.seed,
                    device=context.device,
                    budget=budget,
                    unmade=unmade,
                    recomputed=context.recomputed,
                    without_collectives=context.without_collectives,
                    boundaries=context.boundaries,
                )
        except ConfigError as error:
            mine = error
        except Exception as error:
            # Whoever ends without a word is waited for.
            reason = f"{type(error).__name__}: {error}"
            broadcast_from_rank0(ConfigError(f"The first rank could not look at {step}: {reason}"))
            raise
    answer = broadcast_from_rank0(mine)
    assert answer is not None
    if isinstance(answer, ConfigError):
        raise answer
    _check_module(module, answer, rank_of_stage, context.group, unmade)
    _DIVISIONS[module] = answer
    if plans is None:
        units = {name: module.get_submodule(name) for name in answer.stage_of_unit}
        plans = StagePlans(
            module,
            units,
            answer.stage_of_unit,
            without_collectives=context.without_collectives,
            boundaries=context.boundaries,
        )
    return StagePlacement(plans, answer)


def divide(
    module: Module,
    step: str,
    args: tuple[Any, ...],
    *,
    rank_of_stage: Sequence[int],
    split: Split,
    seed: int,
    device: torch.device,
    budget: MemoryBudget,
    unmade: DeferredModel,
    recomputed: Set[Module],
    without_collectives: Callable[[], AbstractContextManager[None]] = nullcontext,
    boundaries: StageBoundaries | None = None,
) -> tuple[StageAssignment, StagePlans]:
    """Cut a model into stages, by a look at what a step does with one microbatch.

    Args:
        module: The whole model; nothing of it is computed.
        step: The method that is run as a pipeline, such as ``training_step``.
        args: What it is called with.
        rank_of_stage: The rank of each stage.
        split: As the user gave it.
        seed: What the step's random numbers start from.
        device: Where it will run.
        budget: What memory its ranks have for it.
        unmade: What of it does not exist yet.
        recomputed: Units whose forward pass runs once more in the backward pass.
        without_collectives: See ``PipelineContext``.
        boundaries: See there.

    Raises:
        ConfigError: When the model cannot be cut so.
    """
    with without_collectives():
        units, trace, outputs = _probe_units(module, step, args, seed, len(rank_of_stage))
    uses = units_in_model_order(units) if trace is None else units_in_call_order(trace, units)
    if not any(each.is_called for each in uses):
        _refuse_to_train_nothing(module, step)
    if step != TRAINING and sum(each.is_called for each in uses) < len(rank_of_stage):
        uses = units_in_model_order(units)  # a test of an encoder alone: the others stand as well
    seconds = None
    if split == "measured":
        refuse_writes(trace.events if trace else [], "with split='measured'")
        seconds = measure_units(module, units, step, args, seed=seed, device=device, unmade=unmade)
    costs = {
        each.name: unit_cost(
            each,
            seconds,
            is_recomputed=units[each.name] in recomputed,
            num_versions=budget.num_versions,
        )
        for each in uses
        if each.is_called
    }
    names = cut_units(split, list(costs.values()), rank_of_stage, budget)
    stage_of_unit = {name: stage for stage, members in enumerate(names) for name in members}
    stage = 0
    for each in uses:  # one that this step does not call stands with its neighbour
        stage = stage_of_unit.setdefault(each.name, stage)
    plans = StagePlans(
        module, units, stage_of_unit, without_collectives=without_collectives, boundaries=boundaries
    )
    rank_of_unit = {unit: rank_of_stage[each] for unit, each in stage_of_unit.items()}
    last_rank = rank_of_stage[-1]
    unit_of_buffer = _units_of_buffers(module, units)
    used = _used_parameters(plans, step, args, seed, trace, outputs)
    division = StageAssignment(
        rank_of_stage=tuple(rank_of_stage),
        stage_of_unit=stage_of_unit,
        stages=tuple(tuple(costs[name] for name in members) for members in names),
        ranks_of_parameter=_ranks_of_parameters(module, plans, used, rank_of_stage),
        rank_of_buffer={
            name: last_rank if unit is None else rank_of_unit[unit]
            for name, unit in unit_of_buffer.items()
        },
        loose_buffers=tuple(name for name, unit in unit_of_buffer.items() if unit is None),
        kept_bytes=(
            None if trace is None else kept_by_stage(trace, stage_of_unit, plans.weight_only)
        ),
        sees_one_value=trace is not None and trace.sees_one_value,
        parameters=tuple(name for name, _ in module.named_parameters()),
    )
    return division, plans


def _refuse_to_train_nothing(module: Module, step: str) -> None:
    """Refuse training that no stage would have a part in; evaluation runs on every rank."""
    if step == TRAINING:
        raise ConfigError(
            f"{type(module).__name__}.{step} calls none of the model's layers with the first "
            f"batch, so there is nothing to make stages of. Call the layers that it trains in "
            f"{step}, by themselves or through self(...), or use bolt_ddp."
        )


def _used_parameters(
    plans: StagePlans,
    step: str,
    args: tuple[Any, ...],
    seed: int,
    trace: StepTrace | None,
    outputs: Mapping[Any, UnitOutput],
) -> list[frozenset[str]]:
    """Return which parameters each stage uses in a step; nothing for one that cannot be cut."""
    try:
        if trace is not None:
            plans.learn(step, args, trace, outputs)
        return [run.plan.parameters for run in plans.stages(step, *args, seed=seed)]
    except ConfigError:
        if step == TRAINING:
            raise
        return []  # see relay_of in layerwise_eval.py


def _refuse_parts(module: Module, unmade: DeferredModel) -> None:
    """Refuse a copy of a model that has been divided: most of its values are elsewhere."""
    absent = [name for name, each in module.named_parameters() if unmade.is_lost(each)]
    if absent:
        raise ConfigError(
            f"{type(module).__name__} was part of a pipeline before, and this rank does not have "
            f"the values of {first_of(absent)}. Go on with the module that was trained itself and "
            f"as many ranks and stages, or make a new module and give the Trainer the run's "
            f"checkpoint as ckpt_path."
        )


def _check_module(
    module: Module,
    division: StageAssignment,
    rank_of_stage: Sequence[int],
    group: ProcessGroup,
    unmade: DeferredModel,
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
            f"than on its first rank: {first_of(differing)} on one of them only. Every rank has to "
            f"build the same module."
        )
    lost = [
        name
        for name, ranks in division.ranks_of_parameter.items()
        if group.rank() in ranks and unmade.is_lost(own[name])
    ]
    if lost:
        raise ConfigError(
            f"{type(module).__name__} was part of a pipeline before, and rank {group.rank()} does "
            f"not have the values of {first_of(lost)}. Make a new module and give the Trainer the "
            f"run's checkpoint as ckpt_path."
        )


def _probe_units(
    module: Module, step: str, args: tuple[Any, ...], seed: int, num_stages: int
) -> tuple[dict[str, Module], StepTrace | None, Mapping[Any, UnitOutput]]:
    """Return what is given to stages, by name, and what :func:`_probe_costs` returns for it.

    A loss with parameters of its own (a temperature, proxies of classes) is no layer but code of
    the step's end, where the loss of the batch is proved or computed for all of it at once.
    """
    units = find_stage_units(module)
    failure: UnitError | None = None
    while True:
        if units:
            refuse_too_few(list(units), num_stages)
        try:
            trace, outputs = _probe_costs(module, units, step, args, seed)
        except UnitError as error:
            # One that looks at the batch's labels, which are known at the end of a step.
            losses = {error.unit} & _without_layers(units)
            if failure is not None or not losses:
                raise failure or error from None
            failure = error
        except ConfigError as error:
            raise failure or error from None
        else:
            losses = _without_layers(units) & (set() if trace is None else _scalar_units(trace))
            if not losses:
                return units, trace, outputs
        units = {name: unit for name, unit in units.items() if name not in losses}


def _without_layers(units: Mapping[str, Module]) -> set[str]:
    """Return the names of modules all of whose parameters are their own."""
    return {
        name
        for name, unit in units.items()
        if all(next(each.parameters(), None) is None for each in unit.children())
    }


def _scalar_units(trace: StepTrace) -> set[str]:
    """Return the names of units that give nothing but scalars."""
    ranks: dict[str, set[int]] = {}
    for event, output in trace.outputs.items():
        shapes = [each.shape for each in output.leaves if isinstance(each, TensorSpec)]
        ranks.setdefault(trace.events[event].name, set()).update(map(len, shapes))
    return {name for name, found in ranks.items() if found == {0}}


def _probe_costs(
    module: Module, units: Mapping[str, Module], step: str, args: tuple[Any, ...], seed: int
) -> tuple[StepTrace | None, Mapping[Any, UnitOutput]]:
    """Return what a step does, and what its units give.

    There is no trace of a step of evaluation that cannot be cut into stages.
    """
    outputs: dict[Any, UnitOutput] = {}
    look = partial(
        probe, module, units, step, args, seed=seed, counts_flops=True, remembered=outputs
    )
    try:
        return look(notes_kept=True), outputs
    except (ConfigError, RuntimeError):
        pass
    try:
        # What is saved cannot be seen under torch.func. Any other error comes once more.
        return look(), outputs
    except ConfigError:
        if step == TRAINING:
            raise
        return None, outputs


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
