"""Runs what a step does behind its last layer on a few rows, without a trace of it anywhere."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from lightning.pytorch import LightningModule
from torch import Tensor
from typing_extensions import override

from boltmesh.strategies.pipeline.log_rules import Key, Noted, returned_numbers
from boltmesh.strategies.pipeline.microbatches import Rows, pick
from boltmesh.strategies.pipeline.replay.plans import StagePlans
from boltmesh.strategies.pipeline.runs import Around
from boltmesh.strategies.pipeline.step_logs import StepLogs
from boltmesh.strategies.pipeline.values import ValueSpec
from boltmesh.strategies.steps.restoring import modules_unchanged, random_state_unchanged


@dataclass
class Outcome:
    """What one run gave."""

    loss: Tensor | None
    """With its graph; None where the step gave none."""
    logged: dict[Key, Noted] = field(default_factory=dict)


class Trial(Protocol):
    """The end of a step, to be run on any rows of one batch."""

    @property
    def num_rows(self) -> int:
        """Of the batch."""

    def rows(self, numbers: Sequence[int]) -> Any:
        """Return some rows of the batch, in any order and each as often as it is named."""

    def values_in(self, part: Any) -> tuple[tuple[ValueSpec, bool], ...]:
        """Return the values that it needs, and whether each is made of the batch's data."""

    def run(
        self, part: Any, values: Sequence[Tensor], during: AbstractContextManager[None]
    ) -> Outcome:
        """Run it once."""


class TailTrial:
    """The end of a LightningModule's step, behind its last unit, on the last stage's rank."""

    def __init__(
        self,
        module: LightningModule,
        plans: StagePlans,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        *,
        around: Around,
        seed: int,
        rows: Rows,
        device: torch.device,
    ) -> None:
        """Take what is tried.

        Args:
            module: Whose ``training_step`` it is.
            plans: How it is cut.
            args: What the step is called with; the batch is the first.
            kwargs: Also of it.
            around: Precision.
            seed: What its random numbers start from.
            rows: Of the batch.
            device: Where it runs.
        """
        self.num_rows = rows.count
        self._rows = rows
        self._module = module
        self._plans = plans
        self._args = args
        self._kwargs = kwargs
        self._around = around
        self._seed = seed
        self._device = device

    def rows(self, numbers: Sequence[int]) -> Any:
        """Return some rows of the batch."""
        return pick(self._args[0], self._rows, numbers)

    def values_in(self, part: Any) -> tuple[tuple[ValueSpec, bool], ...]:
        """Return the values that live behind the last unit, for some rows."""
        with self._untraced():
            plan = self._tail(part).plan
        return tuple(zip(plan.values_in, plan.row_values, strict=True))

    def run(
        self, part: Any, values: Sequence[Tensor], during: AbstractContextManager[None]
    ) -> Outcome:
        """Run the end of the step once."""
        logs = _TrialLogs(self._module)
        with self._untraced(), torch.enable_grad():
            end = self._tail(part)
            with logs.of_microbatch(0), during:
                result = end.forward(
                    tuple(values), (part, *self._args[1:]), self._kwargs, seed=self._seed
                )
        loss = result.get("loss") if isinstance(result, Mapping) else result
        logs.read()
        logged = {key: noted[-1] for key, noted in logs.noted().items()}
        return Outcome(loss, logged | returned_numbers(0, result))

    def _tail(self, part: Any) -> Any:
        tail = self._plans.tail(
            "training_step",
            part,
            *self._args[1:],
            kwargs=self._kwargs,
            seed=self._seed,
        )
        return tail.end

    @contextmanager
    def _untraced(self) -> Iterator[None]:
        with ExitStack() as stack:
            stack.enter_context(random_state_unchanged(self._device))
            stack.enter_context(modules_unchanged(self._module.modules()))
            stack.enter_context(self._around())
            yield


class _TrialLogs(StepLogs):
    """Keeps what is logged to be read later."""

    def __init__(self, module: LightningModule) -> None:
        super().__init__(module)
        self._unread: list[tuple[str, str | None, Any, dict[str, Any]]] = []

    def read(self) -> None:
        """Read what was logged, when nothing watches operators any more."""
        for each in self._unread:
            super()._keep(*each)
        self._unread = []

    @override
    def _keep(self, name: str, key: str | None, value: Any, options: dict[str, Any]) -> None:
        self._unread.append((name, key, value, options))
