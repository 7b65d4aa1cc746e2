"""The tensor axis: finds, proves and applies the plan by which ranks share every layer of a model.

How a model is divided is in ``placement.py``, what runs by the plan in ``execution/``; here is what
becomes of parameters then, and what the engine asks about them.
"""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import Module, Parameter

from boltmesh.strategies.checkpoint.chunks import DimDivision
from boltmesh.strategies.checkpoint.state_dict_guard import PARTS, StateGuard
from boltmesh.strategies.dry_run.batch_check import SameBatchCheck
from boltmesh.strategies.dry_run.step import Around, DryRun
from boltmesh.strategies.grad_norm import PartShare
from boltmesh.strategies.parameter_access import forget_parts, register_shards
from boltmesh.strategies.tensor.expected_traffic import (
    CountingGroup,
    FakeRun,
    OperatorTraffic,
    count_step,
    expected_traffic,
)
from boltmesh.strategies.tensor.options import TensorOptions
from boltmesh.strategies.tensor.placement import TensorContext, TensorPlacement, place
from boltmesh.strategies.tensor.runtime.apply import AppliedPlan
from boltmesh.strategies.tensor.runtime.collectives import TensorGroup
from boltmesh.strategies.torch_compat.optimizers import agree_on_overflow
from boltmesh.telemetry.traffic import ExpectedTraffic

_CPU = torch.device("cpu")


class TensorAxis:
    """Keeps the ranks of the tensor axis one model, of whose layers each holds a part."""

    def __init__(self, options: TensorOptions) -> None:
        self.options = options
        self.placement: TensorPlacement | None = None
        """None before a model was placed."""
        self._forget_scaler: Callable[[], None] = _nothing
        self._counted: dict[str, OperatorTraffic] | None = None
        """What a batch of training moves, by operator; None where nobody knows."""

    def begin(self, context: TensorContext) -> None:
        """Take where the axis finds itself now: called for every run, before ``place``."""
        self.context = context
        self.group = TensorGroup(context.group, context.device)
        self.batches = SameBatchCheck(context.control)

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
        placed, notes = place(
            module,
            step,
            (batch, *rest),
            options=self.options,
            context=self.context,
            group=self.group,
        )
        self.placement = placed
        self.guard = StateGuard(module, tuple(placed.divisions), holds=PARTS)
        self._know_parts()
        if not placed.divisions and self.group.size > 1:
            return (*notes, "nothing of the model is divided: all ranks do all of it")
        return notes

    def _know_parts(self) -> None:
        assert self.placement is not None
        applied, divisions = self.placement.applied, self.placement.divisions
        register_shards(
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
        rehearsal = DryRun(self.placement.module, "training_step", (batch, *rest), _CPU)
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
    def divisions(self) -> Mapping[str, DimDivision]:
        """How parameters are divided, by all of their names."""
        return {} if self.placement is None else self.placement.divisions

    def division(self, name: str) -> DimDivision | None:
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
    division: DimDivision

    def join(self, part: Tensor) -> Tensor:
        """Return the whole. Collective over the tensor axis."""
        return self.applied.join(self.name, part)

    def cut(self, whole: Tensor) -> Tensor:
        """Return this rank's part."""
        return self.division.cut(whole)


def _nothing() -> None:
    """What there is to undo where nothing was done."""
