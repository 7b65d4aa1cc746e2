"""Divides a model: makes one plan for all ranks, verifies it, and cuts this rank's shards.

``TensorContext`` holds the groups of the run. ``place`` makes the plan on the first rank, verifies
it on all ranks and cuts shards.

A model whose parameters are deferred may be larger than any rank's memory. The first block of each
kind and everything outside of blocks is made for the proof, the other blocks are made one at a
time, when their shards are cut.

``PartialActivationHooks`` warns of hooks that get only this rank's part of an activation.
"""

import warnings
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from typing import Any

import torch
from lightning.fabric.utilities import move_data_to_device
from lightning.pytorch import LightningModule
from torch.amp import GradScaler
from torch.distributed import ProcessGroup
from torch.nn import Module, Parameter

from boltmesh.errors import BoltMeshError, ConfigError
from boltmesh.strategies.blocks import failing_module, find_blocks
from boltmesh.strategies.checkpoint.chunks import DimDivision
from boltmesh.strategies.deferred_initialization.materialize import own_modules, prepare_modules
from boltmesh.strategies.dry_run.step import DryRun
from boltmesh.strategies.object_collectives import broadcast_from_rank0
from boltmesh.strategies.tensor.analysis.analyse import Analysis, analyse
from boltmesh.strategies.tensor.expected_traffic import OperatorTraffic
from boltmesh.strategies.tensor.hugging_face import disagreements
from boltmesh.strategies.tensor.options import TensorOptions
from boltmesh.strategies.tensor.plan import (
    ShardedParameter,
    TensorPlan,
    block_of,
    from_json,
    region_blocks,
    to_json,
    without_replicated,
)
from boltmesh.strategies.tensor.planning import make_plan, with_user_plan
from boltmesh.strategies.tensor.runtime.apply import AppliedPlan, apply_plan
from boltmesh.strategies.tensor.runtime.collectives import TensorGroup
from boltmesh.strategies.tensor.runtime.param_swap import shard_parameters
from boltmesh.strategies.tensor.runtime.signatures import SignatureRecorder
from boltmesh.strategies.tensor.skip_blocks import BlockShapes, kinds_of, lasts_of
from boltmesh.strategies.tensor.verify import ProofInputs, StepPrecision, divisions_of, prove
from boltmesh.strategies.torch_compat.modules import hooks_of


@dataclass(frozen=True)
class TensorContext:
    """Groups and devices of the tensor axis in a run."""

    group: ProcessGroup
    """The ranks that share each layer, this one included."""
    world_cpu_group: ProcessGroup
    """CPU group of all ranks of the job: their models are equal, and they agree on one plan."""
    new_group: Callable[..., ProcessGroup | None]
    """Creates further groups of these ranks, see ``RankMeshStrategy.new_group``."""
    device: torch.device
    timeout: timedelta
    precision: StepPrecision
    """Precision of the run's first step."""
    scaler: GradScaler | None = None
    analyses: bool = True
    """Whether this rank analyses a step: the first rank does, and those with which a step may
    gather values, as by ``self.all_gather``."""
    verifies: bool = True
    """Whether this rank verifies the plan: those of the first pipeline stage do, as all ranks have
    the whole model then."""


_CPU = torch.device("cpu")


def _make_whole(
    root: Module, blocks: Mapping[str, Module], left_out: Collection[str], group: ProcessGroup
) -> None:
    """Materialize all but some blocks, with the first rank's values. Collective."""
    later = {part for name in left_out for part in blocks[name].modules()}
    modules = {each: path for each, path in own_modules([root], "").items() if each not in later}
    prepare_modules(modules, device=_CPU, group=group)


def _make_shards(
    root: Module,
    blocks: Mapping[str, Module],
    left_out: Collection[str],
    entries: Collection[ShardedParameter],
    *,
    group: ProcessGroup,
    size: int,
    rank: int,
) -> None:
    """Cut shards of all parameters, materializing blocks that were left out. Collective."""
    of_block = {
        name: [each for each in entries if each.name.startswith(f"{name}.")] for name in left_out
    }
    inside = {each.name for several in of_block.values() for each in several}
    made = [each for each in entries if each.name not in inside]
    shard_parameters(root, made, size=size, rank=rank)
    for name in left_out:
        modules = own_modules([blocks[name]], name)
        prepare_modules(modules, device=_CPU, group=group)
        shard_parameters(root, of_block[name], size=size, rank=rank)


