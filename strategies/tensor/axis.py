"""The tensor axis: finds, verifies and applies the plan by which ranks share every layer.

The entry points for the engine, and the state of parameters over runs. How a model is divided is in
``placement.py``, how it runs divided in ``runtime/``.
"""

import warnings
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import Module, Parameter
from torch.optim import Optimizer
from typing_extensions import override

from boltmesh.strategies.checkpoint.chunks import DimDivision
from boltmesh.strategies.checkpoint.state_dict_guard import PARTS, StateGuard
from boltmesh.strategies.dry_run.sample import sample_batch
from boltmesh.strategies.dry_run.step import DryRun
from boltmesh.strategies.engine.axis import FakeRuns, LayerAxis
from boltmesh.strategies.grad_norm import NormShare, PartShare
from boltmesh.strategies.lightning_compat.loops import step_arguments
from boltmesh.strategies.lightning_compat.trainer import has_norm_clipping, parameter_dtype
from boltmesh.strategies.object_collectives import broadcast_from_rank0, gather_objects
from boltmesh.strategies.optimizer_probe import find_mixing
from boltmesh.strategies.owner_exchange import PartExchange
from boltmesh.strategies.parameter_access import forget_parts, register_shards
from boltmesh.strategies.progress import long_phase
from boltmesh.strategies.telemetry import shows_expectations
from boltmesh.strategies.tensor.expected_traffic import (
    CountingGroup,
    OperatorTraffic,
    count_step,
    expected_traffic,
)
from boltmesh.strategies.tensor.options import (
    LAYERS,
    WHOLE,
    TensorOptions,
    refuse_parameters,
)
from boltmesh.strategies.tensor.placement import TensorContext, TensorPlacement, place
from boltmesh.strategies.tensor.plan import ShardedParameter, TensorPlan, plan_table
from boltmesh.strategies.tensor.runtime.collectives import TensorGroup
from boltmesh.strategies.tensor.runtime.param_swap import broadcast_whole
from boltmesh.strategies.tensor.verify import StepPrecision
from boltmesh.strategies.torch_compat.optimizers import OverflowAgreement
from boltmesh.strategies.whole_steps import WholeSteps, add_whole_steps, is_owned
from boltmesh.telemetry.traffic import ExpectedTraffic

_CPU = torch.device("cpu")


