"""The tensor axis: finds, proves and applies the plan by which ranks share every layer of a model.

What a plan is comes from the analysis of the user's own step (``planning.py``), what runs by it
from ``execution/``. Here the parts meet: one plan for all ranks, the proof that it is right, this
rank's shards in the place of parameters, and what the engine asks about them afterwards.
"""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist
from lightning.fabric.utilities import move_data_to_device
from lightning.pytorch import LightningModule
from torch import Tensor
from torch.amp import GradScaler
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor
from torch.nn import Module, Parameter

from boltmesh.errors import BoltMeshError, ConfigError
from boltmesh.strategies.access import forget_parts, know_parts
from boltmesh.strategies.blocks import find_blocks
from boltmesh.strategies.checkpoint.guard import PARTS, StateGuard
from boltmesh.strategies.checkpoint.parts import Division
from boltmesh.strategies.joint_norms import PartShare
from boltmesh.strategies.tensor.analysis.analyse import Analysis, analyse
from boltmesh.strategies.tensor.backends import without_replicated
from boltmesh.strategies.tensor.batches import SameBatches
from boltmesh.strategies.tensor.building import make_shards, make_whole, tied_outside
from boltmesh.strategies.tensor.division import divisions_of
from boltmesh.strategies.tensor.execution.apply import AppliedPlan, apply_plan
from boltmesh.strategies.tensor.execution.group import TensorGroup
from boltmesh.strategies.tensor.hugging_face import disagreements
from boltmesh.strategies.tensor.passing import Shapes, kinds_of
from boltmesh.strategies.tensor.plan import TensorPlan
from boltmesh.strategies.tensor.plan_json import from_json, to_json
from boltmesh.strategies.tensor.planning import LossParallel, make_plan
from boltmesh.strategies.tensor.proof import Stage, prove
from boltmesh.strategies.tensor.rehearsal import Around, Rehearsal
from boltmesh.strategies.tensor.traffic import (
    Amount,
    CountingGroup,
    FakeRun,
    count_step,
    expected_traffic,
)
from boltmesh.strategies.tensor.user_plan import with_user_plan
from boltmesh.strategies.torch_compat import agree_on_overflow
from boltmesh.telemetry.traffic import ExpectedTraffic

UserPlan = Literal["auto"] | Mapping[str, str]

_CPU = torch.device("cpu")


@dataclass(frozen=True)
class TensorOptions:
    """What ``TensorParallelStrategy`` was asked for; see there.

    Raises:
        ConfigError: When an option does not exist.
    """

    size: int | None = None
    plan: UserPlan = "auto"
    sequence_parallel: bool = False
    loss_parallel: LossParallel = "auto"

    def __post_init__(self) -> None:
        if self.size is not None and self.size < 1:
            raise ConfigError(f"size={self.size} holds no rank. Use 2 or more, or leave it out.")
        if self.plan != "auto" and not isinstance(self.plan, Mapping):
            raise ConfigError(
                f"plan={self.plan!r} is neither 'auto' nor a mapping of patterns of parameter "
                f"names to styles, such as {{'*.up.weight': 'column'}}."
            )
        if not isinstance(self.sequence_parallel, bool):
            raise ConfigError(
                f"sequence_parallel={self.sequence_parallel!r} is neither true nor false."
            )
        if self.loss_parallel not in {True, False, "auto"}:
            raise ConfigError(
                f"loss_parallel={self.loss_parallel!r} is none of its settings. Use 'auto', true "
                f"or false."
            )


@dataclass(frozen=True)
class TensorContext:
    """Where the axis finds itself."""

    group: ProcessGroup
    """The ranks that share each layer with this one."""
    control: ProcessGroup
    """The same ranks on the CPU, for questions that wait for no kernel."""
    judges: ProcessGroup
    """All ranks of the job, on the CPU: their models are alike, and they agree on one plan."""
    new_group: Callable[..., ProcessGroup | None]
    """Makes further groups of its ranks, see ``RankMeshStrategy.new_group``."""
    device: torch.device
    timeout: timedelta
    scaler: GradScaler | None = None


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


