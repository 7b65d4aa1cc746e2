"""Runs the end of a step on a few rows with made-up values, as a whole and in parts."""

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from boltmesh.strategies.pipeline.draws import SharedDraws
from boltmesh.strategies.pipeline.live_values import LiveValue, made_up, sharpened, taken
from boltmesh.strategies.pipeline.trial import Outcome, Trial

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
class Part:
    """Some of the tried rows, and what the step gave for them."""

    start: int
    count: int
    values: list[Tensor]
    outcome: Outcome

    @property
    def loss(self) -> Tensor:
        """Of these rows."""
        assert self.outcome.loss is not None
        return self.outcome.loss


@dataclass
class Cut:
    """The tried rows, as a whole and in parts."""

    live: list[LiveValue]
    whole: Part
    parts: list[Part]
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
) -> Part | None:
    """Run the step on some rows; None where it gives no loss."""
    whole = _run(trial, _made_up(trial, numbers, device, attempt), numbers, (0, len(numbers)))
    return whole if _has_loss(whole) else None


def run_cuts(
    trial: Trial, numbers: Sequence[int], device: torch.device, attempt: Attempt
) -> list[Cut]:
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
        cuts.append(Cut(live, whole, parts))
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
) -> Part:
    start, count = rows
    part = trial.rows(numbers[start : start + count])
    values = taken(live, trial.values_in(part), start, count, len(numbers))
    return Part(start, count, values, trial.run(part, values, during or nullcontext()))


def _has_loss(part: Part) -> bool:
    loss = part.outcome.loss
    return loss is not None and loss.grad_fn is not None and bool(loss.detach().isfinite())


def gradients_of(loss: Tensor, values: Sequence[Tensor]) -> list[Tensor | None]:
    """Return gradients of a loss; None of values that have none. The graph is kept."""
    wanted = [each for each in values if each.requires_grad]
    if not wanted or not loss.requires_grad:
        return [None] * len(values)
    made = iter(torch.autograd.grad(loss, wanted, allow_unused=True, retain_graph=True))
    return [next(made) if each.requires_grad else None for each in values]
