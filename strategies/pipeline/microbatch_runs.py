"""Stages of one step for the runtime, microbatch by microbatch.

``SentScalars`` checks scalars that layers compute for the loss, such as the auxiliary losses of
routers. The last stage has neither the graph of such a scalar nor its count, and weights it by the
rows of its microbatch. So the stage that computes it checks that it is a mean whose count is
proportional to the rows.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from boltmesh.errors import ConfigError
from boltmesh.strategies.pipeline.loss.reduction import BatchLossError, read_open
from boltmesh.strategies.pipeline.runtime.stage import ValueSpec
from boltmesh.strategies.pipeline.stage.stage_run import StageRun


class SentScalars:
    """Checks the scalars that one stage sends. Made for each step."""

    def __init__(self) -> None:
        self._per_row: dict[int, tuple[float, ...]] = {}

    def check(self, values: Sequence[Tensor], specs: Sequence[ValueSpec], rows: int) -> None:
        """Check the values that a stage sends for one microbatch.

        Args:
            values: The values, with their graphs and the shapes of ``specs``.
            specs: Specs of the values.
            rows: Rows of the microbatch.

        Raises:
            ConfigError: A scalar that may be part of the loss is no mean over rows.
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
        ratios = tuple(float(term.count) / rows for term, kind in terms if kind == "mean")
        known = self._per_row.setdefault(number, ratios)
        is_alike = len(known) == len(ratios) and all(
            math.isclose(one, other, rel_tol=1e-5) for one, other in zip(known, ratios, strict=True)
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
    """Let autocast cast each weight once for all microbatches.

    Without it every microbatch in flight keeps a copy for its backward pass. Weights must not
    change within the context.

    Args:
        around: The precision context.
        device: Device of the step.

    Yields:
        ``around`` with autocast's cache, which Lightning turns off.
    """

    @contextmanager
    def cached() -> Iterator[None]:
        with around():
            torch.set_autocast_cache_enabled(True)
            yield

    with torch.autocast(device.type, enabled=False):  # the outermost context keeps the cache
        yield cached


During = Callable[[int], AbstractContextManager[None]]
"""Takes a microbatch's number; returns the context of its run of the step."""

Finish = Callable[[int, Any], tuple[Tensor, ...]]
"""Takes a microbatch's number and the step's result; returns the losses to differentiate, each of
shape ``()``."""

TakeOutputs = Callable[[int, tuple[Tensor, ...]], tuple[Tensor, ...]]
"""Takes a microbatch's number and its outputs of the last unit; returns tensors to differentiate
instead."""

See = Callable[[int, int, tuple[Tensor, ...], Around], None]
"""Takes a stage, a microbatch, its inputs there, and the context of its run."""


@dataclass(frozen=True)
class MicrobatchRun:
    """Arguments of a step, microbatch by microbatch."""

    step: str
    batch: Any
    parts: list[Any]
    rest: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    seeds: list[int]
    sizes: Sequence[int] = ()
    """Rows of the parts, if their losses are combined."""


class MicrobatchStage:
    """One stage of a run; implements ``PipelineStage``."""

    def __init__(
        self,
        runs: Sequence[StageRun],
        run: MicrobatchRun,
        around: Around,
        during: During,
        finish: Finish | None = None,
        *,
        is_last: bool,
        batch_tail: TakeOutputs | None = None,
        see: See | None = None,
    ) -> None:
        """Prepare the stage.

        Args:
            runs: The stage, by microbatch.
            run: Arguments of the step.
            around: The precision context.
            during: Context of each microbatch.
            finish: Takes the step's result, if the last stage runs to the end of the step.
            is_last: Whether no other stage follows.
            batch_tail: Takes the outputs of the last unit, if the stage ends behind it.
            see: Called with the inputs of each microbatch.
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
        """Return the specs of the values sent over the boundary before this stage."""
        return self._runs[microbatch].plan.values_in

    def values_out(self, microbatch: int) -> tuple[ValueSpec, ...]:
        """Return the specs of the values sent over the boundary behind this stage."""
        return self._runs[microbatch].plan.values_out

    def forward(self, microbatch: int, received: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Run this stage's part of the step on a microbatch.

        Args:
            microbatch: Number of the microbatch.
            received: Inputs, of the shapes and dtypes of ``values_in``.

        Returns:
            Outputs of ``values_out``; of the last stage the losses to differentiate.

        Raises:
            ConfigError: A scalar that is sent is no mean over rows.
        """
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
        return self._batch_tail(microbatch, result)

    def _finished(self, microbatch: int, result: Any) -> tuple[Tensor, ...]:
        if self._finish is not None:
            return self._finish(microbatch, result)
        values: tuple[Tensor, ...] = result
        sizes = self._run.sizes
        if not self.is_last and len(sizes) > 1:
            self._scalars.check(values, self.values_out(microbatch), sizes[microbatch])
        return values
