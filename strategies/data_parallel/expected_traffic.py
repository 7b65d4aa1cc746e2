"""What an optimizer step of a sharded model should move on the data axis, as telemetry counts it.

``expected_shard_traffic`` is for FSDP2's units, ``expected_tile_traffic`` adds layers that run in
tiles. Beside a pipeline ``PipelineZeroTraffic`` has the stages of a rank, ``ExtraTraffic`` what
stages 2 and 3 add (see [Note: Stages 2 and 3 go by batch] in ``pipeline_zero.py``), and
``describe_late_units`` the shapes of what is gathered together of a model that is not sharded yet.
``ZeroEstimate`` is what telemetry shows beside its measurements: traffic of a step, and memory.
"""

from collections.abc import Collection, Container, Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn import Module, Parameter
from torch.optim import Optimizer

from boltmesh.strategies.cost_model.memory import estimate_memory
from boltmesh.strategies.cost_model.model import (
    JobShape,
    ModelShape,
    ShardingLayout,
    TensorShape,
    UnitShape,
)
from boltmesh.strategies.cost_model.traffic import NORM_BYTES, OVERFLOW_BYTES, estimate_traffic
from boltmesh.strategies.data_parallel.expected_memory import (
    count_state_copies,
    describe_job,
    describe_units,
    expected_held_memory,
)
from boltmesh.strategies.data_parallel.fully_shard import ShardedModel
from boltmesh.strategies.data_parallel.options import ZeroOptions
from boltmesh.strategies.data_parallel.pipeline_ddp import agreement_bytes
from boltmesh.strategies.data_parallel.units import find_units
from boltmesh.strategies.engine.data_axis import AxisContext
from boltmesh.strategies.tiling.apply import TiledWeight
from boltmesh.strategies.torch_compat.tensors import local_tensor
from boltmesh.telemetry.snapshot import MemoryKind
from boltmesh.telemetry.traffic import ExpectedTraffic, added_up

_OPERATORS = {
    "all-gather": "_allgather_base",
    "reduce-scatter": "_reduce_scatter_base",
    "all-reduce": "allreduce",
}
"""The planner's names, and torch's for what ``fully_shard`` calls."""

_GATHERS = {
    1: "each parameter, once per optimizer step",
    2: "each parameter, once per optimizer step",
    3: "each block in the forward and in the backward pass of every batch, the rest once per batch",
}
_REDUCTIONS = {
    1: "each gradient, once per optimizer step",
    2: "each gradient, once per batch",
    3: "each gradient, once per batch",
}


def expected_shard_traffic(
    model: ModelShape,
    sharing: ShardingLayout,
    job: JobShape,
    *,
    num_norms: int = 0,
    more: Iterable[ExpectedTraffic] = (),
) -> list[ExpectedTraffic]:
    """Return the traffic of one step on the data axis, one entry per operator.

    Args:
        model: What is gathered together.
        sharing: Which stage.
        job: Ranks, types and batches.
        num_norms: How many optimizers' gradients are clipped by their norm.
        more: What is moved beside that on the data axis.
    """
    reasons = {
        "all-gather": _GATHERS[sharing.stage],
        "reduce-scatter": _REDUCTIONS[sharing.stage],
        "all-reduce": "shards of gradients averaged over the copies of the model",
    }
    expected = [
        ExpectedTraffic(
            "data", _OPERATORS[each.operator], each.whole_bytes, each.calls, reasons[each.operator]
        )
        for each in estimate_traffic(model, sharing, job)
        if each.whole_bytes
    ]
    expected += more
    if num_norms:
        norm = ExpectedTraffic(
            "data", "allreduce", NORM_BYTES * num_norms, num_norms, "the norm to clip by"
        )
        expected.append(norm)
    if model.buffer_bytes and job.num_ranks > 1:
        why = "buffers of the first data rank, before a synchronised forward pass"
        expected.append(ExpectedTraffic("data", "broadcast", model.buffer_bytes, None, why))
    return added_up(expected)


