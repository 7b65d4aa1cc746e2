"""Shards of a pipeline: ZeRO where all gradients of a batch appear at its end.

Between optimizer steps every rank of the data axis has a shard of its stages' parameters and of
their optimizer state. Parameters are gathered once for the batches of a step; when the gradients of
all batches are there they are reduced once, and each rank steps its shard. That is stage 1.
Parameters without rows, and rows of experts, are averaged once, too: ``LateParams``.

``shard_late`` applies ``fully_shard`` to the parameters of a pipeline rank, without its hooks.
FSDP2 gathers and reduces as forward and backward passes run through its units. A pipeline runs
microbatches of several stages in turns, in orders that FSDP2 does not know, splits backward passes,
and only knows at the end of a batch what its gradients are divided by. So the units are holders
around the blocks that are never called: FSDP2 keeps the shards, and this axis calls its gathers and
reductions.

[Note: Stages 2 and 3 go by batch]
The divisor of a microbatch's gradients is known at the end of its batch, and pipelines of other
data ranks may divide a batch into fewer microbatches, so nothing is reduced or gathered per
microbatch. Stage 2 reduces after every batch, so that no whole gradient is kept between the batches
of an accumulation window; stage 3 also frees the parameters then. Without accumulation both move as
much as stage 1. With k batches in a step, stage 2 moves each gradient k - 1 more times, and stage 3
each parameter, too.

Source: ZeRO, Rajbhandari et al. 2020, https://arxiv.org/abs/1910.02054
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from lightning.pytorch import LightningModule
from torch.distributed import ProcessGroup
from torch.distributed.fsdp import fully_shard
from torch.nn import Module, Parameter
from torch.optim import Optimizer
from typing_extensions import override

from boltmesh.strategies.data_parallel.cpu_collectives import CpuCollectives
from boltmesh.strategies.data_parallel.expected_memory import expected_held_memory
from boltmesh.strategies.data_parallel.expected_traffic import PipelineZeroTraffic, ZeroEstimate
from boltmesh.strategies.data_parallel.fully_shard import (
    RootModule,
    ShardedModel,
    as_units,
)
from boltmesh.strategies.data_parallel.options import ZeroOptions
from boltmesh.strategies.data_parallel.param_remap import ParamRemap
from boltmesh.strategies.data_parallel.param_state import (
    BufferSync,
    OwnedParams,
    PlainInStep,
    ScalarParams,
    has_no_rows,
    local_values,
)
from boltmesh.strategies.data_parallel.pipeline_ddp import agree_on_gradients, share_state
from boltmesh.strategies.data_parallel.shard_mesh import ShardMesh
from boltmesh.strategies.data_parallel.uneven_inputs import JoinedGathers, UnitGather
from boltmesh.strategies.data_parallel.units import find_units, precision_policy
from boltmesh.strategies.data_parallel.unsupported import (
    refuse_lost_write,
    refuse_mixed_types,
    refuse_parameters,
)
from boltmesh.strategies.data_parallel.zero import ZeroAxis
from boltmesh.strategies.deferred_initialization.materialize import lay_in_rows
from boltmesh.strategies.engine.data_axis import AxisContext
from boltmesh.strategies.parameter_access import register_units
from boltmesh.strategies.patch import patched
from boltmesh.strategies.torch_compat.autograd import share_gradient_hooks
from boltmesh.strategies.torch_compat.fsdp import (
    StepUnits,
    forget_step,
    gather_units,
    reduce_gradients,
)
from boltmesh.strategies.torch_compat.fsdp_hooks import observe_waits
from boltmesh.strategies.torch_compat.gathered_writes import GatheredWrites
from boltmesh.strategies.torch_compat.modules import set_parameter
from boltmesh.strategies.torch_compat.tensors import dtensor_like
from boltmesh.strategies.whole_steps import add_whole_steps
from boltmesh.telemetry.snapshot import MemoryKind
from boltmesh.telemetry.traffic import ExpectedTraffic

if TYPE_CHECKING:
    from torch import Tensor


class LateParams(PlainInStep):
    """DTensors between steps, and within them plain parameters over the same memory.

    Offloaded values are copied, and copied again whenever they may have changed.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._gradients: dict[Parameter, Tensor | None] = {}
        """Gradients of copies that were dropped."""
        super().__init__(*args, **kwargs)

    @override
    def write_back(self) -> None:
        for parameter in self.copied:
            self._gradients[parameter] = self.plain[parameter].grad
        super().write_back()

    @override
    def use_plain(self) -> None:
        self.write_back()
        for owner, name, parameter in self.places:
            if parameter not in self.plain:
                plain = Parameter(local_values(parameter.detach()), parameter.requires_grad)
                plain.grad = self._gradients.pop(parameter, None)
                share_gradient_hooks(parameter, plain)
                self.plain[parameter] = plain
                self.note_copy(parameter, plain)
            set_parameter(owner, name, self.plain[parameter])

    def average(self) -> None:
        """Give the averaged gradients to the DTensors, and put these in place.

        Collective over the replicas, which all have gradients of the same parameters.
        """
        gradients = {each: plain.grad for each, plain in self.plain.items()}
        for parameter in self.parameters:  # in the same order on all ranks
            gradient = gradients.get(parameter, self._gradients.get(parameter))
            if gradient is not None:
                made = dtensor_like(self.averaged(gradient), parameter)
                parameter.grad = made if parameter.grad is None else parameter.grad + made
        self.forget()

    def forget(self) -> None:
        """Put the DTensors in place, and drop gradients."""
        self.use_dtensors()
        self.plain, self._gradients = {}, {}


