"""A synthetic job for a demonstration: seeded, without files, a pure function of the time.

Eight ranks train a GPT of three billion parameters, pipeline 2 x data 2 x tensor 2. The same seed
and the same moment give the same observation, so tests and the screenshot are made from it too.
"""

import functools
import time
from collections.abc import Callable, Mapping

from boltmesh.tui.demo.job import SimulatedJob
from boltmesh.tui.demo.setup import (
    DEFAULT_MESH,
    EXPERTS_MESH,
    HEAD_START,
    STEP_S,
    Scenario,
    Setup,
    mesh_of,
)
from boltmesh.tui.sources.live import Observation

__all__ = [
    "DEFAULT_MESH",
    "EXPERTS_MESH",
    "HEAD_START",
    "STEP_S",
    "DemoSource",
    "Scenario",
    "mesh_of",
    "observe",
]


class DemoSource:
    """Looks like a job that was started half an hour ago.

    Args:
        clock: The wall clock.
        scenario: The fault; a hang or a crash comes right after the head start.
        mesh: Axis to size; ``mesh_of`` gives one for any number of ranks.
    """

    def __init__(
        self,
        *,
        clock: Callable[[], float] = time.time,
        scenario: Scenario = "healthy",
        mesh: Mapping[str, int] = DEFAULT_MESH,
    ) -> None:
        self._job = SimulatedJob(
            Setup.create(0, scenario, mesh), started=clock() - HEAD_START * STEP_S
        )
        self._clock = clock

    def read(self) -> Observation:
        """Return the job as it is at this moment of the clock."""
        return self._job.observe(self._clock())

    def close(self) -> None:
        """There is nothing to let go of."""


def observe(
    seed: int,
    *,
    started: float,
    now: float,
    scenario: Scenario = "healthy",
    mesh: Mapping[str, int] = DEFAULT_MESH,
) -> Observation:
    """Return the job that began at ``started``, as seen at ``now``."""
    return _job(Setup.create(seed, scenario, mesh), started).observe(now)


@functools.lru_cache(maxsize=2)
def _job(setup: Setup, started: float) -> SimulatedJob:
    """Keep the last jobs: their parts are expensive to make and cheap to look at again."""
    return SimulatedJob(setup, started)
