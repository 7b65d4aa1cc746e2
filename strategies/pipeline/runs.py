"""The stages of one step as the executor runs them, microbatch by microbatch."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from boltmesh.strategies.pipeline.replay.stage_run import StageRun
from boltmesh.strategies.pipeline.step_logs import StepLogs
from boltmesh.strategies.pipeline.values import ValueSpec

Around = Callable[[], AbstractContextManager[None]]
"""The precision plugin's context of a step."""

Finish = Callable[[int, Any], tuple[Tensor, ...]]
"""Takes a microbatch's number and what the step returned; returns what to differentiate."""


@dataclass(frozen=True)
class Run:
    """What a step is called with, microbatch by microbatch."""

    step: str
    parts: list[Any]
    rest: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    seeds: list[int]


class RunStage:
    """One stage of a run, as the executor wants it."""

    def __init__(
        self,
        index: int,
        runs: Sequence[StageRun],
        run: Run,
        finish: Finish,
        around: Around,
        logs: StepLogs,
        counts: Any,
    ) -> None:
        self.index = index
        self.is_first = index == 0
        self.is_last = runs[0].plan.is_last
        self._runs = runs
        self._run = run
        self._finish = finish
        self._around = around
        self._logs = logs
        self._counts = counts

    def values_in(self, microbatch: int) -> tuple[ValueSpec, ...]:
        """Return what the border before this stage carries."""
        return self._runs[microbatch].plan.values_in

    def values_out(self, microbatch: int) -> tuple[ValueSpec, ...]:
        """Return what the border behind this stage carries."""
        return self._runs[microbatch].plan.values_out

    def forward(self, microbatch: int, received: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Run the step on a microbatch as far as this stage goes; return what it hands on."""
        run = self._run
        with ExitStack() as stack:
            stack.enter_context(self._around())
            stack.enter_context(self._logs.of_microbatch(microbatch))
            if self._counts is not None:
                stack.enter_context(self._counts)
            result = self._runs[microbatch].forward(
                received,
                (run.parts[microbatch], *run.rest),
                run.kwargs,
                seed=run.seeds[microbatch],
            )
            if self.is_last:
                return self._finish(microbatch, result)
        values: tuple[Tensor, ...] = result
        return values
