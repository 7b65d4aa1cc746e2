"""Describes the stages of a config's pipeline without the model's memory.

The model is built from fake tensors, and one microbatch of the data shows what each layer keeps.
Then it is cut as a run cuts it: by the same code, from a look at the same step. Parameters are
then single numbers that have the shape of the whole.
"""

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch import LightningModule
from omegaconf import DictConfig, OmegaConf
from torch import Tensor
from torch.nn import Module, Parameter
from torch.optim import Optimizer

from boltmesh.errors import ConfigError
from boltmesh.launch.log_filters import quiet_lightning
from boltmesh.plan.dry_model import NumberTypes, build_fake, faked, first_batch, own_optimizer
from boltmesh.plan.dry_step import STEP, DryStep, computing_in, put_stand_ins
from boltmesh.plan.equal_blocks import equal_blocks
from boltmesh.strategies.activation_checkpointing import ActivationCheckpointing
from boltmesh.strategies.lightning_compat.loops import step_arguments
from boltmesh.strategies.pipeline.microbatch import MicrobatchSplitter
from boltmesh.strategies.pipeline.options import PipelineOptions
from boltmesh.strategies.pipeline.partition.choose import MemoryBudget
from boltmesh.strategies.pipeline.partition.materialize import DeferredModel
from boltmesh.strategies.pipeline.partition.placement import StageAssignment, divide
from boltmesh.strategies.pipeline.schedules.actions import RankPrograms
from boltmesh.strategies.pipeline.schedules.registry import ScheduleTable, schedule_table
from boltmesh.strategies.pipeline.stage.plan_cache import StagePlans
from boltmesh.strategies.pipeline.stage.units import find_stage_units
from boltmesh.strategies.torch_compat.tensors import fake_tensors, tree_map


@dataclass(frozen=True)
class StageModel:
    """One stage before anything runs."""

    units: tuple[str, ...]
    """Units in the order of their calls."""
    parameters: int
    """Elements of its units, those that they share with other stages as well."""
    cost: float
    """Cost of a microbatch, forward and backward; only its ratio to other stages counts."""
    activation_bytes: int | None
    """Bytes that one microbatch keeps for its backward pass; None if they are not known."""


@dataclass(frozen=True)
class RankModel:
    """Parameters of one rank of the pipeline."""

    parameter_bytes: int
    trained_bytes: int
    """Bytes of the parameters among them that get gradients and optimizer state."""


@dataclass(frozen=True)
class CutModel:
    """A model that was cut: the cut, and the results of running its parts."""

    division: StageAssignment
    plans: StagePlans
    table: ScheduleTable


@dataclass(frozen=True)
class PipelineModel:
    """A model as a pipeline has it."""

    name: str
    table: ScheduleTable
    rows: tuple[int, ...]
    """Rows of each microbatch."""
    stages: tuple[StageModel, ...]
    ranks: tuple[RankModel, ...]


def describe_stages(
    config: DictConfig, options: PipelineOptions, num_ranks: int, *, source: str
) -> tuple[PipelineModel, Optimizer | None, tuple[str, ...]]:
    """Cut a config's model as its pipeline will.

    Returns:
        The model; its own optimizer, None where it makes it beside a Trainer only; and what was
        assumed or not found out.

    Raises:
        ConfigError: When the model cannot be built or cut, or its data give no batch.
    """
    quiet_lightning()
    types = NumberTypes.of(config.trainer.precision)
    batch, complaint = first_batch(config, source)
    if complaint is not None:
        raise ConfigError(f"{source}: stages are found by running a batch, and {complaint}.")
    parts, rows = MicrobatchSplitter().cut(batch, options.num_microbatches(num_ranks))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a module without a Trainer
        with fake_tensors() as mode:
            module, notes = build_fake(config, types, source)
            measured = DryStep(equal=equal_blocks(module))
            made = own_optimizer(module)
            with measured.attributing(find_stage_units(module)):
                part = tree_map(faked(mode, types.stored), parts[0])
                complaint = measured.run(module, part, types.cast)
        put_stand_ins(module)
        args = (converted(parts[0], types.stored), *step_arguments(module, STEP))
        cut = cut_model(config, module, options, num_ranks, len(parts), args, cast=types.cast)
    if options.split == "measured":
        notes.append("split=measured: a run times the layers; here they are counted, as by auto.")
    if complaint is not None:
        notes.append(f"activations are not known: {complaint}")
    stages = cut.division.stages
    kept = [sum(measured.counts.saved_by.get(unit.name, 0) for unit in each) for each in stages]
    model = pipeline_model(module, cut, rows, kept if complaint is None else None)
    return model, made, tuple(notes)


