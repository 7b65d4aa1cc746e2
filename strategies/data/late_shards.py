"""Shards of a pipeline: ZeRO where the gradients of a batch come all at once.

Between optimizer steps every rank of the data axis has a share of its stages' parameters and of
their optimizer state. For the batches of a step parameters are gathered once; when the gradients of
all are made they are reduced once, and each rank steps its share. That is stage 1.

[Note: Stages 2 and 3 go by batch]
What the gradients of a microbatch are divided by is known at the end of its batch, and pipelines of
other data ranks may cut a batch into fewer microbatches, so nothing is reduced or gathered for a
microbatch. Stage 2 reduces after every batch, so that no whole gradient is kept from one batch of
an accumulation window to the next; stage 3 frees the parameters there too. Without accumulation
both move what stage 1 moves. With k batches in a step, stage 2 moves each gradient k - 1 times
more, and stage 3 each parameter also.

Source: ZeRO, Rajbhandari et al. 2020, https://arxiv.org/abs/1910.02054
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

from lightning.pytorch import LightningModule
from torch.distributed import ProcessGroup
from torch.nn import Module, Parameter
from torch.optim import Optimizer
from typing_extensions import override

from boltmesh.strategies.data.agreed_gradients import agree_on_gradients
from boltmesh.strategies.data.axis import AxisContext
from boltmesh.strategies.data.expectations import Expectations
from boltmesh.strategies.data.late import LateGradients
from boltmesh.strategies.data.late_scalars import LateScalars
from boltmesh.strategies.data.late_sharded_model import shard_late
from boltmesh.strategies.data.late_traffic import LateTraffic
from boltmesh.strategies.data.replica_memory import expected_held_memory
from boltmesh.strategies.data.zero import Shards
from boltmesh.strategies.torch_compat import forget_step, gather_units, reduce_gradients
from boltmesh.telemetry.snapshot import MemoryKind
from boltmesh.telemetry.traffic import ExpectedTraffic


class LateShards(LateGradients, Shards):
    """The data axis of ZeRO beside a pipeline; see [Note: Stages 2 and 3 go by batch]."""

    has_late_gradients = True

    @override
    def wrap(self, module: Module, context: AxisContext) -> Module:
        assert isinstance(module, LightningModule)
        self._context, self.other_shares = context, context.norm_shares
        if self.sharded is None or self.sharded.module is not module:
            self.sharded = shard_late(module, self.options, context)
        else:
            # The run before may have ended by an error.
            forget_step(self.sharded.root_unit)
            self._scalars.forget()
        self.sharded.mesh.name_groups(context.recorder)
        self._follow_scaler(context)
        return module

    @property
    def shard_group(self) -> ProcessGroup:
        """The ranks that share one copy of what they hold."""
        return self._model.mesh.shard_group

    # A batch.

    @override
    def begin_batch(self) -> None:
        if self._is_synchronised:
            self._model.buffers.send()
        self._gather()

    def _gather(self) -> None:
        """Put whole parameters in the places of shards. Collective over the axis."""
        self._refuse_lost()
        model = self._model
        gather_units(model.root_unit, model.units.values())
        model.step_units.follow_shards()
        model.scalars.take_out()

    @override
    def _finish(self, *, has_loss: bool) -> bool:
        is_last, stage = self._is_synchronised, self.options.stage
        if stage == 1 and not is_last:
            return False
        assert self._context is not None
        context, model = self._context, self._model
        agree_on_gradients(self._trained(), context.group, context.device, has_loss=has_loss)
        model.root_unit.set_reshard_after_backward(is_last or stage == 3)
        reduce_gradients(model.root_unit)
        self._scalars.average()
        # Of an earlier batch of a window shards add up, and are looked at when all have.
        return is_last

    @property
    def _scalars(self) -> LateScalars:
        scalars = self._model.scalars
        assert isinstance(scalars, LateScalars)
        return scalars

    def _trained(self) -> list[Parameter]:
        """Return what gets gradients: whole parameters within a batch, shards outside of it."""
        assert self._context is not None
        held = self._context.held
        parameters = self._model.module.parameters() if held is None else held
        return [each for each in parameters if each.requires_grad]

    @override
    def synchronize(self) -> None:
        super().synchronize()
        self._model.reshard()  # for who looks at parameters between two batches of a window

    # Evaluation.

    @override
    def begin_evaluation(self, num_batches: float, *, draws_batches: bool) -> None:
        self._model.buffers.send()
        self._gather()

    @override
    def evaluation_batch(self, is_last: Callable[[], bool]) -> AbstractContextManager[None]:
        self._gather()  # nothing, unless somebody has saved a checkpoint since
        return nullcontext()

    @override
    def run_out_of_batches(self, num_served: int) -> None:
        pass  # nothing is gathered for a single batch

    # What is to be expected.

    @property
    @override
    def _expectations(self) -> Expectations:
        assert self._context is not None
        # Whole parameters are of the type of their shards, also under autocast.
        context = replace(self._context, compute_dtype=None)
        return Expectations(self._model, self.options, context)

    @override
    def expected_memory(self, module: Module, optimizers: Sequence[Optimizer]) -> list[MemoryKind]:
        if self.options.has_offload:
            return self._expectations.memory(optimizers)
        assert self._context is not None
        return expected_held_memory(module, optimizers, self._context.held)

    @override
    def expected_traffic(self, module: Module) -> list[ExpectedTraffic]:
        return self.describe_traffic().expected()

    def describe_traffic(self) -> LateTraffic:
        """What the axis moves in an optimizer step, and what it would in another stage."""
        assert self._context is not None
        context, model = self._context, self._model
        known = self._expectations
        buffers = sum(each.numel() * each.element_size() for each in model.buffers.held())
        trained = (each for each in model.scalars.parameters if each.requires_grad)
        return LateTraffic(
            replace(known.shape, buffer_bytes=buffers),
            known.sharing,
            known.job,
            num_trained=len(self._trained()),
            scalar_bytes=tuple(each.element_size() for each in trained),
            num_norms=int(context.has_norm_clipping),
            has_scaler=context.scaler is not None,
        )