class LateScalarParams(LateParams, ScalarParams):
    """The scalars of a rank's stages."""


class LateOwnedParams(LateParams, OwnedParams):
    """This rank's rows of the experts in its stages."""


class _Holder(Module):
    """Parent of a block; its forward is never run."""

    def __init__(self, block: Module) -> None:
        super().__init__()
        self.block = block


def shard_late(module: LightningModule, options: ZeroOptions, context: AxisContext) -> ShardedModel:
    """Shard the parameters that a rank holds in place.

    Collective over the data axis: every rank gets its shard of the first rank's parameters.
    """
    refuse_parameters(module)
    lay_in_rows(module.modules())
    held = set(module.parameters() if context.held is None else context.held)
    buffers = BufferSync(module, context.group, holds=context.holds_buffer)
    share_state([each for each in module.parameters() if each in held], buffers, context.group)
    mesh = ShardMesh.build(context, options.shard_size)
    absent = frozenset(each for each in module.parameters() if each not in held)
    # Parameters that are not sharded by the next holder.
    taken: set[Parameter] = {*absent, *(each for each in held if has_no_rows(each))}
    owned: list[LateOwnedParams] = []
    if context.owned is not None:
        owned.append(LateOwnedParams(context.owned, context.device, context.group.size()))
        taken |= context.owned.parameters
    found: dict[str, Module] = {}
    successors = ParamRemap()
    for name, unit in reversed(find_units(module, options.blocks).items()):  # from the inside out
        if all(each in taken for each in unit.parameters()):
            continue
        refuse_mixed_types(name, unit)
        with successors.of_parameters(unit):
            found[name] = _shard(_Holder(unit), mesh, taken)
        taken |= set(unit.parameters())
    refuse_mixed_types("", module)
    root = RootModule(module, found.values())
    with successors.of_parameters(module):
        found[""] = _shard(root, mesh, taken)
        for each in owned:
            each.cut(module)
        scalars = LateScalarParams(module, mesh.mesh, context.group, absent=absent)
    successors.take_places(module)
    # Units that the optimizer steps first are gathered first; offload steps in the model's order.
    units = as_units(reversed(found.items()))
    register_units(units.values())
    successors.follow_gathers(units.values())
    exchanges = () if context.owned is None else context.owned.exchanges
    gathers = {each.module: UnitGather(each.is_on, each.attend) for each in exchanges}
    return ShardedModel(
        module,
        root,
        units,
        set(),
        mesh,
        JoinedGathers(gathers, context.group, context.device),
        buffers,
        [],
        scalars,
        StepUnits(units.values()),
        GatheredWrites(units.values(), refuse_lost_write),
        successors,
        CpuCollectives.where_needed(
            units.values(), context.device, takes_gradients_away=options.has_offload
        ),
        absent,
        owned,
    )


def _shard(unit: Module, mesh: ShardMesh, ignored: set[Parameter]) -> Module:
    fully_shard(
        unit,
        mesh=mesh.mesh,
        reshard_after_forward=False,
        # Gradients of microbatches are summed in the gathered dtype: that of the parameters, also
        # under autocast.
        mp_policy=precision_policy(None, is_cast=False),
        ignored_params=ignored,
    )
    return unit


