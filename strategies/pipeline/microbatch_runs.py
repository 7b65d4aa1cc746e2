"""The stages of one step as the executor runs them, microbatch by microbatch.

``SentScalars`` checks scalars that layers make for the loss, such as the auxiliary losses of
routers. The last stage sees of such a scalar neither how it was made nor what it was averaged over,
and weighs it by the rows of its microbatch. So the stage that makes it makes sure that it is a mean
over what grows with the rows.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from boltmesh.errors import ConfigError
from boltmesh.strategies.pipeline.loss.reduction import BatchLossError, read_open
from boltmesh.strategies.pipeline.runtime.stage import ValueSpec
from boltmesh.strategies.pipeline.stage.stage_run import StageRun


class SentScalars:
    """What one stage sends in one step. Made for each step."""

    def __init__(self) -> None:
        self._per_row: dict[int, tuple[float, ...]] = {}

    def check(self, values: Sequence[Tensor], specs: Sequence[ValueSpec], rows: int) -> None:
        """Look at what one microbatch sends.

        Args:
            values: With their graphs.
            specs: What they are.
            rows: Of the microbatch.

        Raises:
            ConfigError: When a scalar that the loss may be made of is no mean over rows.
        """
        for number, (value, spec) in enumerate(zip(values, specs, strict=True)):
            if value.ndim == 0 and value.grad_fn is not None:
                self._check_scalar(number, value, spec, rows)

    def _check_scalar(self, number: int, value: Tensor, spec: ValueSpec, rows: int) -> None:
        try:
            terms = read_open(value.grad_fn, rows)
        except BatchLossError as error:
            raise ConfigError(
                f"{spec.origin} is a scalar. {error.what} Use microbatches=1{error.instead}."
            ) from None
        found = tuple(float(term.count) / rows for term, kind in terms if kind == "mean")
        known = self._per_row.setdefault(number, found)
        is_alike = len(known) == len(found) and all(
            math.isclose(one, other, rel_tol=1e-5) for one, other in zip(known, found, strict=True)
        )
        if not is_alike or any(kind == "sum" for _, kind in terms):
            raise ConfigError(
                f"{spec.origin} is a scalar that is not a mean over the rows of its microbatch, so "
                f"what a later stage makes of it cannot be put together. Return a mean over all "
                f"rows, or the values of single rows, or use microbatches=1."
            )


Around = Callable[[], AbstractContextManager[None]]
"""The precision plugin's context of a step."""


@contextmanager
def cast_once(around: Around, device: torch.device) -> Iterator[Around]:
    """Within, autocast casts each weight once for all microbatches, and keeps one copy of it.

    By itself every microbatch in flight keeps a copy for its backward pass. Weights must not change
    within.

    Args:
        around: Precision.
        device: Where the step runs.

    Yields:
        ``around`` with autocast's cache, which Lightning switches off.
    """

    @contextmanager
    def cached() -> Iterator[None]:
        with around():
            torch.set_autocast_cache_enabled(True)
            yield

    with torch.autocast(device.type, enabled=False):  # the cache lasts as long as the outermost
        yield cached


During = Callable[[int], AbstractContextManager[None]]
"""Takes a microbatch's number; what its run of the step lies in."""

Finish = Callable[[int, Any], tuple[Tensor, ...]]
"""Takes a microbatch's number and what the step returned; returns what to differentiate."""


See = Callable[[int, int, tuple[Tensor, ...], Around], None]
"""Takes a stage, a microbatch, what that begins with there, and the context of its run."""


class TakesOutputs(Protocol):
    """Continues the step for the whole batch, where stages end behind the last unit."""

    def take(self, number: int, outputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Take one microbatch's outputs; return what is differentiated in their place."""


@dataclass(frozen=True)
class MicrobatchRun:
    """What a step is called with, microbatch by microbatch."""

    step: str
    batch: Any
    parts: list[Any]
    rest: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    seeds: list[int]
    sizes: Sequence[int] = ()
    """Rows of the parts, where their losses are put together."""


class MicrobatchStage:
    """One stage of a run, as the executor wants it."""

    def __init__(
        self,
        runs: Sequence[StageRun],
        run: MicrobatchRun,
        around: Around,
        during: During,
        finish: Finish | None = None,
        *,
        is_last: bool,
        batch_tail: TakesOutputs | None = None,
        see: See | None = None,
    ) -> None:
        """Prepare the stage.

        Args:
            runs: The stage, by microbatch.
            run: What the step is called with.
            around: Precision.
            during: What each microbatch is run in.
            finish: Takes what the last stage returned, where it runs to the end of the step.
            is_last: Whether no other stage follows.
            batch_tail: Where the stage ends behind its last unit, what takes its outputs.
            see: Called with what a microbatch begins with.
        """
        self.index = runs[0].plan.stage
        self.is_first = self.index == 0
        self.is_last = is_last
        self._runs = runs
        self._run = run
        self._around = around
        self._during = during
        self._finish = finish
        self._batch_tail = batch_tail
        self._see = see
        self._scalars = SentScalars()

    def values_in(self, microbatch: int) -> tuple[ValueSpec, ...]:
        """Return what the boundary before this stage carries."""
        return self._runs[microbatch].plan.values_in

    def values_out(self, microbatch: int) -> tuple[ValueSpec, ...]:
        """Return what the boundary behind this stage carries."""
        return self._runs[microbatch].plan.values_out

    def forward(self, microbatch: int, received: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Run the step on a microbatch as far as this stage goes; return what it hands on."""
        run = self._run
        if self._see is not None:
            self._see(self.index, microbatch, received, self._around)
        with self._around():
            with self._during(microbatch):
                result = self._runs[microbatch].forward(
                    received,
                    (run.parts[microbatch], *run.rest),
                    run.kwargs,
                    seed=run.seeds[microbatch],
                )
            if self._batch_tail is None:
                return self._finished(microbatch, result)
        return self._batch_tail.take(microbatch, result)

    def _finished(self, microbatch: int, result: Any) -> tuple[Tensor, ...]:
        if self._finish is not None:
            return self._finish(microbatch, result)
        values: tuple[Tensor, ...] = result
        sizes = self._run.sizes
        if not self.is_last and len(sizes) > 1:
            self._scalars.check(values, self.values_out(microbatch), sizes[microbatch])
        return values
