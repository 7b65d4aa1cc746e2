"""Chooses the cut of a model: the user's, or a balanced one within the memory of the ranks.

``measure_units`` times each unit for one microbatch, on the device where it will run.
"""

import math
import statistics
import time
import warnings
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn import Module

from boltmesh.errors import ConfigError
from boltmesh.strategies.dry_run.no_side_effects import modules_unchanged
from boltmesh.strategies.object_collectives import noop
from boltmesh.strategies.patch import patched
from boltmesh.strategies.pipeline.options import Split
from boltmesh.strategies.pipeline.partition.materialize import DeferredModel
from boltmesh.strategies.pipeline.partition.split import UnitCost, balanced_split, named_split
from boltmesh.strategies.pipeline.stage.event_stages import EventStages
from boltmesh.strategies.pipeline.stage.trace import StepTrace, place_of
from boltmesh.strategies.pipeline.stage.trace_step import without_weight_cache
from boltmesh.strategies.pipeline.stage.unit_outputs import key_of
from boltmesh.strategies.pipeline.stage.units import ReplacedForwards
from boltmesh.strategies.pytree import is_constant, replace_tensors, tensors_in
from boltmesh.strategies.random_state import random_state_unchanged, seed_random_state


@dataclass(frozen=True)
class UnitUse:
    """Use of one unit of a model by one step on one batch."""

    name: str
    num_parameters: int
    """Number of its own elements and of those that it shares with other units."""
    parameter_bytes: int
    flops: int
    """Floating point operations of its forward calls, as torch counts them."""
    is_called: bool
    """Whether this step calls it; a step on another batch may."""
    trained_bytes: int = 0
    """Bytes of its parameters that get a gradient."""
    kept_bytes: int | None = None
    """Bytes that autograd saves in a step from this unit up to the next; None if not recorded."""