def _tied_outside(root: Module, blocks: Mapping[str, Module]) -> set[str]:
    """Return the names of blocks with a parameter that is also used elsewhere in the model."""
    places: dict[int, set[str]] = {}
    owner = {part: name for name, block in blocks.items() for part in block.modules()}
    for module in root.modules():
        for parameter in module.parameters(recurse=False):
            places.setdefault(id(parameter), set()).add(owner.get(module, ""))
    return {name for several in places.values() if len(several) > 1 for name in several if name}


_LIBRARIES = {"boltmesh", "lightning", "pytorch_lightning", "torch"}
"""Packages whose own hooks need no whole activations."""


class PartialActivationHooks:
    """Finds hooks on modules that take or give parts of activations.

    The analysis of a step sees what a hook adds to the loss. It does not see a hook that is
    registered later, nor where an activation goes that a hook stores for logging. Between divided
    layers such a hook gets the channels of one rank, and with sequence parallelism its tokens.
    """

    def __init__(self, applied: AppliedPlan) -> None:
        plan, root = applied.plan, applied.module
        of_tokens = () if plan.sequence is None else plan.sequence.divided
        regions = region_blocks(plan)
        self._watched: list[tuple[str, Module, bool]] = [
            (name, root.get_submodule(name), on_outputs)
            for names, on_outputs in (
                (plan.divided_inputs, False),
                ((*plan.divided_outputs, *of_tokens), True),
            )
            for name in dict.fromkeys(names)
            if block_of(plan, name) not in regions
        ]
        self._known: set[str] = set()
        """Labels of the hooks already warned of."""

    def warn(self) -> None:
        """Warn once of each such hook. No communication: only one rank may have it."""
        by_label: dict[str, list[str]] = {}
        for name, module, on_outputs in self._watched:
            for hook in hooks_of(module, on_outputs=on_outputs):
                if label := _label(hook):
                    by_label.setdefault(label, []).append(name)
        for label in by_label.keys() - self._known:
            first, *others = dict.fromkeys(by_label[label])
            more = f" and {len(others)} more" if others else ""
            warnings.warn(
                f"Hook {label} on '{first}'{more} sees this rank's part of an activation that the "
                f"tensor axis divides: a mean or a norm of it is that of the part. To have it "
                f"whole, name a parameter of its layer in plan as 'whole'.",
                stacklevel=2,
            )
        self._known |= by_label.keys()


def _label(hook: Callable[..., Any]) -> str:
    """Return the name of a hook; empty for a library's."""
    while isinstance(hook, partial):
        hook = hook.func
    if hook.__module__.partition(".")[0] in _LIBRARIES:
        return ""
    return getattr(hook, "__qualname__", type(hook).__qualname__)


_PATIENCE = timedelta(seconds=120)
"""Timeout of a verification's collectives: a rank that raised leaves the others waiting."""


@dataclass(frozen=True)
class TensorPlacement:
    """A model that was divided by a plan."""

    module: LightningModule
    step: str
    """The step with which it was verified."""
    applied: AppliedPlan
    divisions: Mapping[str, DimDivision]
    """Divisions on this rank, by all names of divided parameters."""
    parts: tuple[Parameter, ...]
    """The parameters of which this rank holds a part."""
    counted: Mapping[str, OperatorTraffic] | None
    """Traffic of the verified step by operator; None if steps of the run may differ."""
    hooks: PartialActivationHooks
    """Warns of hooks that get parts of activations."""

    @property
    def plan(self) -> TensorPlan:
        """The plan, with the verified backends."""
        return self.applied.plan


def place(
    module: LightningModule,
    step: str,
    args: tuple[Any, ...],
    *,
    options: TensorOptions,
    context: TensorContext,
    group: TensorGroup,
) -> tuple[TensorPlacement, tuple[str, ...]]:
    """Divide a model. Collective over all ranks of the job.

    Args:
        module: The whole model, deferred or not, on the CPU.
        step: The method of the run's first loop.
        args: Its arguments, on the CPU: a batch first, the same on all ranks.
        options: The user's options.
        context: Groups of the run.
        group: The group on which the divided model runs.

    Returns:
        The placement, and messages about what verification has changed in the plan and why.

    Raises:
        ConfigError: If the step cannot be run, or an option is not possible.
    """
    blocks = find_blocks(module)
    on_host = DryRun(module, step, args, _CPU)
    plan, passed, made_elements = _planned(on_host, blocks, options, context, group.size)
    _make_whole(module, blocks, passed, context.world_cpu_group)
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
    recorder = SignatureRecorder()
    with recorder.watching(blocks):
        plan, counted = prove(
            plan,
            ProofInputs(
                on_device,
                blocks,
                passed,
                made_elements * torch.float32.itemsize,
                context.precision,
                context.world_cpu_group,
                lambda: _group_for_a_proof(context),
                context.verifies,
            ),
        )
    seen = broadcast_from_rank0(recorder.seen, context.world_cpu_group)
    _make_shards(
        module,
        blocks,
        passed,
        without_replicated(plan).sharded.values(),
        group=context.world_cpu_group,
        size=group.size,
        rank=group.rank,
    )
    applied = apply_plan(module, plan, group, loss_parallel=options.loss_parallel, verified=seen)
    divisions = divisions_of(applied.plan, group.rank)
    placed = TensorPlacement(
        module,
        step,
        applied,
        divisions,
        tuple(applied.sharded),
        counted if context.verifies else None,
        PartialActivationHooks(applied),
    )
    return placed, plan.notes[known:]


