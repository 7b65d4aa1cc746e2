"""Shards: each rank of the data axis holds a shard of what replicas would hold whole.

The work is done by torch's ``fully_shard``, in all three stages; this module decides the units,
when they are freed, when gradients are reduced, and what the offload engine holds.
Source: ZeRO, Rajbhandari et al. 2020, https://arxiv.org/abs/1910.02054
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor
from torch.nn import Module, Parameter
from torch.optim import Optimizer
from typing_extensions import override

from boltmesh.strategies import grad_norm
from boltmesh.strategies.data_parallel.expected_memory import held_tensors
from boltmesh.strategies.data_parallel.expected_traffic import ZeroEstimate
from boltmesh.strategies.data_parallel.fully_shard import (
    ShardedModel,
    gather_direct_calls,
    open_staging,
    shard_model,
)
from boltmesh.strategies.data_parallel.options import ZeroOptions
from boltmesh.strategies.data_parallel.order_check import OrderCheck
from boltmesh.strategies.data_parallel.param_state import (
    EarlyZeroGrad,
    follow_toggles,
    forget_toggles,
)
from boltmesh.strategies.data_parallel.shard_mesh import divide_into_shards
from boltmesh.strategies.data_parallel.single_rank import SingleRankAxis
from boltmesh.strategies.data_parallel.unsupported import (
    explain_direct_use,
    explain_transform,
    find_whole_optimizers,
    refuse_empty_share,
    refuse_unsharded,
)
from boltmesh.strategies.dry_run.unsupported import refuse_local_norms
from boltmesh.strategies.engine.data_axis import AxisContext, DataAxis
from boltmesh.strategies.grad_norm import NormShare, ShardShare
from boltmesh.strategies.lightning_compat.trainer import callbacks_of
from boltmesh.strategies.offload.disk.preflight import announce_disks
from boltmesh.strategies.offload.engine import OffloadEngine
from boltmesh.strategies.offload.stores import OffloadPlan
from boltmesh.strategies.owner_exchange import Exchange, ShardedPartExchange, ShardExchange
from boltmesh.strategies.patch import Changes
from boltmesh.strategies.torch_compat.autograd import after_backward
from boltmesh.strategies.torch_compat.fsdp import forget_step
from boltmesh.strategies.torch_compat.fsdp_hooks import observe_waits
from boltmesh.strategies.torch_compat.optimizers import OverflowAgreement
from boltmesh.strategies.whole_steps import WholeSteps, add_whole_steps, is_owned
from boltmesh.telemetry.snapshot import MemoryKind
from boltmesh.telemetry.traffic import ExpectedTraffic
from boltmesh.telemetry.writer.memory import StoredBytes

if TYPE_CHECKING:
    from torch.utils.hooks import RemovableHandle


class ZeroAxis(DataAxis):
    """The data axis of ZeRO."""

    is_sharded = True
    axis_context: AxisContext
    """Ranks, device and recorder of the run; set by ``wrap``."""

    def __init__(self, options: ZeroOptions) -> None:
        self.options, self.operand_divider = options, options.operand_divider
        self.sharded: ShardedModel | None = None
        """None before a module is wrapped."""
        self._guard: OrderCheck | None = None
        self._stale: EarlyZeroGrad | None = None
        self._direct_calls = Changes()
        self._offload: OffloadEngine | None = None
        self.overflow = OverflowAgreement()
        """Shares fp16 overflows between ranks, where the loss is scaled."""
        self._step_hooks: list[RemovableHandle] = []
        self.whole_steps: list[WholeSteps] = []
        self._has_ended_step = False
        self._lost: Exception | None = None
        """Why there are no parameters until a checkpoint is loaded: a step of an earlier run was
        not finished."""

    @property
    @override
    def defers_building(self) -> bool:
        return self.options.stage == 3

    @override
    def for_one_rank(self) -> DataAxis:
        options = self.options
        has_parts = options.tile_linear_bytes is not None or options.expert is not None
        return self if options.has_offload or has_parts else SingleRankAxis()

    @override
    def shard_groups(self, ranks: Sequence[int], *, ranks_per_node: int) -> list[list[int]]:
        shards = divide_into_shards(ranks, self.options.shard_size, ranks_per_node)
        return [] if len(shards) in {1, len(ranks)} else shards

    @override
    def refuse(self, trainer: Trainer, module: LightningModule) -> None:
        super().refuse(trainer, module)
        if self.strategy.is_fitting and self.strategy.gradient_group.size() > 1:
            for each in (module, *callbacks_of(trainer)):
                refuse_local_norms(each, sees="this rank's shards", names=["grad_norm"])

    @override
    def wrap(self, module: Module, context: AxisContext) -> Module:
        assert isinstance(module, LightningModule)
        self.axis_context, self.other_shares = context, context.norm_shares
        if self.sharded is None or self.sharded.module is not module:
            self.sharded = shard_model(module, self.options, context)
            self.sharded.root.register_forward_pre_hook(self._before_forward, prepend=True)
            self.sharded.root.register_forward_hook(self._after_forward)
            self._guard = self._build_guard(context)
            if self.options.stage < 3:  # stage 3 gathers little at a time
                self._stale = EarlyZeroGrad(self.sharded.root, self.sharded.units)
        else:
            forget_step(self.sharded.root_unit)  # the previous run may have ended by an error
        sharded = self.sharded  # kept for a second fit, and for an evaluation after one
        sharded.mesh.name_groups(context.recorder)
        observe_waits(sharded.units.values(), context.recorder.device_wait)
        is_automatic = module.automatic_optimization
        # Under manual optimisation backward passes and steps happen within the root's forward,
        # which gathers but once.
        sharded.root_unit.set_reshard_after_backward(is_automatic, recurse=False)
        if not is_automatic:
            follow_toggles(module, self._follow_shards)
        self._direct_calls = gather_direct_calls(sharded.units)
        if self._guard is not None:
            self._guard.start()
        self.overflow.begin(context.scaler, context.group)
        return sharded.root

    def _build_guard(self, context: AxisContext) -> OrderCheck | None:
        if context.group.size() == 1:
            return None
        model = self.model
        group = self.strategy.new_group(self.strategy.gradient_axes, backend="gloo")
        assert group is not None
        is_synchronized = model.joined_gathers.is_announced
        guard = OrderCheck(
            group,
            is_synchronized=is_synchronized,
            on_stuck=self._fail,
        )
        guard.attach(model.units, model.root)
        for weight in model.tiled:
            weight.note = guard.record
        for plain in model.plain:
            plain.note = guard.record
        for exchange in () if context.owned is None else context.owned.exchanges:
            exchange.note = guard.record
        return guard

    def _fail(self, error: BaseException) -> None:
        self.axis_context.recorder.fail(error)

    def _record(self, text: str) -> None:
        """Record a collective call of this rank, see ``OrderCheck.record``."""
        if self._guard is not None:
            self._guard.record(text)

    @override
    def explain(self, error: BaseException) -> None:
        if self.sharded is not None:
            explain_direct_use(error, self.sharded)
            explain_transform(error)
        if self._guard is not None:
            self._guard.explain(error)

    def _before_forward(self, *_: object) -> None:
        self.refuse_lost()
        self.model.begin_forward()
        self._follow_shards()
        if self.options.stage == 1 and self.axis_context.begins_window():
            self.model.step_units.forget_gradients()  # of a window that was cut short
        if self._stale is not None:
            self._stale.end()
            if torch.is_grad_enabled() and self.axis_context.zeroes_gradients():
                self._stale.begin()
        # Lightning leaves the root in the mode of an evaluation.
        if self.model.module.training and torch.is_grad_enabled() and self.is_synchronised:
            self.model.buffers.send()

    def _after_forward(self, *_: object) -> None:
        if not (self.model.module.automatic_optimization and torch.is_grad_enabled()):
            self.model.end_forward()  # else when the backward pass has ended

    def refuse_lost(self) -> None:
        """Raise the error of an earlier run that left no parameters."""
        if self._lost is not None:
            raise self._lost

    def _follow_shards(self) -> None:
        self.model.step_units.follow_shards()
        self.model.use_plain()

    @property
    def model(self) -> ShardedModel:
        """The module and its shards; only after ``wrap``."""
        assert self.sharded is not None
        return self.sharded

    @override
    def adopt(self, optimizers: Sequence[Optimizer], *, reads_gradients: bool) -> None:
        self._forget_steps()
        module, options = self.model.module, self.options
        parts = next(filter(None, (axis.part_exchange() for axis in self.strategy.axes)), None)
        group = self.model.mesh.shard_group
        steppers = find_whole_optimizers(optimizers, module, options, group, has_parts=bool(parts))
        self.model.successors.take_over(optimizers, module)
        if optimizers:  # else an evaluation: state of the previous run may still be saved
            shards = ShardExchange(group)
            exchange: Exchange = ShardedPartExchange(shards, parts) if parts else shards
            host = torch.device("cpu") if options.has_offload else None
            self.whole_steps = [WholeSteps(each, exchange, self._record, host) for each in steppers]
            for each in () if options.has_offload else self.whole_steps:
                each.patch()
        for optimizer in optimizers:
            if hasattr(optimizer, "register_step_post_hook"):  # Lightning accepts other classes
                self._step_hooks += [
                    optimizer.register_step_pre_hook(self._before_step),
                    optimizer.register_step_post_hook(self._after_step),
                ]
        if self._stale is not None:
            self._stale.optimizers = optimizers
        if self._offload is not None:
            if not optimizers:
                return  # an evaluation after a run
            staging = open_staging(self.options, self.axis_context)
            self._lost = self._offload.restore(staging) or self._lost
        if options.has_offload:
            self._offload = self._open_engine()
            self._offload.adopt(
                optimizers,
                {each.optimizer: each.step for each in self.whole_steps},
                exposes_gradients=reads_gradients,
                never_clips=not self.axis_context.has_norm_clipping,
                comes_late=self.has_late_gradients,
            )
            if self.options.uses_disk:
                world = dist.group.WORLD  # ranks of other axes write to disks, too
                assert world is not None
                recorder = self.axis_context.recorder
                announce_disks(self._offload.disk_report, group=world, recorder=recorder)
            self.model.reshard()

    def _open_engine(self) -> OffloadEngine:
        options, context, model = self.options, self.axis_context, self.model
        engine = OffloadEngine(
            OffloadPlan(options.shares, options.offload_parameters, options.offload_path),
            device=context.device,
            rank=dist.get_rank(),
            ranks_per_node=context.ranks_per_node,
            compute_dtypes={
                each.parameter: each.kept_dtype(context.compute_dtype) for each in model.tiled
            },
            recorder=context.recorder,
            shares=[*self.own_shares, *context.norm_shares],
            absent=model.absent,
        )
        # The root is gathered first: it holds parameters outside of blocks, such as embeddings.
        names = ["", *(name for name in model.units if name)]
        engine.attach(model.module, {name: model.units[name] for name in names})
        return engine

    def _forget_steps(self) -> None:
        for hook in self._step_hooks:
            hook.remove()
        self._step_hooks.clear()
        for each in self.whole_steps:
            each.release()

    # Within a step.

    @override
    @contextmanager
    def no_sync(self, module: Module) -> Iterator[None]:
        self._set_last(is_last=False)
        try:
            with self._offload.no_sync() if self._offload is not None else nullcontext():
                yield
        finally:
            self._set_last(is_last=True)
            if not self.model.root.is_running:  # the backward pass of this batch is over
                self.model.use_dtensors()

    @override
    def before_backward(self, loss: Tensor) -> None:
        after_backward(loss, self.model.use_dtensors)

    @override
    def before_manual_backward(self, module: Module, loss: Tensor) -> None:
        self.model.refuse_stale()

    def _set_last(self, *, is_last: bool) -> None:
        self.is_synchronised = is_last
        # Copies of the model average each reduction. A sum that FSDP2 keeps would be averaged only
        # when its unit runs in the last batch again, which a unit need not do.
        if self.options.stage == 3:
            return
        root = self.model.root_unit
        # Parameters do not change within an accumulation window, so both stages keep them
        # gathered; stage 1 also keeps the gradients whole, and reduces them once.
        root.set_reshard_after_backward(is_last)
        if self.options.stage == 1:
            root.set_requires_gradient_sync(is_last)
            root.set_is_last_backward(is_last)

    @override
    def after_optimizer_step(self, module: Module, optimizer: Optimizer) -> None:
        # Skipped if the optimizer's own hook has done it. A scaler may skip the optimizer's step.
        if not self._has_ended_step:
            self._end_step()
        self._has_ended_step = False

    def _before_step(self, optimizer: Optimizer, *_: object) -> None:
        refuse_unsharded(optimizer, self.model)
        self.model.writes.write_back()

    def _after_step(self, *_: object) -> None:
        """Optimizer post-step hook; the only signal under manual optimisation."""
        self._end_step()
        self._has_ended_step = True

    def _end_step(self) -> None:
        if self._guard is not None:
            self._guard.end_step()
        # A forward pass without a backward pass leaves gathered copies, which the step has made
        # stale.
        self.model.reshard()
        if self.model.root.is_running:
            self.model.root_unit.unshard()
            self.model.use_plain()

    @override
    def parameters_loaded(self) -> None:
        self._lost = None
        self.model.reshard()

    @override
    def synchronize(self) -> None:
        self.refuse_lost()
        if self._offload is not None:
            self._offload.synchronize()

    @property
    @override
    def keeps_state_on_disk(self) -> bool:
        return self.options.uses_disk

    @property
    @override
    def has_whole_steps(self) -> bool:
        if self._lost is not None:
            return False
        return self._offload is None or self._offload.has_whole_steps

    @override
    def keeps_whole_state(self, parameter: Tensor) -> bool | None:
        return is_owned(parameter, self.whole_steps)

    @override
    def prepare_state(self, optimizer: Optimizer) -> None:
        if self._offload is not None:
            self._offload.prepare_state(optimizer)

    @override
    def state_loaded(self, optimizer: Optimizer) -> None:
        if self._offload is not None:
            self._offload.absorb_state(optimizer)

    # Gradients.

    @property
    @override
    def own_shares(self) -> Sequence[NormShare]:
        # Ranks with different experts may be of several groups with the same shards.
        has_owned = self.axis_context.owned is not None
        return (ShardShare(self.axis_context.group if has_owned else self.model.mesh.shard_group),)

    @override
    def clip_by_norm(
        self, optimizer: Optimizer, parameters: Iterable[Parameter], max_norm: float
    ) -> Tensor:
        self._record("clipped its gradients")
        if self._offload is not None:
            return self._offload.clip(optimizer, max_norm)
        given = list(parameters)
        if self._has_nothing(given):
            return torch.zeros(())
        return self.norms.clip(given, max_norm)

    @override
    def gradient_norm(self, optimizer: Optimizer) -> float | None:
        self._record("computed the norm of its gradients")
        if self._offload is not None:
            return self._offload.gradient_norm(optimizer)
        parameters = [each for group in optimizer.param_groups for each in group["params"]]
        if self._has_nothing(parameters):
            return None
        return self.norms.norm(parameters).item()

    def _has_nothing(self, parameters: Iterable[Parameter]) -> bool:
        """Whether no rank has a gradient: equal on all ranks if there are no other axes."""
        return not self.other_shares and not grad_norm.gradients_of(parameters)

    # Evaluation.

    @override
    def check_dataloader(self, dataloader: object) -> None:
        strategy = self.strategy
        refuse_empty_share(dataloader, strategy.groups[self.name], strategy.root_device)

    @override
    def begin_evaluation(self, num_batches: float, *, draws_batches: bool) -> None:
        self.model.buffers.send()
        self.model.joined_gathers.begin(num_batches, draws_batches=draws_batches)

    @override
    def evaluation_batch(self, is_last: Callable[[], bool]) -> AbstractContextManager[None]:
        return self.model.joined_gathers.batch(is_last)

    @override
    def run_out_of_batches(self, num_served: int) -> None:
        self.model.joined_gathers.run_out(num_served)

    @override
    def end_evaluation(self) -> None:
        self.model.reshard()

    @override
    def run_generation(self, run: Callable[[], Any]) -> Any:
        if self.sharded is None:
            return run()  # a dry run on fake tensors, before parameters are sharded
        self._record("called generate")
        model = self.model
        if self.options.gather_for_generation:
            run = partial(model.run_gathered, run)
        run = partial(model.joined_gathers.generate, run)
        with torch.no_grad():
            return run() if model.root.is_running else model.run_outside_of_steps(run)

    @override
    def close(self) -> None:
        super().close()
        self._direct_calls.undo()  # before what was wrapped earlier

    @override
    def release(self) -> None:
        self.overflow.end()
        self._forget_steps()
        if self._guard is not None:
            self._guard.stop()
        if self.sharded is not None:
            try:
                self.sharded.reshard()  # raises for the first write that would be lost
            finally:
                self._close(self.sharded)

    def _close(self, sharded: ShardedModel) -> None:
        sharded.reshard()
        if self._offload is not None:
            self._offload.close()
        if sharded.on_host is not None:
            sharded.on_host.give_back()
        forget_toggles(sharded.module)

    # Expected traffic and memory.

    @property
    def _expectations(self) -> ZeroEstimate:
        return ZeroEstimate(self.model, self.options, self.axis_context)

    @override
    def expected_traffic(self, module: Module) -> list[ExpectedTraffic]:
        return add_whole_steps(self._expectations.traffic(), self.whole_steps, self.name)

    @override
    def expected_memory(self, module: Module, optimizers: Sequence[Optimizer]) -> list[MemoryKind]:
        return self._expectations.memory(optimizers)

    @override
    def tensors_by_kind(
        self, module: Module, optimizers: Sequence[Optimizer]
    ) -> Mapping[str, Sequence[Tensor | StoredBytes]] | None:
        if self.sharded is None:
            return None
        held = held_tensors(self.sharded, optimizers)
        if self._offload is not None:
            for kind, stored in self._offload.stored().items():
                held.setdefault(kind, []).extend(stored)
        return held
