"""Assigns the units, parameters and buffers of a model to pipeline ranks.

The first rank of the job decides with its sample of the data, and broadcasts the result. A sample
with other lengths could give another split, with parameters that no rank holds, or that are on
another stage in the next pipeline, with which their gradients are averaged.
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
    refuse_writes,
)
from boltmesh.strategies.pipeline.stage.trace_step import trace_step
from boltmesh.strategies.pipeline.stage.units import find_stage_units


@dataclass(frozen=True)
class StageAssignment:
    """Names of units, parameters and buffers by stage and rank. The same on every rank."""

    rank_of_stage: tuple[int, ...]
    stage_of_unit: Mapping[str, int]
    stages: tuple[tuple[UnitCost, ...], ...]
    """The units of each stage, in the order of their calls."""
    ranks_of_parameter: Mapping[str, tuple[int, ...]]
    """Pipeline ranks that hold a parameter, by its first name, for all parameters of the module;
    the first counts it in norms."""
    rank_of_buffer: Mapping[str, int]
    """Pipeline rank that has the model's value of a buffer, by each of the buffer's names."""
    loose_buffers: tuple[str, ...]
    """Buffers outside of units."""
    kept_bytes: tuple[int, ...] | None
    """Bytes that each stage keeps of a microbatch of the sample batch, from its forward to its
    backward pass; None if unknown."""
    sees_one_value: bool
    """Whether a batch norm has one value per channel of a row, and so no moments of one row."""

    def rank_of_state(self, name: str) -> int:
        """Return the pipeline rank that has the model's value of state other than parameters.

        State outside of units has the value from the end of the step, on the last stage's rank.
        """
        if name in self.rank_of_buffer:
            return self.rank_of_buffer[name]
        for unit, stage in self.stage_of_unit.items():
            if name.startswith(f"{unit}."):
                return self.rank_of_stage[stage]
        return self.rank_of_stage[-1]


_DIVISIONS: "WeakKeyDictionary[Module, StageAssignment]" = WeakKeyDictionary()
"""Assignments of modules that are divided already: this process has its part of each only."""


@dataclass(frozen=True)
class StagePlacement:
    """An assignment, and the plans of steps on it."""

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
    """Cut a model into stages on the job's first rank, for all ranks. Collective over all ranks.

    A model that another strategy has divided for as many ranks and stages keeps its division.

    Args:
        module: The whole model; its values do not change.
        step: The method that is run as a pipeline, such as ``training_step``.
        args: Positional arguments of the step.
        rank_of_stage: The rank of each stage of the pipeline.
        split: The user's argument.
        context: Context of the pipeline.
        budget: Memory of its ranks.
        unmade: Parts of the model that are not materialized yet.

    Raises:
        ConfigError: The model cannot be cut so, or is divided otherwise already.
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
            # The other ranks wait for an answer.
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
    """Cut a model into stages, from a trace of a step with one microbatch.

    Arguments as for :func:`place`, and as in ``PipelineContext``.

    Raises:
        ConfigError: The model cannot be cut so.
    """
    with without_collectives():
        units, trace = _find_units(module, step, args, seed, len(rank_of_stage))
    uses = units_in_model_order(units) if trace is None else units_in_call_order(trace, units)
    num_called = sum(each.is_called for each in uses)
    if step == TRAINING and not num_called:
        raise ConfigError(
            f"{type(module).__name__}.{step} calls none of the model's layers with the first "
            f"batch, so there is nothing to make stages of. Call the layers that it trains in "
            f"{step}, by themselves or through self(...), or use bolt_ddp."
        )
    if step != TRAINING and num_called < len(rank_of_stage):
        uses = units_in_model_order(units)  # a test of an encoder alone: place the other units too
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
    for each in uses:  # a unit that this step does not call goes to its neighbour's stage
        stage = stage_of_unit.setdefault(each.name, stage)
    plans = StagePlans(
        module, units, stage_of_unit, without_collectives=without_collectives, boundaries=boundaries
    )
    rank_of_unit = {unit: rank_of_stage[each] for unit, each in stage_of_unit.items()}
    last_rank = rank_of_stage[-1]
    unit_of_buffer = _units_of_buffers(module, units)
    used = _used_parameters(plans, step, args, seed, trace)
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
    )
    return division, plans


