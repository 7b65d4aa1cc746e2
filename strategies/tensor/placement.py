"""Divides a model: one plan for all ranks, the proof that it is right, and this rank's shards."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.utilities import move_data_to_device
from lightning.pytorch import LightningModule
from torch.nn import Module, Parameter

from boltmesh.errors import BoltMeshError, ConfigError
from boltmesh.strategies.blocks import find_blocks
from boltmesh.strategies.checkpoint.parts import Division
from boltmesh.strategies.tensor.analysis.analyse import Analysis, analyse
from boltmesh.strategies.tensor.backends import without_replicated
from boltmesh.strategies.tensor.building import make_shards, make_whole, tied_outside
from boltmesh.strategies.tensor.context import TensorContext
from boltmesh.strategies.tensor.division import divisions_of
from boltmesh.strategies.tensor.execution.apply import AppliedPlan, apply_plan
from boltmesh.strategies.tensor.execution.group import TensorGroup
from boltmesh.strategies.tensor.hugging_face import disagreements
from boltmesh.strategies.tensor.options import TensorOptions
from boltmesh.strategies.tensor.passing import Shapes, kinds_of, lasts_of
from boltmesh.strategies.tensor.plan import TensorPlan
from boltmesh.strategies.tensor.plan_json import from_json, to_json
from boltmesh.strategies.tensor.planning import make_plan
from boltmesh.strategies.tensor.proof import Stage, prove
from boltmesh.strategies.tensor.rehearsal import Rehearsal
from boltmesh.strategies.tensor.user_plan import with_user_plan

_PATIENCE = timedelta(seconds=120)
"""How long a proof waits for a rank whose code has raised where others' has not."""


@dataclass(frozen=True)
class Placement:
    """A model that runs by a plan."""

    module: LightningModule
    step: str
    """By which it was proven."""
    applied: AppliedPlan
    divisions: Mapping[str, Division]
    """Of this rank, by all names of divided parameters."""
    parts: tuple[Parameter, ...]
    """The parameters of which this rank has a part."""

    @property
    def plan(self) -> TensorPlan:
        """What is divided, and how it is run."""
        return self.applied.plan


def place(
    module: LightningModule,
    step: str,
    args: tuple[Any, ...],
    *,
    options: TensorOptions,
    context: TensorContext,
    group: TensorGroup,
) -> tuple[Placement, tuple[str, ...]]:
    """Divide a model. Collective over all ranks of the job.

    Args:
        module: The whole model, deferred or not, on the CPU.
        step: The method that the run begins with.
        args: What it is called with, on the CPU: a batch first, alike on all ranks.
        options: What the user asked for.
        context: Where the axis finds itself.
        group: What the plan runs on.

    Returns:
        How the model is divided, and what the proof has changed about the plan, and why, in words.

    Raises:
        ConfigError: When the step cannot be run, or what was asked for is not possible.
    """
    blocks = find_blocks(module)
    on_host = Rehearsal(module, step, args, torch.device("cpu"))
    shapes = Shapes()
    with shapes.watching(blocks):
        plan, made_elements = _planned(on_host, blocks, options, context, group.size)
    passed = _passed(module, plan, blocks, shapes)
    make_whole(module, blocks, passed, context.judges)
    batch, *rest = args
    on_device = replace(
        on_host,
        args=(move_data_to_device(batch, context.device), *rest),
        device=context.device,
        probes={
            each: blocks[each]
            for first, last in lasts_of(plan.kinds).items()
            for each in dict.fromkeys([first, last])
        },
    )
    known = len(plan.notes)
    plan = prove(
        plan,
        Stage(
            on_device,
            blocks,
            passed,
            made_elements * torch.float32.itemsize,
            context.judges,
            lambda: _group_for_a_proof(context),
        ),
    )
    make_shards(
        module,
        blocks,
        passed,
        without_replicated(plan).sharded.values(),
        group=context.judges,
        size=group.size,
        rank=group.rank,
    )
    applied = apply_plan(module, plan, group)
    divisions = divisions_of(applied.plan, group.rank)
    placed = Placement(module, step, applied, divisions, tuple(applied.sharded))
    return placed, plan.notes[known:]


def _planned(
    rehearsal: Rehearsal,
    blocks: Mapping[str, Module],
    options: TensorOptions,
    context: TensorContext,
    size: int,
) -> tuple[TensorPlan, int]:
    """Return the plan of the first rank, and how many elements its step makes.

    Collective over all ranks of the job.
    """
    told: list[tuple[str, str, int]] = [("", "", 0)]
    failure: Exception | None = None
    # Every rank looks, for what it sees of its blocks; the first one's plan is taken.
    try:
        analysis = analyse(rehearsal.module, rehearsal.forward, blocks=blocks)
        text = to_json(_made(analysis, rehearsal.module, options, size))
        told = [("plan", text, analysis.trace.made_elements)]
    except Exception as error:  # noqa: BLE001 - whatever the user's step raises
        failure = error
        text = (
            str(error) if isinstance(error, BoltMeshError) else f"{type(error).__name__}: {error}"
        )
        told = [("error", text, 0)]
    dist.broadcast_object_list(told, group=context.judges, group_src=0)
    kind, text, made_elements = told[0]
    if kind == "error":
        if isinstance(failure, BoltMeshError):
            raise failure
        raise ConfigError(
            f"{type(rehearsal.module).__name__}.{rehearsal.step} could not be run on tensors "
            f"without data, to find out how the model can be divided: {text}"
        ) from failure
    plan = from_json(text)
    return replace(plan, kinds=kinds_of(blocks, plan)), made_elements


def _made(
    analysis: Analysis, module: LightningModule, options: TensorOptions, size: int
) -> TensorPlan:
    plan = make_plan(
        analysis,
        size,
        loss_parallel=options.loss_parallel,
        sequence_parallel=options.sequence_parallel,
    )
    if options.plan != "auto":
        plan = with_user_plan(plan, analysis, options.plan)
    return replace(plan, notes=(*plan.notes, *disagreements(plan, module)))


def _passed(
    module: LightningModule, plan: TensorPlan, blocks: Mapping[str, Module], shapes: Shapes
) -> dict[str, str]:
    """Return which blocks the proof passes by, and the first of the kind of each."""
    tied = tied_outside(module, blocks)
    return {
        name: first
        for name, first in plan.kinds.items()
        if name != first
        and name not in tied
        and first not in tied
        and shapes.allow(name, first)
        and any(True for _ in blocks[name].children())  # what a norm gets differs by its place
    }


def _group_for_a_proof(context: TensorContext) -> TensorGroup:
    group = context.new_group(timeout=min(context.timeout, _PATIENCE))
    assert group is not None
    return TensorGroup(group, context.device)
