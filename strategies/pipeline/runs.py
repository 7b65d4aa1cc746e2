"""The stages of one step as the executor runs them, microbatch by microbatch."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from boltmesh.strategies.pipeline.replay.stage_run import StageRun
from boltmesh.strategies.pipeline.scalars import SentScalars
from boltmesh.strategies.pipeline.values import ValueSpec

Around = Callable[[], AbstractContextManager[None]]
"""The precision plugin's context of a step."""

During = Callable[[int], AbstractContextManager[None]]
"""Takes a microbatch's number; what its run of the step lies in."""

Finish = Callable[[int, Any], tuple[Tensor, ...]]
"""Takes a microbatch's number and what the step returned; returns what to differentiate."""


@dataclass(frozen=True)
class Run:
    """What a step is called with, microbatch by microbatch."""

    step: str
    batch: Any
    parts: list[Any]
    rest: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    seeds: list[int]
    sizes: Sequence[int] = ()
    """Rows of the parts, where their losses are put together."""


class RunStage:
    """One stage of a run, as the executor wants it."""

    def __init__(
        self,
        runs: Sequence[StageRun],
        run: Run,
        around: Around,
        during: During,
        finish: Finish | None = None,
        *,
        is_last: bool,
    ) -> None:
        """Prepare the stage.

        Args:
            runs: The stage, by microbatch.
            run: What the step is called with.
            around: Precision.
            during: What each microbatch is run in.
            finish: Takes what the last stage returned, where it runs to the end of the step.
            is_last: Whether no other stage follows.
        """
        self.index = runs[0].plan.stage
        self.is_first = self.index == 0
        self.is_last = is_last
        self._runs = runs
        self._run = run
        self._around = around
        self._during = during
        self._finish = finish
        self._scalars = SentScalars()

    def values_in(self, microbatch: int) -> tuple[ValueSpec, ...]:
        """Return what the border before this stage carries."""
        return self._runs[microbatch].plan.values_in

    def values_out(self, microbatch: int) -> tuple[ValueSpec, ...]:
        """Return what the border behind this stage carries."""
        return self._runs[microbatch].plan.values_out

    def forward(self, microbatch: int, received: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Run the step on a microbatch as far as this stage goes; return what it hands on."""
        run = self._run
        with self._around():
            with self._during(microbatch):
                result = self._runs[microbatch].forward(
                    received,
                    (run.parts[microbatch], *run.rest),
                    run.kwargs,
                    seed=run.seeds[microbatch],
                )
            values: tuple[Tensor, ...] = (
                result if self._finish is None else self._finish(microbatch, result)
            )
            if not self.is_last and len(run.sizes) > 1:
                self._scalars.check(values, self.values_out(microbatch), run.sizes[microbatch])
        return values
