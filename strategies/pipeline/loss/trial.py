"""Runs the end of a step, behind its last layer, on a few made-up rows without side effects."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple, Protocol

import torch
from lightning.pytorch import LightningModule
from torch import Tensor
from typing_extensions import override

from boltmesh.strategies.deferred_initialization.recording import is_random
from boltmesh.strategies.dry_run.metrics import MetricKind, find_metrics
from boltmesh.strategies.dry_run.no_side_effects import modules_unchanged
from boltmesh.strategies.pipeline.loss.autograd_nodes import gradients_of
from boltmesh.strategies.pipeline.loss.log_rules import Key, Noted, returned_numbers
from boltmesh.strategies.pipeline.loss.reduction import BatchLossError
from boltmesh.strategies.pipeline.merge import tail_of
from boltmesh.strategies.pipeline.metrics import MetricCalls
from boltmesh.strategies.pipeline.microbatch import Rows, pick
from boltmesh.strategies.pipeline.microbatch_runs import Around, MicrobatchRun
from boltmesh.strategies.pipeline.runtime.stage import ValueSpec
from boltmesh.strategies.pipeline.stage.plan_cache import StagePlans
from boltmesh.strategies.pipeline.stage.stage_run import StageRun
from boltmesh.strategies.pipeline.step_report import StepLogs
from boltmesh.strategies.random_state import random_state_unchanged
from boltmesh.strategies.torch_compat.tensors import DispatchMode, schema_of

_PERMUTATION, _DROPOUT = "aten::randperm", "aten::native_dropout"

Draw = Callable[[int, str, Tensor], Tensor | None]
"""Takes number of the draw, operator and drawn tensor; returns another of its shape, or None."""


class SharedDraws:
    """Gives a batch the random numbers that its parts drew before, row by row.

    A step that draws noise or a permutation for each row then computes the same loss of a row
    whichever other rows there are, which a seed alone does not ensure. Numbers that belong to no
    row are drawn by the first part only.
    """

    def __init__(self) -> None:
        self._drawn: list[list[Tensor]] = []

    @contextmanager
    def of_part(self) -> Iterator[None]:
        """Return a context in which a part draws."""
        before = self._drawn[0] if self._drawn else []
        own: list[Tensor] = []

        def draw(number: int, _: str, made: Tensor) -> Tensor | None:
            known = before[number] if number < len(before) else made
            used = known if known.shape == made.shape else made
            own.append(used.detach().clone())
            return used

        with _Drawing(draw):
            yield
        self._drawn.append(own)

    @contextmanager
    def of_whole(self) -> Iterator[None]:
        """Return a context in which the batch gets the draws of its parts."""

        def draw(number: int, name: str, made: Tensor) -> Tensor | None:
            parts = [each[number] for each in self._drawn if number < len(each)]
            return _join(parts, name, made) if len(parts) == len(self._drawn) else None

        with _Drawing(draw):
            yield


def _join(parts: Sequence[Tensor], name: str, made: Tensor) -> Tensor | None:
    """Return the numbers for the whole, of the shape of ``made``; None if parts do not fit."""
    if all(each.shape == made.shape for each in parts):
        return parts[0]
    if name == _PERMUTATION:  # rows of a part are permuted within the part
        starts = torch.tensor([0, *map(len, parts)]).cumsum(0).tolist()
        parts = [each + start for each, start in zip(parts, starts, strict=False)]
    for dim in range(made.ndim):
        rest = {(*each.shape[:dim], *each.shape[dim + 1 :]) for each in parts}
        wanted = (*made.shape[:dim], *made.shape[dim + 1 :])
        if rest == {wanted} and sum(each.shape[dim] for each in parts) == made.shape[dim]:
            return torch.cat(list(parts), dim)
    return None


class _Drawing(DispatchMode):  # type: ignore[no-untyped-call]
    """Replaces random numbers."""

    def __init__(self, draw: Draw) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._draw = draw
        self._count = 0

    @override
    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if not is_random(func):
            return result
        name = schema_of(func).name
        made = result[1] if name == _DROPOUT else result
        if not isinstance(made, Tensor):
            return result
        drawn = self._draw(self._count, name, made)
        self._count += 1
        if drawn is None or drawn is made:
            return result
        if name == _DROPOUT:
            given, rate = args[0], args[1]
            return given * drawn / (1 - rate), drawn
        # The operator was in place or made a new tensor: the result is this tensor.
        return made.copy_(drawn)


SEED = 20_240_229
"""Seed of made-up values, the same in every run."""


@dataclass(frozen=True)
class LiveValue:
    """A made-up value of a few rows, as it enters the end of a step."""

    tensor: Tensor
    dim: int | None
    """Dim of the rows, each with the same number of elements along it; None without rows."""
    needs_grad: bool
    depends_on_batch: bool
    """Whether a layer may have computed it from the batch."""


def narrowed(
    tensor: Tensor, dim: int | None, shape: Sequence[int], start: int, count: int, rows: int
) -> Tensor:
    """Return a view of some rows.

    Args:
        tensor: Values of all rows, a multiple of ``rows`` long along ``dim``.
        dim: Dim of the rows; None returns the tensor.
        shape: Shape of the part, whose other dims may be shorter where rows are padded.
        start: The first row.
        count: Number of rows of the part.
        rows: Number of all rows.

    Returns:
        Shape ``shape``, if that is no larger than ``tensor``.
    """
    if dim is None:
        return tensor
    per_row = tensor.shape[dim] // rows
    view = tensor.narrow(dim, start * per_row, count * per_row)
    for other, size in enumerate(shape):
        view = view.narrow(other, 0, min(size, view.shape[other]))
    return view


def _sharpened(values: Sequence[LiveValue], gradients: Sequence[Tensor | None]) -> list[LiveValue]:
    """Return values for which about half of the predictions are right.

    With many classes random values predict nothing right, and an accuracy of zero fits any rule. A
    step down the loss's gradient improves any kind of prediction.
    """
    generator = torch.Generator().manual_seed(SEED + 1)
    made = []
    for value, gradient in zip(values, gradients, strict=True):
        tensor = value.tensor
        if gradient is not None and value.dim is not None:
            chosen = torch.rand((*tensor.shape[:-1], 1), generator=generator) < 0.5
            largest = gradient.abs().amax(-1, keepdim=True)
            step = gradient / torch.where(largest == 0, 1, largest)
            tensor = tensor - 8 * step * chosen.to(tensor.device)
        made.append(replace(value, tensor=tensor))
    return made


@dataclass
class TrialOutcome:
    """Results of one run."""

    loss: Tensor | None
    """Shape ``()``, with its graph; None if the step gave none."""
    logged: dict[Key, Noted] = field(default_factory=dict)
    batch_sizes: dict[Key, int] = field(default_factory=dict)
    """``batch_size`` of calls of ``self.log`` that have one."""


class Trial(Protocol):
    """The end of a step, which can run on any rows of one batch."""

    @property
    def num_rows(self) -> int:
        """Number of rows of the batch."""

    @property
    def device(self) -> torch.device:
        """Device that it runs on."""

    def rows(self, numbers: Sequence[int]) -> Any:
        """Return a batch of the numbered rows, in any order and with repetitions."""

    def values_in(self, part: Any) -> tuple[tuple[ValueSpec, bool], ...]:
        """Return the specs of its inputs, and whether each is computed from the batch."""

    def run(
        self, part: Any, values: Sequence[Tensor], during: AbstractContextManager[None]
    ) -> TrialOutcome:
        """Run it once.

        Args:
            part: Rows of the batch.
            values: Inputs, of the shapes of ``values_in(part)``.
            during: Context of the run.
        """

    def largest(self, number: float, /) -> float:
        """Return the maximum over the ranks that have parts of the values. Collective."""


class TailTrial:
    """The end of a LightningModule's step, behind its last unit, on the last stage's rank.

    Args:
        plans: Stages of the module.
        step: The step and its batch.
        rows: Rows of the batch.
        around: The precision context.
        device: Device that it runs on.
    """

    def __init__(
        self,
        plans: StagePlans,
        step: MicrobatchRun,
        rows: Rows,
        around: Around,
        device: torch.device,
    ) -> None:
        self.num_rows = rows.count
        self.device = device
        self.largest = plans.boundaries.largest
        self._module: Any = plans.root
        self._plans = plans
        self._step = step
        self._rows = rows
        self._around = around

    def rows(self, numbers: Sequence[int]) -> Any:
        """Return some rows of the batch."""
        return pick(self._step.batch, self._rows, numbers)

    def values_in(self, part: Any) -> tuple[tuple[ValueSpec, bool], ...]:
        """Return specs of the values that the end of the step uses, for some rows."""
        step = self._step
        with self._around(), self._plans.trying():
            is_known = self._plans.knows(step.step, part, *step.rest, kwargs=step.kwargs)
        with self._around() if is_known else self._untraced():
            plan = self._tail(part).plan
        return tuple(zip(plan.values_in, plan.row_values, strict=True))

    def run(
        self, part: Any, values: Sequence[Tensor], during: AbstractContextManager[None]
    ) -> TrialOutcome:
        """Run the end of the step once; arguments as for ``Trial.run``."""
        logs, step = _TrialLogs(self._module, MetricCalls(self._metrics)), self._step
        with self._untraced(), torch.enable_grad():
            end = self._tail(part)
            with logs.of_microbatch(0), during:
                result = end.forward(
                    tuple(values), (part, *step.rest), step.kwargs, seed=step.seeds[0]
                )
        loss = result.get("loss") if isinstance(result, Mapping) else result
        logs.read()
        logged = {key: noted[-1] for key, noted in logs.noted().items()}
        sizes = {key: size for key, each in logs.batch_sizes().items() for size in each.values()}
        return TrialOutcome(loss, logged | returned_numbers(0, result), sizes)

    @cached_property
    def _metrics(self) -> Mapping[str, MetricKind]:
        return find_metrics(self._module)

    def _tail(self, part: Any) -> StageRun:
        with self._plans.trying():
            return tail_of(self._plans, replace(self._step, parts=[part]), 0).end

    @contextmanager
    def _untraced(self) -> Iterator[None]:
        changes = modules_unchanged(self._module.modules())
        with random_state_unchanged(self.device), changes, self._around():
            yield


class _TrialLogs(StepLogs):
    """Keeps logged values to be read later."""

    def __init__(self, module: LightningModule, metrics: MetricCalls) -> None:
        super().__init__(module, metrics)
        self._unread: list[tuple[str, str | None, Any, dict[str, Any]]] = []

    def read(self) -> None:
        """Read the logged values. Called when no mode intercepts operators any more."""
        for each in self._unread:
            super()._keep(*each)
        self._unread = []

    @override
    def _keep(self, name: str, key: str | None, value: Any, options: dict[str, Any]) -> None:
        self._unread.append((name, key, value, options))


MOST_ROWS = 5
"""Rows tried together: the fewest with two cuts into parts of two rows, for batch statistics."""

REPEATED = 3
"""Copies of a row that are run together, so that a divisor that counts it differs from 1."""

MOST_BYTES = 2**28
"""Limit in bytes for the values of :data:`MOST_ROWS` rows; above it three rows are tried."""


class Attempt(NamedTuple):
    """Kind of made-up values: a step may refuse some."""

    is_double: bool
    """Whether they are fp64 instead of their own dtype."""
    is_between_0_and_1: bool
    """Whether they are in (0, 1), as for probabilities."""


ATTEMPTS = tuple(Attempt(double, between) for between in (False, True) for double in (True, False))


@dataclass
class TrialPart:
    """Some of the tried rows, and the step's outcome for them."""

    start: int
    count: int
    values: list[Tensor]
    outcome: TrialOutcome

    @property
    def loss(self) -> Tensor:
        """Loss of these rows, shape ``()``."""
        assert self.outcome.loss is not None
        return self.outcome.loss


