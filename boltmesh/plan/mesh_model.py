"""Puts a config's model on a mesh without its memory; counts memory and traffic of a rank.

The model is built from fake tensors and divided as a run divides it: layers over the tensor axis,
what is left into stages, what a stage has over the data axis. Traffic is counted by the code that
computes the expectation of a run, on ranks that were never started.
"""

import warnings
from collections.abc import Collection, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from lightning.pytorch import LightningModule
from omegaconf import DictConfig, OmegaConf
from torch.optim import Optimizer
from torchmetrics import Metric

from boltmesh.errors import ConfigError
from boltmesh.launch.log_filters import quiet_lightning
from boltmesh.plan.context_plan import find_sequence
from boltmesh.plan.dry_model import (
    NumberTypes,
    build_fake,
    faked,
    first_batch,
    is_keeping,
    kept,
    own_optimizer,
)
from boltmesh.plan.dry_step import (
    STEP,
    DryStep,
    copied,
    put_stand_ins,
    reshape_stand_in,
)
from boltmesh.plan.equal_blocks import continued, equal_blocks
from boltmesh.plan.expert_plan import experts_over
from boltmesh.plan.mesh_rank import ExpertExchange, MeshJob, RankForecast, RankWork, work_of_whole
from boltmesh.plan.mesh_stage import StageWork, kept_by_units, work_of_stages
from boltmesh.plan.stage_model import (
    CutModel,
    PipelineModel,
    converted,
    cut_model,
    pipeline_model,
)
from boltmesh.plan.strategy_options import class_of, optimizer_copies
from boltmesh.plan.tensor_plan import TensorSummary, find_division, summarise
from boltmesh.strategies.dry_run.step import DryRun
from boltmesh.strategies.lightning_compat.loops import step_arguments
from boltmesh.strategies.patch import patched
from boltmesh.strategies.pipeline.microbatch import MicrobatchSplitter
from boltmesh.strategies.pipeline.stage.units import find_stage_units
from boltmesh.strategies.tensor.runtime.apply import apply_plan
from boltmesh.strategies.torch_compat.tensors import fake_tensors, tree_map

_CPU = torch.device("cpu")


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
    """By place on the pipeline; the ranks at one place have as much, or less."""
    state_copies: int
    notes: tuple[str, ...]


def describe_mesh(
    config: DictConfig, job: MeshJob, *, source: str, is_brief: bool = False
) -> MeshModel:
    """Divide a config's model as its strategy will.

    Args:
        config: The whole.
        job: The requested mesh.
        source: The config's file, for errors.
        is_brief: The figures of the ranks are wanted alone. If a model has many equal blocks (see
            ``equal_blocks``), each stage gets one and then two in place of its own, and the figures
            are continued as a line; blocks that fill no round go to the first stages.

    Raises:
        ConfigError: When the model cannot be built or divided, or its data give no batch.
    """
    if not is_brief:
        return _forecast(config, job, source, None)[0]
    least = 2 if job.layout.pipeline == 1 else 1  # one block alone would be no repeated one
    fewer, times = _forecast(config, job, source, least)
    if times is None:
        return fewer
    more, _ = _forecast(config, job, source, least + 1)
    return _extended(fewer, more, times)


def _extended(fewer: MeshModel, more: MeshModel, times: int) -> MeshModel:
    """Return the model with ``times`` blocks more for each stage than the first one has."""
    pipeline = None
    if fewer.pipeline is not None and more.pipeline is not None:
        stages = zip(fewer.pipeline.stages, more.pipeline.stages, strict=True)
        pipeline = replace(
            more.pipeline,
            stages=tuple(
                continued(replace(one, units=two.units), two, times) for one, two in stages
            ),
            ranks=continued(fewer.pipeline.ranks, more.pipeline.ranks, times),
        )
    ranks = []
    for one, two in zip(fewer.ranks, more.ranks, strict=True):
        like = replace(one.memory, peak_moment=two.memory.peak_moment)
        made = continued(replace(one, memory=like), two, times)
        ranks.append(replace(made, memory=made.memory.at_fullest_moment()))
    return replace(
        more,
        numel=continued(fewer.numel, more.numel, times),
        pipeline=pipeline,
        tensor=None,
        ranks=tuple(ranks),
    )


@dataclass(frozen=True)
class _Divided:
    """A model that is divided over all axes but the data axis."""

    name: str
    numel: int
    pipeline: PipelineModel | None
    tensor: TensorSummary | None
    job: MeshJob
    """The job, with the facts of its model and its data."""
    places: Sequence[RankWork | StageWork]
    times: int | None
    """Blocks that each stage has in addition; None if it has all."""
    notes: tuple[str, ...]