GATHERS = "_allgather_base"


@dataclass(frozen=True)
class PipelineZeroTraffic:
    """A rank's stages and its run, as far as they decide what the data axis moves."""

    shape: ModelShape
    """What is gathered together of the rank's stages; of buffers those that it sends."""
    sharing: ShardingLayout
    job: JobShape
    num_trained: int
    """Parameters that get gradients."""
    scalar_bytes: tuple[int, ...] = ()
    """Of each trained parameter without rows, which every rank keeps whole."""
    num_norms: int = 0
    has_scaler: bool = False

    def expected(self) -> list[ExpectedTraffic]:
        """Return what one optimizer step moves on one rank, one entry per operator."""
        stage, num_batches = self.sharing.stage, self.job.num_microbatches
        reductions = 1 if stage == 1 else num_batches
        flag_bytes = reductions * agreement_bytes(self.num_trained)
        why = "which parameters have gradients, 4 bytes for each"
        more = [ExpectedTraffic("data", "allreduce", flag_bytes, reductions, why)]
        if self.scalar_bytes:
            moved, calls = sum(self.scalar_bytes), len(self.scalar_bytes)
            why = "gradients of parameters without rows, once per batch"
            moved, calls = reductions * moved, reductions * calls
            more.append(ExpectedTraffic("data", "allreduce", moved, calls, why))
        if self.has_scaler:
            why = "whether fp16 has overflown, asked by torch of shards and once more of all"
            more.append(ExpectedTraffic("data", "allreduce", 2 * OVERFLOW_BYTES, 2, why))
        expected = expected_shard_traffic(
            self.shape,
            replace(self.sharing, stage=min(stage, 2)),
            self.job,
            num_norms=self.num_norms,
            more=more,
        )
        return [_per_batch(each, num_batches) if stage == 3 else each for each in expected]

    def extra(self) -> "ExtraTraffic | None":
        """Return what the stage moves more than stage 1; None where it is stage 1."""
        if self.sharing.stage == 1 or self.job.num_ranks == 1:
            return None
        gathered, reduced = self._of_a_further_batch()
        return ExtraTraffic(self.sharing.stage, self.job.num_microbatches, reduced, gathered)

    def _of_a_further_batch(self) -> tuple[int, int]:
        """Bytes of gathers, and of everything else, that a second batch in a step moves."""
        sums = {(True, 1): 0.0, (True, 2): 0.0, (False, 1): 0.0, (False, 2): 0.0}
        for num_batches in (1, 2):
            job = replace(self.job, num_microbatches=num_batches)
            for each in replace(self, job=job).expected():
                sums[each.operator == GATHERS, num_batches] += each.payload_bytes
        return (
            round(sums[True, 2] - sums[True, 1]),
            round(sums[False, 2] - sums[False, 1]),
        )


@dataclass(frozen=True)
class ExtraTraffic:
    """What ZeRO-2 or 3 beside a pipeline moves more than ZeRO-1, on one rank."""

    stage: int
    num_batches: int
    """In an optimizer step."""
    gradient_bytes: int
    """Of each batch behind the first one of a step: the reduction that stage 1 does not do."""
    parameter_bytes: int
    """Of each such batch: the gather that stage 1 does not do."""

    @property
    def batch_bytes(self) -> int:
        """Of each batch behind the first."""
        return self.gradient_bytes + self.parameter_bytes

    @property
    def step_bytes(self) -> int:
        """Of an optimizer step."""
        return (self.num_batches - 1) * self.batch_bytes

    def per_microbatch(self, num_microbatches: int) -> float:
        """Bytes of a step shared out over its microbatches.

        Args:
            num_microbatches: Of a batch.
        """
        return self.step_bytes / (self.num_batches * num_microbatches)

    def sentence(self, num_microbatches: int, *, rank: str) -> str:
        """Return it in words, for whoever has chosen the stage.

        Args:
            num_microbatches: Of a batch.
            rank: Whose it is, such as ``rank 0``.
        """
        what = f"{self.gradient_bytes:,} bytes of gradients"
        if self.parameter_bytes:
            what += f" and {self.parameter_bytes:,} of parameters"
        name = f"zero_stage={self.stage} beside a pipeline"
        if self.num_batches == 1:
            return (
                f"{name} moves what zero_stage=1 does, 0 bytes a microbatch more, for a step is "
                f"one batch; each further batch of accumulate_grad_batches would move {what} more "
                f"on {rank}"
            )
        further = f"each of the {self.num_batches - 1} batches behind the first of a step"
        if self.num_batches == 2:
            further = "the second batch of a step"
        return (
            f"{name} moves {self.step_bytes:,} bytes a step more on {rank} than zero_stage=1, "
            f"{self.per_microbatch(num_microbatches):,.0f} a microbatch: {what} for {further}"
        )