@dataclass
class TrialCut:
    """The tried rows, as a whole and in parts."""

    live: list[LiveValue]
    whole: TrialPart
    parts: list[TrialPart]
    weights: dict[int, Tensor | float] = field(default_factory=dict)
    """Weights of the parts' losses, by number of the part; shape ``()`` if tensors."""


def sizes_tried(num_rows: int) -> set[int]:
    """Return the numbers of rows of which :func:`run_cuts` runs the step, for a batch of so many.

    Fewer are run if values are larger than ``MOST_BYTES``.
    """
    count = min(MOST_ROWS, num_rows)
    first = _first_part(range(count))
    return {count, first, count - first} - {0}


def num_tried(trial: Trial) -> int:
    """Return the number of rows to try together."""
    count = min(MOST_ROWS, trial.num_rows)
    specs = trial.values_in(trial.rows(range(count)))
    numels = (math.prod(spec.shape) for spec, _ in specs)
    return min(3, count) if sum(8 * each for each in numels) > MOST_BYTES else count


def run_row(trial: Trial, row: int, attempt: Attempt) -> TrialPart | None:
    """Run the step on ``REPEATED`` copies of a row; None without a finite loss."""
    numbers = [row] * REPEATED
    whole = _run(trial, _made_up(trial, numbers, attempt), numbers, (0, len(numbers)))
    return whole if _has_loss(whole) else None


