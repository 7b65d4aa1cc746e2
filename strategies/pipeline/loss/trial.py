"""Runs what a step does behind its last layer on a few rows, without a trace of it anywhere.

Runs the end of a step on a few rows with made-up values, as a whole and in parts.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from lightning.pytorch import LightningModule
from torch import Tensor
from typing_extensions import override

from boltmesh.strategies.dry_run.no_side_effects import modules_unchanged, random_state_unchanged
from boltmesh.strategies.pipeline.loss.log_rules import Key, Noted, returned_numbers
from boltmesh.strategies.pipeline.loss.trial_values import (
    LiveValue,
    SharedDraws,
    made_up,
    sharpened,
    taken,
)
from boltmesh.strategies.pipeline.microbatch import Rows, pick
from boltmesh.strategies.pipeline.microbatch_runs import Around
from boltmesh.strategies.pipeline.runtime.stage import ValueSpec
from boltmesh.strategies.pipeline.stage.plan_cache import StagePlans
from boltmesh.strategies.pipeline.step_logs import StepLogs


@dataclass
class TrialOutcome:
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
    ) -> TrialOutcome:
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
    ) -> TrialOutcome:
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
        return TrialOutcome(loss, logged | returned_numbers(0, result))

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


MOST_ROWS = 5
"""The fewest rows with two cuts into parts of at least two rows, as batch statistics need."""

REPEATED = 3
"""How often a row is run by itself, beside itself: what counts it says so."""

MOST_BYTES = 2**28
"""Of the values of :data:`MOST_ROWS` rows; three are tried where these take more."""

Attempt = tuple[bool, bool]
"""Whether values are fp64, and whether they are between 0 and 1, as probabilities are."""

ATTEMPTS: tuple[Attempt, ...] = ((True, False), (False, False), (True, True), (False, True))


@dataclass
class TrialPart:
    """Some of the tried rows, and what the step gave for them."""

    start: int
    count: int
    values: list[Tensor]
    outcome: TrialOutcome

    @property
    def loss(self) -> Tensor:
        """Of these rows."""
        assert self.outcome.loss is not None
        return self.outcome.loss


@dataclass
class TrialRows:
    """The tried rows, as a whole and in parts."""

    live: list[LiveValue]
    whole: TrialPart
    parts: list[TrialPart]
    weights: dict[int, Tensor | float] = field(default_factory=dict)
    """Of the parts' losses, by their number."""


def windows(trial: Trial) -> list[Sequence[int]]:
    """Return which rows are tried: the first ones and the last ones."""
    count = min(MOST_ROWS, trial.num_rows)
    specs = trial.values_in(trial.rows(range(count)))
    numels = (math.prod(spec.shape) for spec, _ in specs)
    if sum(8 * each for each in numels) > MOST_BYTES:
        count = min(3, count)
    return [range(start, start + count) for start in sorted({0, trial.num_rows - count})]


def run_whole(
    trial: Trial, numbers: Sequence[int], device: torch.device, attempt: Attempt
) -> TrialPart | None:
    """Run the step on some rows; None where it gives no loss."""
    whole = _run(trial, _made_up(trial, numbers, device, attempt), numbers, (0, len(numbers)))
    return whole if _has_loss(whole) else None


def run_cuts(
    trial: Trial, numbers: Sequence[int], device: torch.device, attempt: Attempt
) -> list[TrialRows]:
    """Run the step on some rows and on parts of them; nothing where it gives no loss."""
    count, first = len(numbers), _first_part(numbers)
    is_between = attempt[1]
    live = _made_up(trial, numbers, device, attempt)
    whole = _run(trial, live, numbers, (0, count))
    if not _has_loss(whole):
        return []
    gradients = gradients_of(whole.loss, whole.values)
    if not all(each is None or bool(each.isfinite().all()) for each in gradients):
        return []
    live = sharpened(live, gradients)
    if is_between:
        live = [replace(each, tensor=_clamped(each.tensor)) for each in live]
    cuts = []
    for size in sorted({first, count - first}, reverse=True):
        draws = SharedDraws()
        parts = [
            _run(trial, live, numbers, each, draws.of_part())
            for each in ((0, size), (size, count - size))
        ]
        whole = _run(trial, live, numbers, (0, count), draws.of_whole())
        if not _has_loss(whole):
            return []
        cuts.append(TrialRows(live, whole, parts))
    return cuts


def _first_part(numbers: Sequence[int]) -> int:
    return len(numbers) // 2 + 1 if len(numbers) > 2 else 1


def _made_up(
    trial: Trial, numbers: Sequence[int], device: torch.device, attempt: Attempt
) -> list[LiveValue]:
    count, first = len(numbers), _first_part(numbers)
    is_double, is_between = attempt
    return made_up(
        trial.values_in(trial.rows(numbers)),
        trial.values_in(trial.rows(numbers[:first])),
        (count, first),
        device=device,
        is_double=is_double,
        is_between_0_and_1=is_between,
    )


def _clamped(tensor: Tensor) -> Tensor:
    return tensor.clamp(0.01, 0.99) if tensor.is_floating_point() else tensor


def _run(
    trial: Trial,
    live: Sequence[LiveValue],
    numbers: Sequence[int],
    rows: tuple[int, int],
    during: AbstractContextManager[None] | None = None,
) -> TrialPart:
    start, count = rows
    part = trial.rows(numbers[start : start + count])
    values = taken(live, trial.values_in(part), start, count, len(numbers))
    return TrialPart(start, count, values, trial.run(part, values, during or nullcontext()))


def _has_loss(part: TrialPart) -> bool:
    loss = part.outcome.loss
    return loss is not None and loss.grad_fn is not None and bool(loss.detach().isfinite())


def gradients_of(loss: Tensor, values: Sequence[Tensor]) -> list[Tensor | None]:
    """Return gradients of a loss; None of values that have none. The graph is kept."""
    wanted = [each for each in values if each.requires_grad]
    if not wanted or not loss.requires_grad:
        return [None] * len(values)
    made = iter(torch.autograd.grad(loss, wanted, allow_unused=True, retain_graph=True))
    return [next(made) if each.requires_grad else None for each in values]
