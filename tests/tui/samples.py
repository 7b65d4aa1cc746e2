"""Jobs, ranks and sources to test the dashboard with; every field can be changed by keyword."""

from collections.abc import Mapping
from typing import Any

from boltmesh.errors import TelemetryError
from boltmesh.telemetry.reader.reader import JobSummary
from boltmesh.telemetry.snapshot import (
    SCHEMA_VERSION,
    CollectiveTotal,
    JobSnapshot,
    Memory,
    MetricPoint,
    PhaseTime,
    RankSnapshot,
    StepRecord,
)
from boltmesh.tui.demo import DEFAULT_MESH, HEAD_START, STEP_S, Scenario, observe
from boltmesh.tui.sources.live import Observation
from boltmesh.tui.state import State, fold

NOW = 1_763_700_000.0
"""The frozen clock: 2025-11-21 04:40:00 UTC."""


def step(index: int, **changes: Any) -> StepRecord:
    fields: dict[str, Any] = {
        "index": index,
        "global_step": index + 1,
        "epoch": 0,
        "end_time": NOW - 100 + 0.5 * index,
        "seconds": 0.5,
        "phases": (PhaseTime("forward", 0.2), PhaseTime("backward", 0.3)),
        "loss": 2.0,
        "samples": 4,
        "tokens": 512,
    }
    return StepRecord(**fields | changes)


def rank(number: int = 0, **changes: Any) -> RankSnapshot:
    fields: dict[str, Any] = {
        "rank": number,
        "pid": 1000 + number,
        "host": "elsewhere",
        "device": "cpu",
        "device_uuid": None,
        "state": "running",
        "coordinates": {"pipeline": 0, "data": number, "tensor": 0},
        "phase": "forward",
        "global_step": 10,
        "epoch": 0,
        "last_seen": NOW,
        "steps": tuple(step(index) for index in range(10)),
        "samples_per_second": 8.0,
        "tokens_per_second": 1024.0,
        "memory": Memory(2**30, None, None, None),
        "collectives": (),
        "in_flight": None,
        "error": None,
    }
    return RankSnapshot(**fields | changes)


def job(**changes: Any) -> JobSnapshot:
    ranks = changes.get("ranks", (rank(0), rank(1)))
    fields: dict[str, Any] = {
        "schema": SCHEMA_VERSION,
        "id": "abc123",
        "name": "sample",
        "state": "running",
        "user": "somebody",
        "command": ("boltmesh", "fit", "ddp"),
        "folder": "/work",
        "started": NOW - 100,
        "updated": NOW,
        "strategy": "DDPStrategy",
        "mesh": {"pipeline": 1, "data": len(ranks), "tensor": 1},
        "world_size": len(ranks),
        "versions": {},
        "hyperparameters": {},
        "max_steps": 100,
        "epoch": 0,
        "global_step": 10,
        "metrics": {},
        "history": (),
        "samples_per_second": 16.0,
        "tokens_per_second": 2048.0,
        "ranks": ranks,
        "expected": (),
        "communication_note": None,
        "events": (),
        "cause": None,
        "checkpoint": None,
    }
    return JobSnapshot(**fields | changes)


def total(axis: str = "data", operator: str = "allreduce", **changes: Any) -> CollectiveTotal:
    fields: dict[str, Any] = {
        "axis": axis,
        "group": axis,
        "operator": operator,
        "calls": 20,
        "payload_bytes": 20_000,
        "calls_per_step": 2.0,
        "bytes_per_step": 2000.0,
        "seconds_per_step": None,
    }
    return CollectiveTotal(**fields | changes)


def losses(*values: float, first: int = 1) -> tuple[MetricPoint, ...]:
    return tuple(MetricPoint("loss", first + at, value) for at, value in enumerate(values))


def state(snapshot: JobSnapshot | None = None, *, time: float = NOW) -> State:
    return fold(None, Observation(time=time, job=snapshot or job()))


def demo(
    *,
    later_s: float = 0.0,
    scenario: Scenario = "healthy",
    mesh: Mapping[str, int] = DEFAULT_MESH,
) -> Observation:
    """The demo as it is at the frozen clock."""
    return observe(
        0,
        started=NOW - HEAD_START * STEP_S,
        now=NOW + later_s,
        scenario=scenario,
        mesh=mesh,
    )


def crashed_demo() -> Observation:
    """The demo half a minute after the kernel took rank 5."""
    return demo(later_s=30, scenario="crashed")


def summary(number: int, **changes: Any) -> JobSummary:
    fields: dict[str, Any] = {
        "id": f"job{number}",
        "name": f"run {number}",
        "state": "running",
        "user": "somebody",
        "strategy": "DDPStrategy",
        "mesh": {"pipeline": 1, "data": 2, "tensor": 1},
        "world_size": 2,
        "global_step": 100 * number,
        "epoch": 0,
        "started": NOW - 3600 * number,
        "updated": NOW,
        "path": f"/tmp/run/job{number}",
        "host": "node1",
        "max_steps": 10_000,
        "samples_per_second": 1234.5,
    }
    return JobSummary(**fields | changes)


class FakeSource:
    """Gives one observation after the other, and the last one again and again."""

    def __init__(self, *observations: Observation) -> None:
        self._waiting = list(observations)
        self._last = observations[0]
        self.lost: str | None = None
        self.is_closed = False
        self.num_reads = 0

    def read(self) -> Observation:
        self.num_reads += 1
        if self.lost is not None:
            raise TelemetryError(self.lost)
        if self._waiting:
            self._last = self._waiting.pop(0)
        return self._last

    def close(self) -> None:
        self.is_closed = True