def run_cuts(trial: Trial, numbers: Sequence[int], attempt: Attempt) -> list[TrialCut]:
    """Run the step on some rows and on parts of them; empty without a finite loss."""
    count, first = len(numbers), _first_part(numbers)
    live = _made_up(trial, numbers, attempt)
    whole = _run(trial, live, numbers, (0, count))
    if not _has_loss(whole):
        return []
    gradients = gradients_of(whole.loss, whole.values)
    if trial.largest(any(not each.isfinite().all() for each in gradients if each is not None)):
        return []
    live = _sharpened(live, gradients)
    if attempt.is_between_0_and_1:
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
        cuts.append(TrialCut(live, whole, parts))
    return cuts


def _first_part(numbers: Sequence[int]) -> int:
    return len(numbers) // 2 + 1 if len(numbers) > 2 else 1


def _made_up(trial: Trial, numbers: Sequence[int], attempt: Attempt) -> list[LiveValue]:
    """Return random values for some rows; rows differ in magnitude.

    Raises:
        BatchLossError: The dim of the rows of a value is unknown.
    """
    # A dim that grows with the number of rows holds rows.
    rows = len(numbers), _first_part(numbers)
    specs, smaller = (trial.values_in(trial.rows(numbers[:each])) for each in rows)
    if len(specs) != len(smaller):
        raise BatchLossError(
            f"training_step uses {len(specs)} values of its layers for {rows[0]} rows and "
            f"{len(smaller)} for {rows[1]}, so its loss cannot be put together from microbatches."
        )
    generator = torch.Generator().manual_seed(SEED)
    made = []
    for (spec, depends), (less, _) in zip(specs, smaller, strict=True):
        dim = _dim_of_rows(spec, less, rows)
        if spec.dtype.is_floating_point:
            tensor = torch.randn(spec.shape, generator=generator, dtype=torch.float32)
            if dim is not None:
                per_row = spec.shape[dim] // rows[0]
                sizes = torch.linspace(0.5, 2.5, rows[0]).repeat_interleave(per_row)
                tensor *= sizes.reshape(-1, *[1] * (len(spec.shape) - dim - 1))
            if attempt.is_between_0_and_1:
                tensor = tensor.sigmoid()
            tensor = tensor.to(trial.device, torch.float64 if attempt.is_double else spec.dtype)
        else:
            tensor = torch.zeros(spec.shape, dtype=spec.dtype, device=trial.device)
        made.append(LiveValue(tensor, dim, spec.needs_grad, depends))
    return made


