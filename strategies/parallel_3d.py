"""``Parallel3DStrategy``: data, pipeline, context and tensor axes over one device mesh."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from lightning.pytorch import Trainer
from lightning.pytorch.utilities import rank_zero_info
from typing_extensions import override

from boltmesh.errors import ConfigError, LayoutError
from boltmesh.strategies.context.axis import ContextAxis
from boltmesh.strategies.context.options import ContextOptions
from boltmesh.strategies.context.positions import Balance
from boltmesh.strategies.context.seq_shard import Mechanism, on_positions
from boltmesh.strategies.data_parallel.ddp import DdpAxis, DdpOptions
from boltmesh.strategies.data_parallel.options import ZeroOptions
from boltmesh.strategies.data_parallel.pipeline_ddp import PipelineDdpAxis
from boltmesh.strategies.data_parallel.pipeline_zero import PipelineZeroAxis
from boltmesh.strategies.data_parallel.zero import ZeroAxis
from boltmesh.strategies.engine import MeshStrategy
from boltmesh.strategies.engine.data_axis import DataAxis
from boltmesh.strategies.expert.axis import ExpertAxis
from boltmesh.strategies.mesh import MeshLayout, fit_layout
from boltmesh.strategies.pipeline.axis import PipelineAxis
from boltmesh.strategies.pipeline.options import AUTOMATIC_SCHEDULE, PipelineOptions, Split
from boltmesh.strategies.pipeline.schedules.registry import schedule_kind
from boltmesh.strategies.tensor.axis import TensorAxis
from boltmesh.strategies.tensor.options import TensorOptions, UserPlan
from boltmesh.strategies.tensor.plan import TensorPlan

if TYPE_CHECKING:
    from boltmesh.strategies.engine.axis import Axis

Tier = Literal["cpu", "nvme"]


class Parallel3DStrategy(MeshStrategy):
    """Any ZeRO stage over the data axis, pipelines, and ranks that share each layer: together.

    The same numbers as one process with a batch that is larger by ``data``. Ranks are laid out with
    the tensor axis innermost, inside a host, and the pipeline outermost. Each rank has the layers
    of its stages, of every layer that the tensor plan divides its part, and of that part its shard
    over the data axis: optimizer state from ``zero_stage=1`` on, gradients from 2, parameters from
    3.

    What is said of ``state_dict``, norms and optimizers at ``TensorParallelStrategy`` and at
    ``ZeROStrategy`` holds here too: ``Trainer.save_checkpoint`` writes what any layout reads,
    ``gathered_parameters`` shows whole parameters, ``strategy.gradient_norm(optimizer)`` is the one
    norm over all ranks.

    Args:
        data: Ranks with batches of their own; by default all that the other axes leave.
        pipeline: Ranks of a pipeline, one stage behind the other.
        tensor: Ranks that share each layer; they have to be on one host.
        context: Ranks that divide a sequence; the data axis averages gradients over them, too, and
            shards over ``data x context``.
        expert: As for ``ZeROStrategy``, over ``data x context x tensor`` ranks: experts are whole
            also where ``tensor`` divides all else, and each rank of a tensor group sends its part
            of the rows. Beside ``pipeline`` the experts of each stage are divided.
        expert_tensor: Ranks that share the layers of each expert: 1, or ``"tensor"``, all that
            share those of the model. Experts are then divided over ``data x context`` ranks, and
            each of them as ``plan`` divides it.
        zero_stage: What is sharded over the data axis: 0 nothing (replicas), 1 the optimizer state,
            2 also the gradients, 3 also the parameters.
        offload_optimizer: As for ``ZeROStrategy``, like the arguments below.
        offload_parameters: Needs ``zero_stage=3``. Beside a pipeline shards are fetched once for
            each batch.
        offload_path: Folder for ``"nvme"``.
        offload_fraction: Share of the optimizer state that leaves the device.
        tile_linear_bytes: Needs ``zero_stage=3``, ``tensor=1`` and ``pipeline=1``.
        blocks: What is gathered as one.
        shard_size: Over how many ranks of the data axis to shard; groups of that size hold the same
            shards.
        microbatches: As for ``PipelineParallelStrategy``, like the arguments below.
        schedule: The order of microbatches.
        stages_per_rank: How many stages each rank runs.
        split: Where the model is cut.
        max_memory_bytes: What the stages of a rank may take.
        plan: As for ``TensorParallelStrategy``, like the arguments below.
        sequence_parallel: Divide the sequence between blocks, too.
        loss_parallel: Whether the loss is computed of divided logits.
        attention: As for ``ContextParallelStrategy``, like the arguments below.
        balance: How positions are dealt to ranks.
        max_gather_bytes: The largest tensor that may be gathered.
        dims: Which axis of a batch is the sequence.
        **kwargs: As for ``MeshStrategy``: ``timeout_s``, ``telemetry``, ``seed``,
            ``activation_checkpointing``, ``process_group_backend``, ``start_method`` and
            Lightning's own.

    Raises:
        ConfigError: When options contradict each other, do not exist, or are of an axis that is
            off.
        LayoutError: When the sizes hold no rank; when the Trainer is built, if they do not fit the
            job, with the nearest that do.

    Sources: those of ``ZeROStrategy``, ``PipelineParallelStrategy`` and
    ``TensorParallelStrategy``; their composition: Narayanan et al. 2021,
    https://arxiv.org/abs/2104.04473
    """

    strategy_name = "bolt_3d"

    def __init__(
        self,
        *,
        data: int | None = None,
        pipeline: int = 1,
        tensor: int = 1,
        context: int = 1,
        expert: int | Literal["node"] | None = None,
        expert_capacity: float | None = None,
        expert_bias: Literal["update"] | float | None = None,
        expert_tensor: int | Literal["tensor"] = 1,
        zero_stage: int = 1,
        offload_optimizer: Tier | None = None,
        offload_parameters: Tier | None = None,
        offload_path: str | Path | None = None,
        offload_fraction: float | Mapping[str, float] = 1.0,
        tile_linear_bytes: int | None = None,
        blocks: Sequence[str] | None = None,
        shard_size: int | Literal["node"] | None = None,
        microbatches: int | None = None,
        schedule: str = AUTOMATIC_SCHEDULE,
        stages_per_rank: int | None = None,
        split: Split = "auto",
        max_memory_bytes: int | None = None,
        plan: UserPlan = "auto",
        sequence_parallel: bool = False,
        loss_parallel: bool | Literal["auto"] = "auto",
        attention: Mechanism = "auto",
        balance: Balance = "contiguous",
        max_gather_bytes: int | None = None,
        dims: Mapping[str | int, int] | None = None,
        tile_tokens: int | None = None,
        **kwargs: Any,
    ) -> None:
        _check_sizes(data=data, pipeline=pipeline, tensor=tensor, context=context)
        _check_expert_tensor(expert_tensor, tensor=tensor, expert=expert)
        shards = {
            "offload_optimizer": offload_optimizer,
            "offload_parameters": offload_parameters,
            "offload_path": offload_path,
            "offload_fraction": offload_fraction,
            "tile_linear_bytes": tile_linear_bytes,
            "blocks": None if blocks is None else tuple(blocks),
            "shard_size": shard_size,
            "expert": expert,
            "expert_capacity": expert_capacity,
            "expert_bias": expert_bias,
        }
        stages: dict[str, Any] = {
            "microbatches": microbatches,
            "schedule": schedule,
            "stages_per_rank": stages_per_rank,
            "split": split,
            "max_memory_bytes": max_memory_bytes,
        }
        layers = {
            "plan": plan,
            "sequence_parallel": sequence_parallel,
            "loss_parallel": loss_parallel,
        }
        sequences: dict[str, Any] = {
            "attention": attention,
            "balance": balance,
            "max_gather_bytes": max_gather_bytes,
            "dims": dims,
            "tile_tokens": tile_tokens,
        }
        _refuse_idle(sequences, ContextOptions(), "context", context)
        _refuse_idle(stages, PipelineOptions(), "pipeline", pipeline)
        _refuse_idle(layers, TensorOptions(), "tensor", tensor)
        _refuse_across_axes(
            pipeline=pipeline,
            tensor=tensor,
            context=context,
            loss_parallel=loss_parallel,
            balance=balance,
            tile_tokens=tile_tokens,
        )
        self.pipeline_axis: PipelineAxis | None = None
        """None with ``pipeline=1``: steps are then run in one piece."""
        if pipeline > 1:
            options = PipelineOptions(**stages)
            _refuse_two_versions(options, shards)
            self.pipeline_axis = PipelineAxis(options, pipeline)
        if data == 1:
            _refuse_idle({"shard_size": shard_size}, ZeroOptions(), "data", data)
        self.options = TensorOptions(tensor, plan, sequence_parallel, loss_parallel)
        self.tensor_axis = TensorAxis(self.options, tensor)
        data_axis = _data_axis(
            zero_stage, shards, pipeline=pipeline, tensor=tensor, context=context
        )
        data_axis.wanted_size = data
        axes: list[Axis] = [data_axis, self.tensor_axis]
        if expert is not None:
            rate = ZeroOptions(expert_bias=expert_bias, expert=expert).expert_bias_rate
            on_rows = on_positions if context > 1 else None
            divides = expert_tensor != 1 and tensor > 1
            axes.append(ExpertAxis(expert, expert_capacity, rate, on_rows, divides_layers=divides))
        if context > 1:
            axes.append(ContextAxis(ContextOptions(context, **sequences), context))
        if self.pipeline_axis is not None:
            axes.append(self.pipeline_axis)
        super().__init__(axes=axes, **kwargs)

    @property
    def plan(self) -> TensorPlan | None:
        """The tensor plan that the model runs by; None before ``setup``."""
        return self.tensor_axis.plan

    @override
    def choose_layout(self, world_size: int) -> MeshLayout:
        per_host = min(self.num_processes or world_size, world_size)
        return fit_layout(world_size=world_size, ranks_per_host=per_host, **self.wanted_sizes)

    @override
    def setup(self, trainer: Trainer) -> None:
        super().setup(trainer)
        if self.is_fitting and isinstance(self.data_axis, PipelineZeroAxis):
            assert self.pipeline_axis is not None
            extra = self.data_axis.describe_traffic().extra()
            if extra is not None:
                count = self.pipeline_axis.options.num_microbatches(self.layout.pipeline)
                rank_zero_info(f"Parallel3DStrategy: {extra.sentence(count, rank='rank 0')}.")


def _check_expert_tensor(
    expert_tensor: int | str, *, tensor: int, expert: int | str | None
) -> None:
    if expert_tensor not in {1, tensor, "tensor"}:
        raise ConfigError(
            f"expert_tensor={expert_tensor!r} was asked for, and the layers of an expert are "
            f"whole or divided as all others, over tensor={tensor} ranks. Use 1 or 'tensor'."
        )
    if expert_tensor != 1 and expert is None:
        raise ConfigError(
            f"expert_tensor={expert_tensor!r} is about experts of an expert axis. Leave it "
            f"out: tensor={tensor} divides each expert, or set expert."
        )


def _refuse_across_axes(
    *,
    pipeline: int,
    tensor: int,
    context: int,
    loss_parallel: bool | str,
    balance: Balance,
    tile_tokens: int | None,
) -> None:
    """Refuse options that need whole what another axis divides."""
    if pipeline > 1 and loss_parallel is True:
        raise ConfigError(
            "loss_parallel=True keeps logits divided up to the loss, and a pipeline hands the "
            "whole output of its last layer to the rest of the step. Use loss_parallel='auto', "
            "or set pipeline=1."
        )
    for name, size in (("pipeline", pipeline), ("tensor", tensor)):
        if size > 1 and tile_tokens is not None:
            raise ConfigError(
                f"tile_tokens={tile_tokens} runs whole modules on some positions at a time, "
                f"and with {name}={size} ranks have parts of them or of the step. Leave "
                f"tile_tokens out, or set {name}=1."
            )
    if pipeline > 1 and balance == "documents":
        raise ConfigError(
            "balance='documents' gives ranks other positions in each batch, and stages of a "
            "pipeline expect tensors of one shape. Use balance='zigzag', or set pipeline=1."
        )
    if context > 1 and loss_parallel is True:
        raise ConfigError(
            f"loss_parallel=True keeps logits divided over the vocabulary, and with "
            f"context={context} each rank has some positions of all of it. Use "
            f"loss_parallel='auto', or set context=1."
        )


def _refuse_two_versions(options: PipelineOptions, shards: Mapping[str, Any]) -> None:
    """Refuse schedules that compute with two versions of the weights where there is one."""
    if not schedule_kind(options.first_schedule).is_asynchronous:
        return
    if any(shards[name] is not None for name in ("offload_optimizer", "offload_parameters")):
        raise ConfigError(
            f"schedule={options.schedule!r} computes with two versions of the weights, and offload "
            f"keeps one. Use schedule='1f1b', or leave offload_optimizer out."
        )
    if shards["expert"] is not None:
        raise ConfigError(
            f"schedule={options.schedule!r} computes with two versions of the weights, and with "
            f"expert={shards['expert']!r} each rank has rows of one. Use schedule='1f1b', or leave "
            f"expert out."
        )


def _data_axis(
    stage: int, shards: Mapping[str, Any], *, pipeline: int, tensor: int, context: int
) -> DataAxis:
    tile = shards["tile_linear_bytes"]
    if tile is not None and context > 1:
        raise ConfigError(
            f"tile_linear_bytes={tile} gathers a layer tile by tile, which is not done with "
            f"context={context}. Leave tile_linear_bytes out, or set context=1."
        )
    if stage not in {0, 1, 2, 3}:
        raise ConfigError(
            f"zero_stage={stage!r} is no ZeRO stage. Use 0 (replicas), 1 (optimizer state is "
            f"sharded), 2 (gradients too) or 3 (parameters too)."
        )
    if tile is not None and pipeline > 1:
        raise ConfigError(
            f"tile_linear_bytes={tile} gathers a layer tile by tile as it runs, and a stage of a "
            f"pipeline has all of its layers for the batches of a step. Leave tile_linear_bytes "
            f"out, or set pipeline=1."
        )
    if tile is not None and tensor > 1:
        raise ConfigError(
            f"tile_linear_bytes={tile} gathers a layer tile by tile, and with tensor={tensor} no "
            f"rank has a whole layer to cut into tiles. Leave tile_linear_bytes out, or set "
            f"tensor=1."
        )
    if shards["expert"] is not None and not stage:
        # Replicas are shards of one rank each: experts beside them are shards in any case.
        of_experts = ("expert", "expert_capacity", "expert_bias")
        others = {name: each for name, each in shards.items() if name not in of_experts}
        _refuse_shards(others)
        shards, stage = {**shards, "shard_size": 1}, 1
    if stage:
        options = ZeroOptions(stage=stage, key="zero_stage", **shards)
        return PipelineZeroAxis(options) if pipeline > 1 else ZeroAxis(options)
    _refuse_shards(shards)
    return PipelineDdpAxis() if pipeline > 1 else DdpAxis(DdpOptions())


def _refuse_shards(options: Mapping[str, Any]) -> None:
    for name, value in _changed(options, ZeroOptions()).items():
        raise ConfigError(
            f"{name}={value!r} is about shards, and with zero_stage=0 every rank of the data axis "
            f"has all of its part. Leave {name} out, or set zero_stage=1, 2 or 3."
        )


def _check_sizes(**sizes: int | None) -> None:
    for axis, size in sizes.items():
        is_number = isinstance(size, int) and not isinstance(size, bool)
        if size is not None and not is_number:
            raise ConfigError(f"{axis}={size!r} is no number of ranks. Use 1 or more.")
        if size is not None and size < 1:
            raise LayoutError(
                f"{axis}={size} holds no rank. Use 1, which switches the {axis} axis off, or more."
            )


def _refuse_idle(options: Mapping[str, Any], default: object, axis: str, size: int) -> None:
    """Refuse options of an axis that is off."""
    if size > 1:
        return
    for name, value in _changed(options, default).items():
        raise ConfigError(
            f"{name}={value!r} is about the {axis} axis, which {axis}=1 switches off. Leave {name} "
            f"out, or set {axis}=2 or more."
        )


def _changed(options: Mapping[str, Any], default: object) -> dict[str, Any]:
    return {name: each for name, each in options.items() if each != getattr(default, name)}