def _used_parameters(
    plans: StagePlans,
    step: str,
    args: tuple[Any, ...],
    seed: int,
    trace: StepTrace | None,
) -> list[frozenset[str]]:
    """Return the parameters that each stage uses in a step; empty if it cannot be cut."""
    try:
        if trace is not None:
            plans.learn(step, args, trace)
        return [run.plan.parameters for run in plans.stages(step, *args, seed=seed)]
    except ConfigError:
        if step == TRAINING:
            raise
        return []  # see layerwise_evaluation in layerwise_eval.py


def _refuse_parts(module: Module, unmade: DeferredModel) -> None:
    """Refuse a copy of a divided model: most of its values are on other ranks."""
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
    """Refuse a module that does not fit the first rank's assignment."""
    if division.rank_of_stage != tuple(rank_of_stage):
        before = division.rank_of_stage
        raise ConfigError(
            f"{type(module).__name__} was divided into {len(before)} stages on {max(before) + 1} "
            f"ranks by an earlier run, and this one has {len(rank_of_stage)} stages on "
            f"{max(rank_of_stage) + 1}. Use the same schedule and ranks again, or make a new "
            f"module and give the Trainer the run's checkpoint as ckpt_path."
        )
    own = dict(module.named_parameters())
    differing = sorted(own.keys() ^ division.ranks_of_parameter.keys())
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


def _find_units(
    module: Module, step: str, args: tuple[Any, ...], seed: int, num_stages: int
) -> tuple[dict[str, Module], StepTrace | None]:
    """Return the units to divide, by name, and the result of :func:`_trace_costs` for them.

    A loss with parameters (a temperature, proxies of classes) is no layer but part of the end of
    the step, for which the loss of the batch is proved, or computed on the whole batch.
    """
    units = find_stage_units(module)
    failure: UnitError | None = None
    while True:
        if units:
            refuse_too_few(list(units), num_stages)
        try:
            trace = _trace_costs(module, units, step, args, seed)
        except UnitError as error:
            # A loss that reads the batch's labels, which are available at the end of a step.
            losses = {error.unit} & _without_layers(units)
            if failure is not None or not losses:
                raise failure or error from None
            failure = error
        except ConfigError as error:
            raise failure or error from None
        else:
            losses = _without_layers(units) & (set() if trace is None else _scalar_units(trace))
            if not losses:
                return units, trace
        units = {name: unit for name, unit in units.items() if name not in losses}


def _without_layers(units: Mapping[str, Module]) -> set[str]:
    """Return the names of modules all of whose parameters are their own."""
    return {
        name
        for name, unit in units.items()
        if all(next(each.parameters(), None) is None for each in unit.children())
    }


def _scalar_units(trace: StepTrace) -> set[str]:
    """Return the names of units that return scalars only."""
    ranks: dict[str, set[int]] = {}
    for event, output in trace.outputs.items():
        shapes = [each.shape for each in output.leaves if isinstance(each, TensorSpec)]
        ranks.setdefault(trace.events[event].name, set()).update(map(len, shapes))
    return {name for name, dims in ranks.items() if dims == {0}}


def _trace_costs(
    module: Module, units: Mapping[str, Module], step: str, args: tuple[Any, ...], seed: int
) -> StepTrace | None:
    """Return the trace of a step; None for an evaluation step that cannot be cut into stages."""
    look = partial(trace_step, module, units, step, args, seed=seed, counts_flops=True)
    try:
        return look(notes_kept=True)
    except (ConfigError, RuntimeError):
        pass
    try:
        # Under torch.func saved tensors cannot be recorded. Any other error is raised again.
        return look()
    except ConfigError:
        if step == TRAINING:
            raise
        return None


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
    """Return the unit that holds a buffer, by each of its names; None outside of units."""
    holding = {id(each): unit for unit, part in units.items() for each in part.buffers()}
    named = module.named_buffers(remove_duplicate=False)
    return {name: holding.get(id(each)) for name, each in named}