def _planned(
    rehearsal: DryRun,
    blocks: Mapping[str, Module],
    options: TensorOptions,
    context: TensorContext,
    size: int,
) -> tuple[TensorPlan, dict[str, str], int]:
    """Return the first rank's plan. Collective over all ranks of the job.

    Returns:
        The plan; the blocks that verification skips, each with the first block of its kind; and the
        number of elements of all results of the step.
    """
    answer: tuple[str, dict[str, str], int] | BoltMeshError | None = None
    if context.analyses:
        try:
            answer = _planned_here(rehearsal, blocks, options, context, size)
        except BoltMeshError as error:  # the other ranks wait for an answer
            answer = error
    answer = broadcast_from_rank0(answer, context.world_cpu_group)
    assert answer is not None
    if isinstance(answer, BoltMeshError):
        raise answer
    text, passed, made_elements = answer
    return from_json(text), passed, made_elements


def _planned_here(
    rehearsal: DryRun,
    blocks: Mapping[str, Module],
    options: TensorOptions,
    context: TensorContext,
    size: int,
) -> tuple[str, dict[str, str], int]:
    """Make the plan, which is returned as JSON; see ``_planned``."""
    module, shapes = rehearsal.module, BlockShapes()
    try:
        with shapes.watching(blocks):
            analysis = _analysed(rehearsal, blocks, context)
        plan = _made(analysis, module, options, size)
    except BoltMeshError:
        raise
    except Exception as error:
        text, raised = f"{type(error).__name__}: {error}".rstrip("."), failing_module(error)
        for name, each in module.named_modules():
            if each is raised and name:
                text = f"'{name}' ({type(each).__name__}) raised {text}"
        if isinstance(error, AttributeError):
            text += ". Hooks of training run later: set attributes in __init__ or setup."
        else:
            text += ". Leave tensor out if its code needs the values of tensors."
        raise ConfigError(
            f"{type(module).__name__}.{rehearsal.step} could not be run on tensors without data, "
            f"to find out how the model can be divided: {text}"
        ) from error
    in_order = {name: blocks[name] for name in shapes.in_order(blocks)}
    plan = replace(plan, kinds=kinds_of(in_order, plan))
    passed = _passed(module, plan, blocks, shapes)
    return to_json(plan), passed, analysis.trace.made_elements


def _analysed(rehearsal: DryRun, blocks: Mapping[str, Module], context: TensorContext) -> Analysis:
    """Analyse a step in fp32, or in the precision of the run if it does not run in fp32."""
    # By another guess it may raise, as in ``if loss.isnan(): raise``.
    with suppress(Exception):
        return analyse(rehearsal.module, rehearsal.forward, blocks=blocks)
    try:
        return analyse(rehearsal.module, rehearsal.forward, blocks=blocks, guess=0)
    except Exception:
        dtype = context.precision.dtype
        if dtype == torch.float32:
            raise
        if dtype.itemsize < torch.float32.itemsize:
            # Both parameters and autocast: a parameter that autocast casts is not recognized.
            rehearsal = replace(rehearsal, around=partial(torch.autocast, "cpu", dtype))
        return analyse(rehearsal.module, rehearsal.forward, blocks=blocks, dtype=dtype)


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
    module: LightningModule, plan: TensorPlan, blocks: Mapping[str, Module], shapes: BlockShapes
) -> dict[str, str]:
    """Return the blocks that verification skips, each with the first block of its kind."""
    tied = _tied_outside(module, blocks)
    return {
        name: first
        for name, first in plan.kinds.items()
        if name != first
        and name not in tied
        and first not in tied
        and shapes.allow(name, first)
        and any(True for _ in blocks[name].children())  # inputs of a norm depend on its place
    }


def _group_for_a_proof(context: TensorContext) -> TensorGroup:
    group = context.new_group(timeout=min(context.timeout, _PATIENCE))
    assert group is not None
    return TensorGroup(group, context.device)