class TensorAxis:
    """Keeps the ranks of the tensor axis one model, of whose layers each holds a part."""

    def __init__(self, options: TensorOptions) -> None:
        self.options = options
        self.placement: Placement | None = None
        """None before a model was placed."""
        self._forget_scaler: Callable[[], None] = _nothing
        self._counted: dict[str, Amount] | None = None
        """What a batch of training moves, by operator; None where nobody knows."""

    def begin(self, context: TensorContext) -> None:
        """Take where the axis finds itself now: called for every run, before ``place``."""
        self.context = context
        self.group = TensorGroup(context.group, context.device)
        self.batches = SameBatches(context.control)

    def is_placed(self, module: LightningModule, step: str) -> bool:
        """Whether a model runs by a plan that was proven with as much as this step needs."""
        placed = self.placement
        if placed is None or placed.module is not module:
            return False
        return step != "training_step" or placed.step == step

    def place(
        self, module: LightningModule, step: str, batch: Any, rest: tuple[Any, ...]
    ) -> tuple[str, ...]:
        """Divide the model. Collective over all ranks of the job.

        Args:
            module: The whole model, deferred or not, on the CPU.
            step: The method that the run begins with.
            batch: One that it is called with, on the CPU; alike on all ranks.
            rest: What it is called with behind the batch.

        Returns:
            What the proof has changed about the plan, and why, in words.

        Raises:
            ConfigError: When the step cannot be run, or what was asked for is not possible.
        """
        self.close()
        blocks = find_blocks(module)
        on_host = Rehearsal(module, step, (batch, *rest), _CPU)
        shapes = Shapes()
        with shapes.watching(blocks):
            plan = self._planned(on_host, blocks)
        passed = self._passed(module, plan, blocks, shapes)
        context = self.context
        make_whole(module, blocks, passed, context.judges)
        on_device = replace(
            on_host,
            args=(move_data_to_device(batch, context.device), *rest),
            device=context.device,
            probes={first: blocks[first] for first in dict.fromkeys(plan.kinds.values())},
        )
        known = len(plan.notes)
        plan = prove(
            plan, Stage(on_device, blocks, passed, context.judges, self._group_for_a_proof)
        )
        make_shards(
            module,
            blocks,
            passed,
            without_replicated(plan).sharded.values(),
            group=context.judges,
            size=self.group.size,
            rank=self.group.rank,
        )
        self._adopt(module, step, apply_plan(module, plan, self.group))
        if not self.divisions and self.group.size > 1:
            return (*plan.notes[known:], "nothing of the model is divided: all ranks do all of it")
        return plan.notes[known:]

    def _planned(self, rehearsal: Rehearsal, blocks: Mapping[str, Any]) -> TensorPlan:
        """Return the plan of the first rank. Collective over all ranks of the job."""
        told: list[tuple[str, str]] = [("", "")]
        failure: Exception | None = None
        # Every rank looks, for what it sees of its blocks; the first one's plan is taken.
        try:
            analysis = analyse(rehearsal.module, rehearsal.forward, blocks=blocks)
            told = [("plan", to_json(self._made(analysis, rehearsal.module)))]
        except Exception as error:  # noqa: BLE001 - whatever the user's step raises
            failure = error
            text = (
                str(error)
                if isinstance(error, BoltMeshError)
                else f"{type(error).__name__}: {error}"
            )
            told = [("error", text)]
        dist.broadcast_object_list(told, group=self.context.judges, group_src=0)
        kind, text = told[0]
        if kind == "error":
            if isinstance(failure, BoltMeshError):
                raise failure
            raise ConfigError(
                f"{type(rehearsal.module).__name__}.{rehearsal.step} could not be run on tensors "
                f"without data, to find out how the model can be divided: {text}"
            ) from failure
        plan = from_json(text)
        return replace(plan, kinds=kinds_of(blocks, plan))

    def _made(self, analysis: Analysis, module: LightningModule) -> TensorPlan:
        options = self.options
        plan = make_plan(
            analysis,
            self.group.size,
            loss_parallel=options.loss_parallel,
            sequence_parallel=options.sequence_parallel,
        )
        if options.plan != "auto":
            plan = with_user_plan(plan, analysis, options.plan)
        return replace(plan, notes=(*plan.notes, *disagreements(plan, module)))

    def _passed(
        self, module: LightningModule, plan: TensorPlan, blocks: Mapping[str, Any], shapes: Shapes
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

    def _group_for_a_proof(self) -> TensorGroup:
        group = self.context.new_group(timeout=min(self.context.timeout, _PATIENCE))
        assert group is not None
        return TensorGroup(group, self.context.device)

    def _adopt(self, module: LightningModule, step: str, applied: AppliedPlan) -> None:
        divisions = divisions_of(applied.plan, self.group.rank)
        parts = tuple(applied.sharded)
        self.placement = Placement(module, step, applied, divisions, parts)
        self.guard = StateGuard(module, tuple(divisions), holds=PARTS)
        self._know_parts()

    def _know_parts(self) -> None:
        assert self.placement is not None
        applied, divisions = self.placement.applied, self.placement.divisions
        know_parts(
            {
                each: _Joining(applied, entry.name, divisions[entry.name])
                for each, entry in applied.sharded.items()
            }
        )

    def cut_into_stages(self, units: Mapping[str, Module]) -> None:
        """Prepare for ranks that run some of the model's units each; called after ``place``.

        Args:
            units: By dotted name, none within another one.
        """
        assert self.placement is not None
        self.placement.applied.cut_into_stages(units)

    def silenced(self) -> AbstractContextManager[None]:
        """Within it, divided layers run on tensors without data, and nothing is communicated."""
        if self.group.size == 1:
            return nullcontext()
        return self.group.counted_by(CountingGroup(self.group.rank, self.group.size))

    def follow_parameters(self) -> None:
        """Take the parameters as they are now for those of the placement.

        To be called when the data axis has put others, shards of them, under the same names.
        """
        if self.placement is None:
            return
        forget_parts(self.placement.parts)
        self.placement = replace(self.placement, parts=tuple(self.placement.applied.sharded))
        self._know_parts()

    @property
    def norm_share(self) -> PartShare:
        """What the axis says of norms of gradients."""
        return PartShare(self.context.group, lambda: self.parts)

    @property
    def parts(self) -> tuple[Parameter, ...]:
        """The parameters of which this rank has a part."""
        return () if self.placement is None else self.placement.parts

    def holds(self, module: LightningModule) -> bool:
        """Whether a model runs by a plan."""
        return self.placement is not None and self.placement.module is module

    def opened(self) -> AbstractContextManager[None]:
        """Within it, the model gives its state, parts of parameters, to who knows that they are."""
        return nullcontext() if self.placement is None else self.guard.opened()

    def close(self) -> None:
        """Make the model whole again, if one was placed, unless it is in shards since then.

        Collective over the axis.

        To be called before another one is placed, or the same one for another step.
        """
        placed, self.placement = self.placement, None
        if placed is None:
            return
        self.guard.remove()
        forget_parts(placed.parts)
        if any(isinstance(each, DTensor) for each in placed.parts):
            return  # for good: shards of the data axis know no other shape
        placed.applied.remove()
        with torch.no_grad():
            for parameter, entry in placed.applied.sharded.items():
                parameter.data = placed.applied.join(entry.name, parameter)
                parameter.grad = None

    # What the engine asks.

    def rehearsed(self, batch: Any, rest: tuple[Any, ...]) -> FakeRun:
        """Return a run of a whole step of training, to be counted.

        Args:
            batch: On the CPU.
            rest: What ``training_step`` is called with behind it.
        """
        assert self.placement is not None
        rehearsal = Rehearsal(self.placement.module, "training_step", (batch, *rest), _CPU)
        return lambda _: rehearsal.run()

    def count(self, run: FakeRun, around: Around, device: torch.device) -> None:
        """Find out what a batch of training moves, to be expected; called for every fit.

        Args:
            run: What this rank runs of it.
            around: Precision.
            device: Where tensors of the batch are.
        """
        assert self.placement is not None
        if any(isinstance(each, DTensor) for each in self.placement.module.parameters()):
            # Of a run before this one, whose shards only gathers make whole: its batches may have
            # been others.
            self._counted = None
            return
        self._counted = count_step(self.placement.module, run, self.group, around, device)

    def expected_traffic(self, *, accumulated: int, num_norms: int) -> list[ExpectedTraffic]:
        """What one optimizer step moves on this rank; nothing where nobody knows.

        Args:
            accumulated: Batches in an optimizer step.
            num_norms: Norms over the ranks in an optimizer step.
        """
        if self._counted is None or self.group.size == 1:
            return []
        return expected_traffic(
            self._counted,
            size=self.group.size,
            accumulated=accumulated,
            num_norms=num_norms,
            agrees_on_overflow=self.context.scaler is not None,
        )

    def follow_scaler(self) -> None:
        """Make all ranks skip a step when gradients of one have overflown.

        To be called before a run that trains; until ``end``.
        """
        self.end()
        if self.context.scaler is not None and self.context.group.size() > 1:
            self._forget_scaler = agree_on_overflow(
                self.context.scaler, self.context.group, self.context.device
            )

    def end(self) -> None:
        """Called when a run ends. The model stays divided."""
        self._forget_scaler()
        self._forget_scaler = _nothing

    @property
    def divisions(self) -> Mapping[str, Division]:
        """How parameters are divided, by all of their names."""
        return {} if self.placement is None else self.placement.divisions

    def division(self, name: str) -> Division | None:
        """How a parameter is divided, by any of its names; None for what every rank has whole."""
        return self.divisions.get(name)

    def joined(self, name: str, part: Tensor) -> Tensor:
        """Return the whole of which each rank has a part. Collective over the axis.

        Args:
            name: Any name of a divided parameter.
            part: That parameter, or something of its shape.
        """
        assert self.placement is not None
        applied = self.placement.applied
        first = next(each.name for each in applied.plan.sharded.values() if name in each.names)
        return applied.join(first, part)


@dataclass(frozen=True)
class _Joining:
    """What ``gathered_parameters`` needs of one divided parameter."""

    applied: AppliedPlan
    name: str
    division: Division

    def join(self, part: Tensor) -> Tensor:
        """Return the whole. Collective over the tensor axis."""
        return self.applied.join(self.name, part)

    def cut(self, whole: Tensor) -> Tensor:
        """Return this rank's part."""
        return self.division.cut(whole)


_PATIENCE = timedelta(seconds=120)
"""How long a proof waits for a rank whose code has raised where others' has not."""


def _nothing() -> None:
    """What there is to undo where nothing was done."""