class TensorAxis(LayerAxis):
    """Makes the ranks of a tensor group one model, each with a part of its layers.

    With one rank, nothing is divided.

    Args:
        options: The user's options of the axis.
        size: Ranks that share each layer; None for the strategy's choice.
    """

    name = "tensor"
    stores_shards = True
    defers_building = True
    operand_divider = "tensor"
    reasons = LAYERS

    def __init__(self, options: TensorOptions, size: int | None = None) -> None:
        self.options = options
        self.wanted_size = size
        self.placement: TensorPlacement | None = None
        """None before a model is placed."""
        self._sample: tuple[Any, tuple[Any, ...]] = None, ()
        """A batch of the present run, and the further arguments of the step."""
        self._overflow = OverflowAgreement()
        self._whole_steps: list[WholeSteps] = []
        """Steps of the optimizers that need whole parameters."""
        self._is_new = True
        """Whether the model was placed for this run, and not for an earlier one."""
        self._counted: Mapping[str, OperatorTraffic] | None = None
        """Traffic of a training batch by operator; None if unknown."""

    @property
    def _placed(self) -> TensorPlacement:
        """The placement; only after a model is placed."""
        assert self.placement is not None
        return self.placement

    @property
    def plan(self) -> TensorPlan | None:
        """The plan that the model runs by; None before ``setup``."""
        return None if self.placement is None else self.placement.plan

    # Set-up.

    @override
    def near_groups(self) -> dict[str, list[list[int]]]:
        # Also if this is the only axis: its ranks wait for each other in every layer.
        layout = self.strategy.layout
        return {self.name: layout.groups(self.name)} if self.size > 1 else {}

    @override
    def place(self, trainer: Trainer) -> None:
        strategy, module = self.strategy, self.module
        super().place(trainer)
        self.context = context = self._context()
        self.group = TensorGroup(context.group, context.device)
        if self.size == 1:
            return
        step = strategy.step_name
        self._is_new = is_new = not self._is_placed(module, step)
        if is_new or strategy.is_fitting:
            batch = broadcast_from_rank0(sample_batch(trainer).batch, self.world_cpu_group)
            self._sample = batch, step_arguments(module, step)
        if is_new:
            refuse_parameters(module, is_divided=self._runs(module))
            for axis in strategy.axes:
                axis.refuse_placed(module)
            with long_phase("verifies the tensor plan", is_shown=strategy.is_global_zero):
                notes = self._divide(module, step)
            if strategy.is_global_zero:
                for note in notes:
                    warnings.warn(f"Tensor plan: {note}.", stacklevel=2)
        if self.plan is not None:
            strategy.recorder.tensor_plan(plan_table(self.plan))

    def _context(self) -> TensorContext:
        assert self.world_cpu_group is not None
        strategy = self.strategy
        return TensorContext(
            group=strategy.groups[self.name],
            world_cpu_group=self.world_cpu_group,
            new_group=partial(strategy.new_group, self.name),
            device=strategy.root_device,
            timeout=strategy.timeout,
            precision=self._precision(),
            scaler=strategy.scaler,
            analyses=not any(
                place for axis, place in strategy.coordinates.items() if axis != "data"
            ),
            verifies=not strategy.coordinates.get("pipeline", 0),
        )

    def _precision(self) -> StepPrecision:
        plugin, device = self.strategy.precision_plugin, self.strategy.root_device.type
        around = self.strategy.step_context(self.strategy.step_name)
        with around():
            if torch.is_autocast_enabled(device):
                return StepPrecision(around, torch.get_autocast_dtype(device), is_mixed=True)
        return StepPrecision(around, parameter_dtype(plugin), is_mixed=False)

    def _is_placed(self, module: LightningModule, step: str) -> bool:
        """Whether a model runs by a plan that was verified with enough for this step."""
        return self._runs(module) and (step != "training_step" or self._placed.step == step)

    def _runs(self, module: LightningModule) -> bool:
        """Whether a model runs by a plan."""
        return self.placement is not None and self.placement.module is module

    def _divide(self, module: LightningModule, step: str) -> tuple[str, ...]:
        """Divide the model; return messages about changes in the plan. Collective over the job."""
        batch, rest = self._sample
        self._join()
        placed, notes = place(
            module,
            step,
            (batch, *rest),
            options=self._options_beside(),
            context=self.context,
            group=self.group,
        )
        self.placement = placed
        self.guard = StateGuard(module, tuple(placed.divisions), holds=PARTS)
        register_shards(self._joinings())
        if not placed.divisions and self.group.size > 1:
            return (*notes, "nothing of the model is divided: all ranks do all of it")
        return notes

    def _options_beside(self) -> TensorOptions:
        """Return the options, with parameters that outer axes divide kept whole here."""
        kept = {name for axis in self.strategy.axes for name in axis.kept_whole()}
        if not kept:
            return self.options
        own = {} if self.options.plan == "auto" else self.options.plan
        return replace(self.options, plan={**own, **dict.fromkeys(sorted(kept), WHOLE)})

    def _join(self) -> None:
        """Make a placed model whole again, unless it has been sharded since.

        Collective over the axis.
        """
        placed, self.placement = self.placement, None
        if placed is None:
            return
        self.guard.remove()
        forget_parts(placed.parts)
        if any(isinstance(each, DTensor) for each in placed.parts):
            return  # permanent: shards of the data axis have the shapes of this rank's parts
        placed.applied.remove()
        with torch.no_grad():
            for parameter, entry in placed.applied.sharded.items():
                parameter.data = placed.applied.join(entry.name, parameter)
                parameter.grad = None

    def _joinings(self) -> dict[Parameter, "_Joining"]:
        """Return objects that join and cut the divided parameters."""
        applied, divisions = self._placed.applied, self._placed.divisions
        return {
            each: _Joining(entry, applied.group, divisions[entry.name])
            for each, entry in applied.sharded.items()
        }

    @override
    def cut_into_stages(self, units: Mapping[str, Module]) -> None:
        if self.size > 1:
            self._placed.applied.cut_into_stages(units)

    @override
    def without_collectives(self) -> AbstractContextManager[None]:
        if self.size == 1:
            return nullcontext()
        return self.group.counted_by(CountingGroup(self.group.rank, self.group.size))

    @override
    def before_wrap(self) -> None:
        """Count the traffic of a step while parameters are plain tensors, before sharding."""
        strategy = self.strategy
        if self.size == 1 or not shows_expectations(strategy):
            return
        if self._was_counted:
            self._counted = self._placed.counted
            return
        runs = (axis.dry_batch() for axis in strategy.axes)
        self._count(*next(found for found in runs if found is not None))

    @property
    def _was_counted(self) -> bool:
        """Whether verification has counted the traffic of a batch of this run."""
        strategy = self.strategy
        is_alike = not strategy.divides_modules and strategy.recomputation.kind is None
        is_alike = is_alike and len(strategy.gradient_axes) == 1  # a context axis divides the batch
        return self._is_new and is_alike and self._placed.counted is not None

    def _count(self, runs: FakeRuns, device: torch.device) -> None:
        """Count the traffic of a training batch; ranks with equal parts count it once.

        Collective over the axis.
        """
        module = self._placed.module
        if any(isinstance(each, DTensor) for each in module.parameters()):
            # They are shards since an earlier run, whole only while gathered; and its batches may
            # have been different.
            self._counted = None
            return
        around = self.strategy.step_context("training_step")
        is_shown = self.strategy.is_global_zero
        group, shapes = self.context.group, [tuple(each.shape) for each in module.parameters()]
        are_alike = all(each == shapes for each in gather_objects(shapes, group))
        with long_phase("counts the traffic of a step", is_shown=is_shown):
            if group.rank() == 0 or not are_alike:
                with self.others_without_collectives():
                    self._counted = count_step(module, runs, self.group, around, device)
            if are_alike:
                self._counted = broadcast_from_rank0(self._counted, group)

    @override
    def after_wrap(self) -> None:
        """Replace the placement's parameters by the present ones, which may be shards."""
        if self.placement is None:
            return
        forget_parts(self.placement.parts)
        self.placement = replace(self.placement, parts=tuple(self.placement.applied.sharded))
        register_shards(self._joinings())
        if len(self.strategy.layout.groups(self.name)) > self.strategy.layout.pipeline:
            self._couple_blocks()

    def _couple_blocks(self) -> None:
        """Stop verifying blocks whose experts get rows of other replicas."""
        owned = [each for axis in self.strategy.axes if (each := axis.owned_rows()) is not None]
        exchanging = {exchange.module for each in owned for exchange in each.exchanges}
        divided = set(self._placed.applied.sharded)
        for guard in self._placed.applied.guards:
            if found := exchanging.intersection(guard.block.modules()):
                parts = {part for each in found for part in each.parameters()}
                guard.couple(divides_experts=not divided.isdisjoint(parts))

    @property
    @override
    def has_equal_weights(self) -> bool:
        return self.size > 1

    @override
    def check_optimizers(self, optimizers: Sequence[Optimizer]) -> None:
        for each in self._whole_steps:
            each.release()
        self._whole_steps = []
        if self.size == 1:
            return
        mixing = find_mixing(optimizers)
        if self.strategy.data_axis.is_sharded:
            return  # the data axis steps them, using ``part_exchange``
        exchange = self.part_exchange()
        assert exchange is not None
        self._whole_steps = [WholeSteps(each, exchange) for each in mixing]
        for each in self._whole_steps:
            each.patch()

    @override
    def part_exchange(self) -> PartExchange | None:
        if self.size == 1 or self.placement is None:
            return None
        return PartExchange(self.context.group, self._joinings())

    @override
    def keeps_whole_state(self, parameter: Tensor) -> bool | None:
        return is_owned(parameter, self._whole_steps)

    @override
    def start(self, trainer: Trainer) -> None:
        self._sample = None, ()
        if self.strategy.is_fitting:
            context = self.context
            self._overflow.begin(context.scaler, context.group, context.device)

    # Steps.

    @override
    def norm_shares(self) -> Sequence[NormShare]:
        if self.size == 1:
            return ()
        return (PartShare(self.context.group, lambda: self.parts),)

    @property
    def parts(self) -> tuple[Parameter, ...]:
        """Parameters of which this rank has a part."""
        return () if self.placement is None else self.placement.parts

    # Checkpoints.

    @override
    def division(self, name: str) -> DimDivision | None:
        return None if self.placement is None else self.placement.divisions.get(name)

    @override
    def opened(self) -> AbstractContextManager[None]:
        return nullcontext() if self.placement is None else self.guard.opened()

    @override
    def join_model_state(self, state: dict[str, Any]) -> dict[str, Any]:
        whole = dict(state)
        for name, part in state.items():
            division = self.division(name)
            if division is not None and self.strategy.holds(name):
                whole[name] = self._joined(name, part)
            elif division is not None:  # of another stage, which has joined it
                whole[name] = part.new_empty(division.shape, device="meta")
        return whole

    def _joined(self, name: str, part: Tensor) -> Tensor:
        """Return the whole of a divided parameter, or of a tensor of its shape. Collective."""
        applied = self._placed.applied
        first = next(each.name for each in applied.plan.sharded.values() if name in each.names)
        return applied.join(first, part)

    # Expected traffic.

    @override
    def dry_batch(self) -> tuple[FakeRuns, torch.device] | None:
        if self.placement is None:
            return None
        batch, rest = self._sample
        rehearsal = DryRun(self.placement.module, "training_step", (batch, *rest), _CPU)
        return [(lambda _: rehearsal.run(), 1)], _CPU

    @override
    def expected_traffic(self, module: Module) -> list[ExpectedTraffic]:
        if self._counted is None or self.size == 1:
            return []
        strategy = self.strategy
        trainer = strategy.trainer
        expected = expected_traffic(
            self._counted,
            size=self.group.size,
            accumulated=trainer.accumulate_grad_batches,
            num_norms=int(has_norm_clipping(trainer)),
            agrees_on_overflow=self.context.scaler is not None,
        )
        steps = [*self._whole_steps, *strategy.data_axis.whole_steps]
        return add_whole_steps(expected, steps, self.name)

    @override
    def check_batch(self, batch: Any) -> None:
        super().check_batch(batch)
        if self.placement is not None:
            self.placement.hooks.warn()

    # Ending.

    @override
    def close(self) -> None:
        """Restore the optimizers' own steps. The model stays divided."""
        self._overflow.end()
        for each in self._whole_steps:
            each.release()


@dataclass(frozen=True)
class _Joining:
    """Implements ``JoinedPart`` for one divided parameter.

    It lives as long as the parameter, and must not reference the model.
    """

    entry: ShardedParameter
    group: TensorGroup
    division: DimDivision

    def join(self, part: Tensor) -> Tensor:
        """Return the whole of a part, of ``division.shape``. Collective over the tensor axis."""
        return broadcast_whole(part, self.entry, self.group)

    def cut(self, whole: Tensor) -> Tensor:
        """Return this rank's part of a whole tensor, a copy of shape ``division.local_shape``."""
        return self.division.cut(whole)