class PipelineZeroAxis(ZeroAxis):
    """The data axis of ZeRO beside a pipeline; see [Note: Stages 2 and 3 go by batch]."""

    has_late_gradients = True

    @override
    def wrap(self, module: Module, context: AxisContext) -> Module:
        assert isinstance(module, LightningModule)
        self.axis_context, self.other_shares = context, context.norm_shares
        if self.sharded is None or self.sharded.module is not module:
            self.sharded = shard_late(module, self.options, context)
        else:
            # The previous run may have ended with an error.
            forget_step(self.sharded.root_unit)
            self._forget_late()
        self.sharded.mesh.name_groups(context.recorder)
        observe_waits(self.sharded.units.values(), context.recorder.device_wait)
        self.overflow.begin(context.scaler, context.group)
        return module

    @property
    def shard_group(self) -> ProcessGroup:
        """Ranks that share one copy of the stages' parameters."""
        return self.model.mesh.shard_group

    # A batch.

    @override
    @contextmanager
    def no_sync(self, module: Module) -> Iterator[None]:
        with patched(self, is_synchronised=False):  # FSDP2's own hooks are not used
            yield

    def before_batch(self) -> None:
        """Gather the parameters of the stages."""
        if self.is_synchronised:
            self.model.buffers.send()
        if self.options.stage == 1 and self.axis_context.begins_window():
            self.model.step_units.forget_gradients()  # of a window that was cut short
            self._forget_late()
        self._gather()

    def _forget_late(self) -> None:
        for each in self._late:
            each.forget()

    def _gather(self) -> None:
        """Replace shards by whole parameters. Collective over the axis."""
        self.refuse_lost()
        model = self.model
        gather_units(model.root_unit, model.units.values())
        model.step_units.follow_shards()
        model.use_plain()

    def reduce_gradients(self, *, has_loss: bool) -> bool:
        """Reduce gradients to shards; see ``LateGradientsAxis``."""
        is_last, stage = self.is_synchronised, self.options.stage
        if stage == 1 and not is_last:
            return False
        context, model = self.axis_context, self.model
        agree_on_gradients(self._trained(), context.group, context.device, has_loss=has_loss)
        model.root_unit.set_reshard_after_backward(is_last or stage == 3)
        reduce_gradients(model.root_unit)
        for each in self._late:
            each.average()
        # After an earlier batch of a window, shards are still summed up and not yet read.
        return is_last

    @property
    def _late(self) -> list[LateParams]:
        return [each for each in self.model.plain if isinstance(each, LateParams)]

    def _trained(self) -> list[Parameter]:
        """Return the parameters that get gradients: whole within a batch, else shards."""
        held = self.axis_context.held
        parameters = self.model.module.parameters() if held is None else held
        return [each for each in parameters if each.requires_grad]

    @override
    def synchronize(self) -> None:
        super().synchronize()
        self.model.reshard()  # parameters may be read between two batches of a window

    # Evaluation.

    @override
    def begin_evaluation(self, num_batches: float, *, draws_batches: bool) -> None:
        model = self.model
        model.buffers.send()
        self._gather()
        if model.owned:  # no other communication for a single batch
            model.joined_gathers.begin(num_batches, draws_batches=draws_batches)

    @override
    def evaluation_batch(self, is_last: Callable[[], bool]) -> AbstractContextManager[None]:
        self._gather()  # no-op, unless a checkpoint was saved since
        return self.model.joined_gathers.batch(is_last) if self.model.owned else nullcontext()

    @override
    def run_out_of_batches(self, num_served: int) -> None:
        if self.model.owned:
            self.model.joined_gathers.run_out(num_served)

    @override
    def run_generation(self, run: Callable[[], Any]) -> Any:
        if self.sharded is None:  # the dry run that divides a pipeline, on fake tensors
            return run()
        self._gather()  # no-op in an evaluation
        return self.model.joined_gathers.generate(run) if self.model.owned else run()

    # Expected traffic and memory.

    @property
    @override
    def _expectations(self) -> ZeroEstimate:
        # Whole parameters have the dtype of their shards, also under autocast.
        context = replace(self.axis_context, compute_dtype=None)
        return ZeroEstimate(self.model, self.options, context)

    @override
    def expected_memory(self, module: Module, optimizers: Sequence[Optimizer]) -> list[MemoryKind]:
        if self.options.has_offload:
            return self._expectations.memory(optimizers)
        return expected_held_memory(module, optimizers, self.axis_context.held)

    @override
    def expected_traffic(self, module: Module) -> list[ExpectedTraffic]:
        expected = self.describe_traffic().expected()
        num_reductions = 1 if self.options.stage == 1 else self.axis_context.num_microbatches
        for each in self.model.owned:
            expected += each.expected_traffic(num_batches=num_reductions)
        return add_whole_steps(expected, self.whole_steps, self.name)

    def describe_traffic(self) -> PipelineZeroTraffic:
        """Describe the axis's traffic of an optimizer step, and what other stages would add."""
        context, model = self.axis_context, self.model
        known = self._expectations
        buffers = sum(each.numel() * each.element_size() for each in model.buffers.held())
        trained = (each for each in model.scalars.parameters if each.requires_grad)
        return PipelineZeroTraffic(
            replace(known.shape, buffer_bytes=buffers),
            known.sharing,
            known.job,
            num_trained=len(self._trained()),
            scalar_bytes=tuple(each.element_size() for each in trained),
            num_norms=int(context.has_norm_clipping),
            has_scaler=context.scaler is not None,
        )