def units_in_call_order(trace: StepTrace, units: Mapping[str, Module]) -> tuple[UnitUse, ...]:
    """Return all units in the order of their first calls in the step.

    Units that it does not call follow the one that precedes them in the model: layers that a batch
    skips stay with their neighbours.

    Args:
        trace: One run of the step, traced with ``counts_flops=True``.
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
        replace(
            _whole_use(name, units[name]),
            flops=trace.flops.get(name, 0),
            is_called=name in called,
            trained_bytes=sum(
                each.nbytes for each in units[name].parameters() if each.requires_grad
            ),
            kept_bytes=sum(trace.kept.get(name, {}).values()) if trace.kept else None,
        )
        for name in order
    )


def kept_by_stage(
    trace: StepTrace, stage_of_unit: Mapping[str, int], weight_only: frozenset[str]
) -> tuple[int, ...] | None:
    """Return the bytes that each stage keeps of a microbatch between its forward and backward pass.

    They are the tensors saved by autograd, without parameters and the batch, and the values that
    the stage received, also if it only sends them on. None if not recorded, or if the step cannot
    be cut there.

    Args:
        trace: One run of the step, traced with ``notes_kept=True``.
        stage_of_unit: The stage of each unit, from 0 without gaps.
        weight_only: See ``plan_stages``.
    """
    if not trace.kept:
        return None
    kept: list[dict[int, int]] = [{} for _ in range(max(stage_of_unit.values()) + 1)]
    for name, storages in trace.kept.items():
        kept[stage_of_unit.get(name, 0)].update(storages)
    try:
        stages = EventStages(trace, stage_of_unit, weight_only)
    except ConfigError:  # an evaluation that is run layer by layer
        return None
    for value in trace.values:
        first = stages.of_value(value) + 1
        last = max(map(stages.of, value.uses), default=0)
        for stage in range(first, last + 1):
            kept[stage].setdefault(value.storage, value.spec.num_bytes)
    return tuple(sum(each.values()) for each in kept)


def units_in_model_order(units: Mapping[str, Module]) -> tuple[UnitUse, ...]:
    """Return all units in the order of the model, without a trace of a step."""
    return tuple(_whole_use(name, unit) for name, unit in units.items())


def _whole_use(name: str, unit: Module) -> UnitUse:
    """Return the use of a unit as far as it is known without a step."""
    return UnitUse(
        name=name,
        num_parameters=sum(each.numel() for each in unit.parameters()),
        parameter_bytes=sum(each.nbytes for each in unit.parameters()),
        flops=0,
        is_called=True,
    )


WARMED, TIMED = 2, 5
"""Number of untimed and of timed forward and backward passes of each unit."""


def measure_units(
    root: Module,
    units: Mapping[str, Module],
    step: str,
    args: tuple[Any, ...],
    *,
    seed: int,
    device: torch.device,
    unmade: DeferredModel,
) -> dict[str, float]:
    """Return the seconds of forward and backward pass by unit, summed over its calls.

    The step runs once on a batch; each unit in turn is made, moved to the device, timed and moved
    back, so that the device holds one at a time. Units of one kind with inputs of the same shapes
    get the median of all of their times. The model and the random states do not change.

    Args:
        root: The whole model, on the CPU.
        units: The units, by name.
        step: The method that calls them, such as ``training_step``.
        args: Positional arguments of the step.
        seed: Seed of its random numbers.
        device: Device that the model will run on.
        unmade: Parts of the model that are not materialized yet.

    Raises:
        ConfigError: The step fails.
    """
    timer = _Timer(units, device, unmade)
    with ExitStack() as stack:
        stack.enter_context(modules_unchanged(root.modules()))
        stack.enter_context(random_state_unchanged(device))
        stack.enter_context(without_weight_cache())
        forwards = {name: partial(timer.call, name, unit.forward) for name, unit in units.items()}
        stack.enter_context(ReplacedForwards(units, forwards))
        stack.enter_context(patched(root, log=noop, log_dict=noop))
        seed_random_state(seed, device)
        stack.enter_context(torch.no_grad())
        try:
            getattr(root, step)(*args)
        except Exception as error:
            raise ConfigError(
                f"split='measured' runs {step} once before the training, which failed: {error} "
                f"({place_of(error)}). Use split='auto', which runs nothing."
            ) from error
    return timer.seconds()


class _Timer:
    """Replaces calls of units by timed ones."""

    def __init__(
        self, units: Mapping[str, Module], device: torch.device, unmade: DeferredModel
    ) -> None:
        self._units = units
        self._device = device
        self._unmade = unmade
        self._is_inside = False
        self._calls: dict[str, list[Hashable]] = {name: [] for name in units}
        """The kind of each call, by unit."""
        self._times: dict[Hashable, list[float]] = {}
        """Seconds, by kind of call."""

    def seconds(self) -> dict[str, float]:
        """Return the seconds of all calls of each unit."""
        medians = {kind: statistics.median(times) for kind, times in self._times.items()}
        return {name: sum(medians[kind] for kind in kinds) for name, kinds in self._calls.items()}

    def call(self, name: str, forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Time a call of a unit and return its result, on the CPU."""
        if self._is_inside:
            return forward(*args, **kwargs)
        unit = self._units[name]
        given = key_of("", (args, kwargs)) or (name, len(self._calls[name]))
        kind = _kind(unit), given
        self._calls[name].append(kind)
        with patched(self, _is_inside=True), self._unmade.made_for_now(unit):
            unit.to(self._device)
            try:
                for number in range(WARMED + TIMED):
                    took, result = self._run(unit, forward, args, kwargs)
                    if number >= WARMED:
                        self._times.setdefault(kind, []).append(took)
            finally:
                unit.to("cpu")
        return replace_tensors(result, lambda each: each.detach().to("cpu"))

    def _run(
        self, unit: Module, forward: Callable[..., Any], args: Any, kwargs: Any
    ) -> tuple[float, Any]:
        leaves: list[Tensor] = [each for each in unit.parameters() if each.requires_grad]

        def given(tensor: Tensor) -> Tensor:
            moved = tensor.detach().to(self._device)
            if not (tensor.is_floating_point() or tensor.is_complex()):
                return moved
            leaves.append(moved.requires_grad_())
            return moved.clone()  # which the unit may change in place

        with torch.enable_grad():
            args, kwargs = replace_tensors((args, kwargs), given)
            start = self._now()
            result = forward(*args, **kwargs)
            outputs = [each for each in tensors_in(result) if each.requires_grad]
            if outputs:
                gradients = [torch.ones_like(each) for each in outputs]
                torch.autograd.grad(outputs, leaves, gradients, allow_unused=True)
            return self._now() - start, result

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.monotonic_ns() / 1e9


def _kind(unit: Module) -> Hashable:
    """Return the kind of a unit: classes, constants and shapes of parameters of its modules."""
    return tuple(
        (
            type(each),
            tuple((key, value) for key, value in vars(each).items() if is_constant(value)),
            tuple((one.shape, one.requires_grad) for one in each.parameters(recurse=False)),
        )
        for each in unit.modules()
    )


COPIES_OF_TRAINED = 3
"""Copies of a trained parameter beside itself: its gradient and Adam's two moments."""

SECONDS_PER_ELEMENT = 0.5
"""Work per element of a parameter for reads and gradient updates, in floating point operations. It
dominates for parameters that are only looked up (embeddings)."""

SHARE_OF_FREE = 0.92
"""A stage may take this share of the free memory of a GPU: libraries take some later, and
fragmentation costs some."""

COMMUNICATOR_BYTES = 500_000_000
"""Buffers of a communicator, which NCCL takes when it is first used."""


@dataclass(frozen=True)
class MemoryBudget:
    """Memory of the ranks for their stages."""

    max_bytes: float
    """Bytes of the rank with the least memory."""
    is_asked: bool
    """Whether it is the user's limit, else the memory of the device."""
    live: tuple[int, ...]
    """Most microbatches that each stage keeps at the same time."""
    num_versions: int = 1
    """Versions of weights and gradients that the schedule keeps."""