def cut_model(
    config: DictConfig,
    module: LightningModule,
    options: PipelineOptions,
    num_ranks: int,
    num_microbatches: int,
    args: tuple[Any, ...],
    *,
    cast: torch.dtype | None,
) -> CutModel:
    """Cut a model of stand-ins as a run cuts it. Its blocks then run again in backward passes.

    Args:
        config: Which blocks do.
        module: The whole model, or of each layer the part that a rank of a tensor group has.
        options: Options of the pipeline.
        num_ranks: Ranks of the pipeline.
        num_microbatches: Parts of a batch.
        args: Arguments of a step, with a microbatch in place of its batch.
        cast: Dtype of autocast.

    Raises:
        ConfigError: When the model cannot be cut so, or there is no such schedule.
    """
    table = schedule_table(
        options.first_schedule,
        num_ranks=num_ranks,
        num_microbatches=num_microbatches,
        stages_per_rank=options.stages_per_rank,
    )
    with computing_in(cast):
        division, plans = divide(
            module,
            STEP,
            args,
            rank_of_stage=table.rank_of_stage,
            split="auto" if options.split == "measured" else options.split,
            seed=0,
            device=torch.device("cpu"),
            budget=_budget_of(options, num_ranks, num_microbatches),
            unmade=DeferredModel(module),
            recomputed=_recomputed_blocks(config, module),
        )
    return CutModel(division, plans, table)


def pipeline_model(
    module: LightningModule,
    cut: CutModel,
    rows: Sequence[int],
    kept_bytes: Sequence[int] | None,
) -> PipelineModel:
    """Return what is known of a model that was cut.

    Args:
        module: The whole model, or of each layer the part that a rank of a tensor group has.
        cut: How it is cut.
        rows: Rows of each microbatch.
        kept_bytes: By stage, what a microbatch keeps for its backward pass; None: not known.
    """
    division, table = cut.division, cut.table
    return PipelineModel(
        name=type(module).__name__,
        table=table,
        rows=tuple(rows),
        stages=tuple(
            StageModel(
                units=tuple(unit.name for unit in members),
                parameters=sum(_numel(module, unit.name) for unit in members),
                cost=sum(unit.seconds for unit in members),
                activation_bytes=None if kept_bytes is None else kept_bytes[stage],
            )
            for stage, members in enumerate(division.stages)
        ),
        ranks=tuple(
            _rank(
                [
                    parameter
                    for name, parameter in module.named_parameters()
                    if rank in division.ranks_of_parameter[name]
                ]
            )
            for rank in range(table.num_ranks)
        ),
    )


def _budget_of(options: PipelineOptions, num_ranks: int, num_microbatches: int) -> MemoryBudget:
    """Return the memory of ranks by the config alone: the devices may be elsewhere."""
    limit = options.max_memory_bytes
    return MemoryBudget(
        math.inf if limit is None else limit,
        limit is not None,
        RankPrograms(options, num_ranks, 0).live(num_microbatches),
    )


def _recomputed_blocks(config: DictConfig, module: LightningModule) -> frozenset[Module]:
    """Let blocks run again in backward passes, as the config says; return those that will."""
    recomputation = ActivationCheckpointing(
        OmegaConf.select(config, "strategy.activation_checkpointing")
    )
    recomputation.put_on(module)  # this model is not run again
    return recomputation.blocks


def _rank(held: Sequence[Parameter]) -> RankModel:
    return RankModel(
        parameter_bytes=sum(each.nbytes for each in held),
        trained_bytes=sum(each.nbytes for each in held if each.requires_grad),
    )


def _numel(module: LightningModule, unit: str) -> int:
    return sum(each.numel() for each in module.get_submodule(unit).parameters())


def converted(batch: Any, dtype: torch.dtype) -> Any:
    """Convert floats as a precision plugin does."""

    def convert(each: Any) -> Any:
        is_float = isinstance(each, Tensor) and each.is_floating_point()
        return each.to(dtype) if is_float else each

    return tree_map(convert, batch)