def _forecast(
    config: DictConfig, job: MeshJob, source: str, per_stage: int | None
) -> tuple[MeshModel, int | None]:
    """Divide a model, with all of its blocks or with ``per_stage`` for each stage.

    Returns:
        The model, and how many blocks more each stage has; None where it has all.
    """
    # One division serves all ways in which the data axis shares it.
    layout = {axis: size for axis, size in job.layout.sizes.items() if axis != "data"}
    asked = (
        layout, job.stages, job.sequences, job.layers, job.expert, job.recompute, job.offload,
        job.tile_logits,
    )  # fmt: skip
    seen = (job.num_batches, job.num_norms, job.has_scaler, per_stage)
    of_config = (OmegaConf.to_yaml(each, resolve=True) for each in (config.model, config.data))
    key = ("divided", *of_config, job.types, repr(asked), seen)
    made = kept(key, lambda: _divide(config, job, source, per_stage))
    job = replace(
        made.job, layout=job.layout, shards=job.shards, shard_size=job.shard_size, group=job.group
    )
    return MeshModel(
        name=made.name,
        numel=made.numel,
        pipeline=made.pipeline,
        tensor=made.tensor,
        ranks=tuple(each.forecast(job) for each in made.places),
        state_copies=job.state_copies,
        notes=made.notes,
    ), made.times


def _divide(config: DictConfig, job: MeshJob, source: str, per_stage: int | None) -> _Divided:
    quiet_lightning()
    batch, complaint = first_batch(config, source)
    if complaint is not None:
        raise ConfigError(f"{source}: a mesh is planned by running a batch, and {complaint}.")
    types = job.types
    parts, rows = [batch], [0]
    if job.layout.pipeline > 1:
        parts, rows = MicrobatchSplitter().cut(
            batch, job.stages.num_microbatches(job.layout.pipeline)
        )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a module without a Trainer
        key = "model", OmegaConf.to_yaml(config.model, resolve=True), types
        made = kept(key, lambda: _build(config, types, parts[0], source))
        module, optimizer, notes = made.module, made.optimizer, [*made.notes]
        times = None
        with ExitStack() as fewer:
            if per_stage is not None:
                context, job, times = _with_fewer_blocks(module, job, per_stage)
                fewer.enter_context(context)
            if is_keeping() or times is not None:
                module = copied(module)
        numel = sum(each.numel() for each in module.parameters())
        copies, assumed = optimizer_copies(config, *class_of(optimizer))
        notes += assumed
        job = replace(
            job,
            state_copies=copies,
            num_logged=made.num_logged,
            args=(converted(batch, types.stored), *step_arguments(module, STEP)),
            parts=tuple(converted(each, types.stored) for each in parts),
        )
        if job.expert > 1:
            job = replace(job, exchanges=_exchanges(config, module, job.expert, source))
        if job.sequences is not None:
            step = DryRun(module, STEP, job.args, _CPU)
            sequence = find_sequence(step, job.sequences, source=source)
            if job.tile_logits is None and job.sequences.tile_tokens is None:
                sequence = replace(sequence, tokenwise={})  # which takes time, and changes nothing
            job = replace(job, sequence=sequence)
        # Recomputation and shards do not change how layers are divided.
        of = [OmegaConf.to_yaml(each, resolve=True) for each in (config.model, config.data)]
        asked = job.layout.tensor, job.expert, repr(job.layers), types
        plan_key = "plan of layers", *of, *asked, len(list(module.modules()))
        tensor = _divide_layers(module, job, source, plan_key)
        pipeline = None
        places: Sequence[RankWork | StageWork]
        if job.layout.pipeline == 1:
            places, found = work_of_whole(module, job)
        else:
            pipeline, places, found = _cut_into_stages(
                config, module, job, rows, made, source, has_equal_blocks=times is not None
            )
        notes += found
    return _Divided(
        name=type(module).__name__,
        numel=numel,
        pipeline=pipeline,
        tensor=tensor,
        job=job,
        places=places,
        times=times,
        notes=tuple(notes),
    )


def _exchanges(
    config: DictConfig, module: LightningModule, size: int, source: str
) -> dict[str, ExpertExchange]:
    """Return the experts of a module that ranks divide.

    Raises:
        ConfigError: When there are none, or they cannot be divided by so many.
    """
    present = {name for name, _ in module.named_parameters()}
    return {
        each.name: ExpertExchange(each.parameters, shape)
        for each, shape in experts_over(config, size, source=source)
        if present.issuperset(each.parameters)
    }


@dataclass(frozen=True)
class _BuiltModel:
    """A config's model of stand-ins, its optimizer and the number of values that it logs."""

    module: LightningModule
    optimizer: Optimizer | None
    notes: list[str]
    num_logged: int
    chosen_widths: frozenset[int]
    """Among how many its step chooses, as a router does."""