def _per_batch(gathers: ExpectedTraffic, num_batches: int) -> ExpectedTraffic:
    """Return what parameters move that are gathered for each batch; other traffic as it is."""
    if gathers.operator != GATHERS:
        return gathers
    return ExpectedTraffic(
        gathers.axis,
        gathers.operator,
        gathers.payload_bytes * num_batches,
        None if gathers.calls is None else gathers.calls * num_batches,
        "each parameter, once per batch",
    )


def describe_late_units(
    module: Module,
    held: Collection[Parameter],
    buffers: Collection[Tensor],
    patterns: Sequence[str] | None,
    *,
    has_scalars: bool,
) -> ModelShape:
    """Return the shapes of what one rank of a pipeline holds.

    Args:
        module: The whole model, of which ``held`` may be in parts already.
        held: The parameters of the rank's stages.
        buffers: That it sends.
        patterns: ``blocks`` of the user.
        has_scalars: Whether to count parameters without rows, which nobody gathers.
    """
    names = {parameter: name for name, parameter in module.named_parameters()}
    left = {each for each in held if has_scalars or each.dim() > 0}
    shapes: list[UnitShape] = []

    def take(name: str, unit: Module) -> None:
        own = [each for each in unit.parameters() if each in left]
        left.difference_update(own)
        tensors = tuple(
            TensorShape(
                names[each],
                tuple(each.shape),
                is_trained=each.requires_grad,
                element_bytes=each.element_size(),
            )
            for each in own
        )
        if tensors:
            shapes.append(UnitShape(name, tensors, is_autocast=False, stays_gathered=not name))

    for name, unit in reversed(find_units(module, patterns).items()):  # from the inside out
        take(name, unit)
    take("", module)
    return ModelShape(
        type(module).__name__,
        tuple(shapes),
        buffer_bytes=sum(each.numel() * each.element_size() for each in buffers),
    )


def expected_tile_traffic(
    tiled: Iterable[TiledWeight],
    *,
    num_batches: int,
    compute_dtype: torch.dtype | None,
    recomputed: Container[nn.Module] = (),
) -> list[ExpectedTraffic]:
    """Return the traffic of one step, one entry per operator.

    Args:
        tiled: Their weights.
        num_batches: Batches of an optimizer step.
        compute_dtype: What autocast computes in; None without.
        recomputed: Layers whose forward pass runs once more in the backward pass.
    """
    calls = dict.fromkeys(("gather", "reduce", "average"), 0)
    moved = dict(calls)
    for weight in tiled:
        padded = weight.plan.ranks * weight.shard_numel
        for layer in weight.layers:
            # What an Embedding's gradient needs of its weight is the shape.
            passes = (2 if isinstance(layer, nn.Linear) else 1) + (layer in recomputed)
            calls["gather"] += passes * weight.plan.count
            moved["gather"] += (
                passes * padded * weight.gathered_dtype(layer, compute_dtype).itemsize
            )
            if weight.parameter.requires_grad:
                calls["reduce"] += weight.plan.count
                moved["reduce"] += padded * weight.reduced_dtype.itemsize
                calls["average"] += 1
                moved["average"] += weight.shard_numel * weight.reduced_dtype.itemsize
    has_shards = any(weight.plan.ranks > 1 for weight in tiled)
    has_copies = any(weight.num_copies > 1 for weight in tiled)
    kinds = [
        ("gather", "_allgather_base", has_shards, "tiles of large layers, in every pass"),
        ("reduce", "_reduce_scatter_base", has_shards, "gradients of tiles, once per batch"),
        ("average", "allreduce", has_copies, "their averages over the copies of the model"),
    ]
    return [
        ExpectedTraffic("data", operator, num_batches * moved[kind], num_batches * calls[kind], why)
        for kind, operator, is_there, why in kinds
        if is_there and moved[kind]
    ]