def _dim_of_rows(spec: ValueSpec, less: ValueSpec, rows: tuple[int, int]) -> int | None:
    if spec.shape == less.shape:
        return None
    pairs = list(zip(spec.shape, less.shape, strict=False))
    for dim, (size, smaller) in enumerate(pairs):
        others = pairs[:dim] + pairs[dim + 1 :]
        is_rows = size != smaller and size * rows[1] == smaller * rows[0] and size % rows[0] == 0
        # Other dims may be shorter if rows are padded to the longest.
        if is_rows and all(one <= other for other, one in others):
            return dim
    raise BatchLossError(
        f"{spec.origin} has the shape {list(spec.shape)} for {rows[0]} rows and "
        f"{list(less.shape)} for {rows[1]}, so the weights of microbatches in training_step's "
        f"loss are unknown."
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
    values = [
        narrowed(value.tensor, value.dim, spec.shape, start, count, len(numbers))
        .clone()
        .requires_grad_(value.needs_grad and value.tensor.is_floating_point())
        for value, (spec, _) in zip(live, trial.values_in(part), strict=True)
    ]
    return TrialPart(start, count, values, trial.run(part, values, during or nullcontext()))


def _has_loss(part: TrialPart) -> bool:
    loss = part.outcome.loss
    return loss is not None and loss.grad_fn is not None and bool(loss.detach().isfinite())