def _build(config: DictConfig, types: NumberTypes, part: Any, source: str) -> _BuiltModel:
    with fake_tensors() as mode:
        module, notes = build_fake(config, types, source)
        optimizer = own_optimizer(module)
        given = tree_map(faked(mode, types.stored), part)
        num_logged, widths = _logged_and_chosen(module, given, types.cast)
    put_stand_ins(module)
    return _BuiltModel(module, optimizer, notes, num_logged, widths)


def _with_fewer_blocks(
    module: LightningModule, job: MeshJob, per_stage: int
) -> tuple[AbstractContextManager[None], MeshJob, int | None]:
    """Leave a module ``per_stage`` blocks for each stage, with equal boundaries between stages.

    Returns:
        Within what it has so few; the job of these; how many more each stage has, None where
        no blocks can be left out.
    """
    found = equal_blocks(module)
    size = job.layout.pipeline
    stages = 1 if size == 1 else job.stages.num_stages(size)
    if found is None or job.stages.split != "auto":
        return nullcontext(), job, None
    whole, rest = divmod(found.count, stages)
    if whole <= per_stage + 1:
        return nullcontext(), job, None
    boundaries, first = [], 0
    for stage in range(stages - 1):
        first += per_stage + (stage < rest)
        boundaries.append(f"{found.name}.{first}")
    if boundaries:
        job = replace(job, stages=replace(job.stages, split=boundaries))
    return found.first(per_stage * stages + rest), job, whole - per_stage


def _divide_layers(
    module: LightningModule, job: MeshJob, source: str, key: Hashable
) -> TensorSummary | None:
    """Leave the first rank's part of each layer, and let layers run on it.

    The plan of the layers is made once for a key.
    """
    size = job.layout.tensor
    if size == 1:
        return None
    whole = {name: "whole" for each in job.exchanges.values() for name in each.parameters}
    layers = dict(job.layers)
    if whole:  # ranks of a tensor group deal the rows of experts, which are whole
        own = layers["plan"]
        layers["plan"] = {**({} if own == "auto" else own), **whole}
    plan = kept(key, lambda: find_division(module, job.args[0], size, layers, source=source))
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
    made: _BuiltModel,
    source: str,
    *,
    has_equal_blocks: bool,
) -> tuple[PipelineModel, list[StageWork], list[str]]:
    """Return the stages of the remaining model, their ranks, and notes on unknown values."""
    args = (job.parts[0], *job.args[1:])
    num_ranks, num_parts, cast = job.layout.pipeline, len(job.parts), job.types.cast
    kept_by = kept_by_units(module, job)
    cut = cut_model(config, module, job.stages, num_ranks, num_parts, args, cast=cast)
    if num_parts > 1:
        _refuse_router_losses(cut, args, rows[0], made.chosen_widths, source)
    kept_bytes = cut.division.kept_bytes
    pipeline = pipeline_model(module, cut, rows, kept_bytes)
    notes = []
    if kept_bytes is None:
        notes.append("activations are not known, and no part of a peak")
    if job.stages.split == "measured":
        notes.append("split=measured: a run times the layers; here they are counted")
    work = work_of_stages(module, job, cut, kept_by, has_equal_blocks=has_equal_blocks)
    return pipeline, work, notes


def _refuse_router_losses(
    cut: CutModel, args: tuple[Any, ...], rows: int, widths: Collection[int], source: str
) -> None:
    """Refuse microbatches of a mixture whose loss takes what its routers gave for all tokens.

    A run compares the losses of a batch and of its microbatches; a balancing loss is no mean over
    rows.

    Raises:
        ConfigError: If the end of the step takes router logits beside its results.
    """
    if not widths:
        return
    taken = cut.plans.tail(STEP, *args, seed=0).end.plan.values_in
    logits = [
        each
        for each in taken
        if len(each.shape) == 2 and each.shape[0] != rows and each.shape[1] in widths
    ]
    if logits and len(logits) < len(taken):
        first = logits[0]
        raise ConfigError(
            f"{source}: strategy: {first.origin}, of shape {list(first.shape)}, goes into the "
            f"loss, and a loss over routers is no mean over rows. Set strategy.microbatches=1, or "
            f"leave that loss out."
        )


def _logged_and_chosen(
    module: LightningModule, part: Any, cast: torch.dtype | None
) -> tuple[int, frozenset[int]]:
    """Return how many numbers a step logs, and among how many it chooses.

    The last stage of a pipeline sends the numbers to the others.
    """
    names: set[tuple[str, str | None]] = set()

    def note(name: str, value: Any, *_: Any, **__: Any) -> None:
        if isinstance(value, Mapping):
            names.update((name, str(key)) for key in value)
        elif not isinstance(value, Metric):
            names.add((name, None))

    step = DryStep()
    with patched(module, log=note):
        step.run(module, part, cast)
    return len(names), step.counts.chosen_widths