class ZeroEstimate:
    """A sharded model and its run as the planner sees them."""

    def __init__(self, model: ShardedModel, options: ZeroOptions, context: AxisContext) -> None:
        self._model, self._options, self._context = model, options, context

    @property
    def shape(self) -> ModelShape:
        """What is gathered together."""
        return describe_units(self._model.module, self._model.units, cast=self._model.cast)

    @property
    def _whole_shape(self) -> ModelShape:
        """With the weights that are gathered in tiles, by no unit, and those that ranks own."""
        names = {each: name for name, each in self._model.module.named_parameters()}
        owned = [
            TensorShape(
                names[each],
                # As many rows as have shards of what this rank owns.
                (local_tensor(each).shape[0] * self._model.mesh.shard_size, *each.shape[1:]),
                is_trained=each.requires_grad,
                element_bytes=each.element_size(),
            )
            for plain in self._model.owned
            for each in plain.parameters
            if each in names
        ]
        tiled = (
            TensorShape(
                each.name,
                tuple(each.parameter.shape),
                is_trained=each.parameter.requires_grad,
                element_bytes=each.parameter.element_size(),
                layers=tuple(
                    "lookup" if isinstance(layer, nn.Embedding) else "product"
                    for layer in each.layers
                ),
            )
            for each in self._model.tiled
        )
        units = (UnitShape(each.name, (each,)) for each in (*tiled, *owned))
        return replace(self.shape, units=(*self.shape.units, *units))

    @property
    def sharing(self) -> ShardingLayout:
        """Who keeps what, and where."""
        return self._options.sharing()

    @property
    def job(self) -> JobShape:
        """Ranks, types and batches."""
        return describe_job(
            num_ranks=self._context.group.size(),
            shard_size=self._model.mesh.shard_size,
            num_microbatches=self._context.num_microbatches,
            compute_dtype=self._context.compute_dtype,
            is_on_host=self._context.device.type == "cpu",
        )

    def traffic(self) -> list[ExpectedTraffic]:
        """What one optimizer step moves on the data axis."""
        context = self._context
        return expected_shard_traffic(
            self.shape,
            self.sharing,
            self.job,
            num_norms=int(context.has_norm_clipping),
            more=[
                *expected_tile_traffic(
                    self._model.tiled,
                    num_batches=context.num_microbatches,
                    compute_dtype=context.compute_dtype,
                    recomputed={part for block in context.recomputed for part in block.modules()},
                ),
                *(
                    each
                    for plain in self._model.plain
                    for each in plain.expected_traffic(num_batches=context.num_microbatches)
                ),
            ],
        )

    def memory(self, optimizers: Sequence[Optimizer]) -> list[MemoryKind]:
        """What one rank holds between two steps.

        Without offload the parameters themselves tell; with it, state is where the planner puts it.
        """
        if not self._options.has_offload:
            return expected_held_memory(self._model.module, optimizers)
        copies = count_state_copies(optimizers)
        job = replace(self.job, state_copies=copies or 0)
        kept = estimate_memory(self._whole_shape, self.sharing, job).kept
        if copies is None:
            kept.pop("optimizer")
        return [
            MemoryKind(kind, place, None, num_bytes)  # type: ignore[arg-type]
            for kind, amounts in kept.items()
            for place, num_bytes in amounts.items()
            if num_bytes
        ]
