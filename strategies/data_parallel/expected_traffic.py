"""Traffic on the data axis expected of one optimizer step of a sharded model.

``expected_shard_traffic`` is for FSDP2's units, ``expected_tile_traffic`` adds layers that run in
tiles. Beside a pipeline ``PipelineZeroTraffic`` covers the stages of a rank, ``ExtraTraffic`` what
stages 2 and 3 add (see [Note: Stages 2 and 3 go by batch] in ``pipeline_zero.py``), and
``describe_late_units`` predicts the units of a model that is not sharded yet. ``ZeroEstimate``
gives the traffic and memory that telemetry shows beside its measurements.
"""

from collections.abc import Collection, Container, Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn import Module, Parameter
from torch.optim import Optimizer

from boltmesh.strategies.cost_model.memory import estimate_memory
from boltmesh.strategies.cost_model.model import JobShape, ModelShape, ShardingLayout, UnitShape
from boltmesh.strategies.cost_model.traffic import NORM_BYTES, OVERFLOW_BYTES, estimate_traffic
from boltmesh.strategies.data_parallel.expected_memory import (
    count_state_copies,
    describe_job,
    describe_units,
    expected_held_memory,
    tensor_shape,
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
"""Operators of ``fully_shard`` as torch names them, by the planner's names."""

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

    ``num_norms`` optimizers clip their gradients by the norm.
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
    """Inputs that determine the data axis's traffic for one rank of a pipeline."""

    shape: ModelShape
    """Units of the rank's stages; its buffer bytes are those that the rank sends."""
    sharing: ShardingLayout
    job: JobShape
    num_trained: int
    """Number of parameters that get gradients."""
    scalar_bytes: tuple[int, ...] = ()
    """Bytes of each trained parameter without rows, which every rank keeps whole."""
    num_norms: int = 0
    has_scaler: bool = False

    def expected(self) -> list[ExpectedTraffic]:
        """Return one rank's traffic of an optimizer step, one entry per operator."""
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
        """Return the traffic beyond that of stage 1; None for stage 1 or a single rank."""
        if self.sharing.stage == 1 or self.job.num_ranks == 1:
            return None
        gathered, reduced = self._of_a_further_batch()
        return ExtraTraffic(self.sharing.stage, self.job.num_microbatches, reduced, gathered)

    def _of_a_further_batch(self) -> tuple[int, int]:
        """Return the bytes that a second batch in a step adds: gathers, everything else."""
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
    """Traffic of ZeRO-2 or 3 beside a pipeline beyond that of ZeRO-1, on one rank."""

    stage: int
    num_batches: int
    """Batches per optimizer step."""
    gradient_bytes: int
    """Reduced for each batch after the first of a step, which stage 1 does not do."""
    parameter_bytes: int
    """Gathered for each such batch, which stage 1 does not do."""

    @property
    def batch_bytes(self) -> int:
        """Bytes for each batch after the first of a step."""
        return self.gradient_bytes + self.parameter_bytes

    @property
    def step_bytes(self) -> int:
        """Bytes per optimizer step."""
        return (self.num_batches - 1) * self.batch_bytes

    def per_microbatch(self, num_microbatches: int) -> float:
        """Return the bytes per microbatch, of which a batch has ``num_microbatches``."""
        return self.step_bytes / (self.num_batches * num_microbatches)

    def sentence(self, num_microbatches: int, *, rank: str) -> str:
        """Format the extra traffic for the user; ``rank`` is a name such as ``rank 0``."""
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
    """Return gathers as of a stage that gathers for each batch; other traffic unchanged."""
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
    """Return the units that one rank of a pipeline will have once it is sharded.

    Args:
        module: The whole model, whose parameters may already be divided by other axes.
        held: Parameters of the rank's stages.
        buffers: Buffers that the rank sends.
        patterns: The user's ``blocks``.
        has_scalars: Whether to count parameters without rows, which are not gathered.
    """
    names = {parameter: name for name, parameter in module.named_parameters()}
    left = {each for each in held if has_scalars or each.dim() > 0}
    shapes: list[UnitShape] = []

    def take(name: str, unit: Module) -> None:
        own = [each for each in unit.parameters() if each in left]
        left.difference_update(own)
        tensors = tuple(tensor_shape(names[each], each) for each in own)
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
    """Return the traffic of tiled layers in one step, one entry per operator.

    Args:
        tiled: Weights that are gathered in tiles.
        num_batches: Batches per optimizer step.
        compute_dtype: Dtype of autocast; None without autocast.
        recomputed: Layers whose forward runs a second time in the backward pass.
    """
    calls = dict.fromkeys(("gather", "reduce", "average"), 0)
    moved = dict(calls)
    for weight in tiled:
        padded = weight.plan.ranks * weight.shard_numel
        for layer in weight.layers:
            # The gradient of an Embedding only needs the shape of its weight.
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
    """Expected traffic and memory of a sharded model in a run, by the cost model."""

    def __init__(self, model: ShardedModel, options: ZeroOptions, context: AxisContext) -> None:
        self._model, self._options, self._context = model, options, context

    @property
    def shape(self) -> ModelShape:
        """Units, without tiled weights and owned experts."""
        return describe_units(self._model.module, self._model.units, cast=self._model.cast)

    @property
    def _whole_shape(self) -> ModelShape:
        """``shape`` with the weights gathered in tiles and those that ranks own."""
        names = {each: name for name, each in self._model.module.named_parameters()}
        owned = [
            replace(
                tensor_shape(names[each], each),
                # Times the number of ranks, as this rank's rows are one rank's share.
                shape=(local_tensor(each).shape[0] * self._model.mesh.shard_size, *each.shape[1:]),
            )
            for plain in self._model.owned
            for each in plain.parameters
            if each in names
        ]
        tiled = (
            replace(
                tensor_shape(each.name, each.parameter),
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
        """ZeRO stage, and where state and parameters are stored."""
        return self._options.sharing()

    @property
    def job(self) -> JobShape:
        """Ranks, dtypes and batches."""
        return describe_job(
            num_ranks=self._context.group.size(),
            shard_size=self._model.mesh.shard_size,
            num_microbatches=self._context.num_microbatches,
            compute_dtype=self._context.compute_dtype,
            is_on_host=self._context.device.type == "cpu",
        )

    def traffic(self) -> list[ExpectedTraffic]:
        """Return the traffic of one optimizer step on the data axis."""
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
        """Return the memory that one rank holds between two steps.

        Counted from the parameters; with offload, placed as the cost model places it.
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
