"""Puts a config's model on a mesh without its memory, and counts what a rank would hold and move.

The model is built from fake tensors and divided as a run divides it: layers over the tensor axis,
what is left into stages, what a stage has over the data axis. Traffic is counted by what tells a
run what to expect, on ranks that were never started.
"""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from lightning.pytorch import LightningModule
from omegaconf import DictConfig
from torch.optim import Optimizer
from torchmetrics import Metric

from boltmesh.errors import ConfigError
from boltmesh.planning.dry_model import build_fake, faked, first_batch, own_optimizer
from boltmesh.planning.dry_step import STEP, DryStep
from boltmesh.planning.mesh_rank import MeshJob, RankForecast, forecast_whole
from boltmesh.planning.mesh_stages import forecast_stages
from boltmesh.planning.optimizer_state import optimizer_copies
from boltmesh.planning.stage_model import (
    PipelineModel,
    class_of,
    converted,
    cut_model,
    pipeline_model,
)
from boltmesh.planning.stand_ins import put_stand_ins, reshape_stand_in
from boltmesh.planning.tensor_model import TensorSummary, find_division, summarise
from boltmesh.quiet import quiet_lightning
from boltmesh.strategies import lightning_compat as compat
from boltmesh.strategies.pipeline.microbatches import Cutter
from boltmesh.strategies.pipeline.replay.units import find_stage_units
from boltmesh.strategies.steps.quiet import log_replaced
from boltmesh.strategies.tensor.execution.apply import apply_plan
from boltmesh.strategies.torch_compat import fake_tensors, tree_map


@dataclass(frozen=True)
class MeshModel:
    """A model on a mesh before anything runs."""

    name: str
    numel: int
    """Elements of all parameters."""
    pipeline: PipelineModel | None
    """None without a pipeline."""
    tensor: TensorSummary | None
    """None where no ranks share layers."""
    ranks: tuple[RankForecast, ...]
    """By place on the pipeline; those beside each other have as much, or less."""
    state_copies: int
    notes: tuple[str, ...]


def describe_mesh(config: DictConfig, job: MeshJob, *, source: str) -> MeshModel:
    """Divide a config's model as its strategy will.

    Raises:
        ConfigError: When the model cannot be built or divided, or its data give no batch.
    """
    quiet_lightning()
    batch, complaint = first_batch(config, source)
    if complaint is not None:
        raise ConfigError(f"{source}: a mesh is planned by running a batch, and {complaint}.")
    types = job.types
    parts, rows = [batch], [0]
    if job.layout.pipeline > 1:
        parts, rows = Cutter().cut(batch, job.stages.num_microbatches(job.layout.pipeline))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a module without a Trainer
        with fake_tensors() as mode:
            module, notes = build_fake(config, types, source)
            optimizer = own_optimizer(module)
            part = tree_map(faked(mode, types.stored), parts[0])
            num_logged = _count_logged(module, part, types.cast)
        put_stand_ins(module)
        numel = sum(each.numel() for each in module.parameters())
        copies, assumed = optimizer_copies(config, *class_of(optimizer))
        notes += assumed
        job = replace(
            job,
            state_copies=copies,
            num_logged=num_logged,
            args=(converted(batch, types.stored), *compat.step_arguments(module, STEP)),
            parts=tuple(converted(each, types.stored) for each in parts),
        )
        tensor = _divide_layers(module, job, source)
        pipeline = None
        if job.layout.pipeline == 1:
            ranks, told = forecast_whole(module, job)
        else:
            pipeline, ranks, told = _cut_into_stages(config, module, job, rows, optimizer)
        notes += told
    return MeshModel(
        name=type(module).__name__,
        numel=numel,
        pipeline=pipeline,
        tensor=tensor,
        ranks=tuple(ranks),
        state_copies=copies,
        notes=tuple(notes),
    )


def _divide_layers(module: LightningModule, job: MeshJob, source: str) -> TensorSummary | None:
    """Leave the first rank's part of each layer, and let layers run on it."""
    size = job.layout.tensor
    if size == 1:
        return None
    plan = find_division(module, job.args[0], size, job.layers, source=source)
    summary = summarise(module, plan, job.types.stored.itemsize, ())
    for each in plan.sharded.values():
        reshape_stand_in(module.get_parameter(each.name), each.local_shape(size))
    applied = apply_plan(module, plan, job.group)
    if job.layout.pipeline > 1:
        applied.cut_into_stages(find_stage_units(module))
    return summary


def _cut_into_stages(
    config: DictConfig,
    module: LightningModule,
    job: MeshJob,
    rows: Sequence[int],
    optimizer: Optimizer | None,
) -> tuple[PipelineModel, list[RankForecast], list[str]]:
    """Return the stages of what is left of a model, their ranks, and what was not found out."""
    args = (job.parts[0], *job.args[1:])
    num_ranks, num_parts, cast = job.layout.pipeline, len(job.parts), job.types.cast
    cut = cut_model(config, module, job.stages, num_ranks, num_parts, args, cast=cast)
    kept_bytes = cut.division.kept_bytes
    pipeline = pipeline_model(
        module, cut, rows, kept_bytes=kept_bytes, optimizer=optimizer, notes=()
    )
    notes = []
    if kept_bytes is None:
        notes.append("activations are not known, and no part of a peak")
    if job.stages.split == "measured":
        notes.append("split=measured: a run times the layers; here they are counted")
    return pipeline, forecast_stages(module, job, cut), notes


def _count_logged(module: LightningModule, part: Any, cast: torch.dtype | None) -> int:
    """Return how many numbers a step logs, which the last stage of a pipeline tells the others."""
    names: set[tuple[str, str | None]] = set()

    def note(name: str, value: Any, *_: Any, **__: Any) -> None:
        if isinstance(value, Mapping):
            names.update((name, str(key)) for key in value)
        elif not isinstance(value, Metric):
            names.add((name, None))

    with log_replaced(module, note):
        DryStep().run(module, part, cast)
    return len(names)