def find_budget(
    max_bytes: int | None,
    live: tuple[int, ...],
    *,
    num_versions: int,
    num_communicators: int,
    group: ProcessGroup,
    device: torch.device,
) -> MemoryBudget:
    """Return the memory of the ranks of a pipeline. Collective over the pipeline on GPUs.

    Args:
        max_bytes: The user's limit; None: the smallest free memory of the GPUs, beside contexts,
            libraries and other processes. No limit on the CPU, whose ranks share memory with each
            other and everything else.
        live: Most microbatches that each stage keeps at the same time.
        num_versions: Versions of weights and gradients that the schedule keeps.
        num_communicators: Communicators that the first step will create.
        group: The ranks of the pipeline.
        device: Device of this rank.
    """
    if max_bytes is not None or device.type != "cuda":
        limit = math.inf if max_bytes is None else float(max_bytes)
        return MemoryBudget(limit, max_bytes is not None, live, num_versions)
    available = _available_bytes(device, num_communicators)
    least = torch.tensor(available, dtype=torch.int64, device=device)
    dist.all_reduce(least, op=dist.ReduceOp.MIN, group=group)
    return MemoryBudget(float(least), False, live, num_versions)


def _available_bytes(device: torch.device, num_communicators: int) -> int:
    """Return the bytes of a GPU for stages, including memory that torch's allocator holds."""
    free, _ = torch.cuda.mem_get_info(device)
    whole = free + torch.cuda.memory_reserved(device) - num_communicators * COMMUNICATOR_BYTES
    return max(0, int(SHARE_OF_FREE * whole))


def unit_cost(
    unit: UnitUse,
    seconds: Mapping[str, float] | None = None,
    *,
    is_recomputed: bool = False,
    num_versions: int = 1,
) -> UnitCost:
    """Return the cost of a unit: its measured seconds if there are any, else counted work.

    Args:
        unit: The unit.
        seconds: Measured seconds, by name of the unit.
        is_recomputed: Its forward pass runs again in the backward pass.
        num_versions: Versions of weights and gradients that the schedule keeps.
    """
    # A backward pass computes two gradients: three times the forward in all.
    copies = COPIES_OF_TRAINED + 2 * (num_versions - 1)
    work = (4.0 if is_recomputed else 3.0) * unit.flops + SECONDS_PER_ELEMENT * unit.num_parameters
    return UnitCost(
        unit.name,
        work if seconds is None else seconds[unit.name],
        float(unit.parameter_bytes + copies * unit.trained_bytes),
        float(unit.kept_bytes or 0),
    )


def cut_units(
    split: Split, costs: Sequence[UnitCost], rank_of_stage: Sequence[int], budget: MemoryBudget
) -> Sequence[Sequence[str]]:
    """Return the names of each stage's units.

    The cut balanced by time alone is taken if it fits into memory. Otherwise every stage is limited
    to its part of a rank's memory.

    Args:
        split: The user's argument.
        costs: Costs of the called units, in the order of their calls.
        rank_of_stage: The rank of each stage.
        budget: Memory of the ranks.

    Raises:
        ConfigError: The user's cut is invalid, or no cut keeps within the user's limit.
    """
    num_stages = len(rank_of_stage)
    if callable(split):
        names = _checked(split(costs, num_stages), costs, num_stages)
    elif isinstance(split, str):
        names = balanced_split(costs, num_stages)
    else:
        named = named_split(split, [each.name for each in costs])
        names = _checked(named, costs, num_stages)
    needed = _needed_bytes(names, costs, rank_of_stage, budget.live)
    if max(needed.values()) <= budget.max_bytes:
        return names
    try:
        return _cut_within(split, costs, needed, num_stages, budget)
    except ConfigError as error:
        if budget.is_asked:
            raise
        # With an optimizer other than Adam it may still fit.
        warnings.warn(
            f"The stages may not fit into the GPUs. {error}", RuntimeWarning, stacklevel=2
        )
        return names


def _cut_within(
    split: Split,
    costs: Sequence[UnitCost],
    needed: Mapping[int, float],
    num_stages: int,
    budget: MemoryBudget,
) -> Sequence[Sequence[str]]:
    """Return a cut within the memory of the ranks, after one of ``needed`` bytes was too large."""
    if isinstance(split, str):
        share = budget.max_bytes * len(needed) / num_stages
        return balanced_split(costs, num_stages, max_bytes=share, live=budget.live)
    fullest = max(needed, key=needed.__getitem__)
    raise ConfigError(
        f"This split gives rank {fullest} of the pipeline stages that need "
        f"{needed[fullest] / 1e9:.3g} GB with gradients, Adam's state and activations, and it has "
        f"{budget.max_bytes / 1e9:.3g} GB. Let stages begin elsewhere, or use split='auto'."
    )


def _needed_bytes(
    names: Sequence[Sequence[str]],
    costs: Sequence[UnitCost],
    rank_of_stage: Sequence[int],
    live: Sequence[int],
) -> dict[int, float]:
    """Return an upper bound of each rank's bytes, with all of its stages at their peak at once."""
    known = {each.name: each for each in costs}
    needed = dict.fromkeys(rank_of_stage, 0.0)
    for members, rank, count in zip(names, rank_of_stage, live, strict=True):
        for name in members:
            needed[rank] += known[name].num_bytes + count * known[name].kept_bytes
    return needed


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
