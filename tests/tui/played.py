"""Recordings to test with: a small job that does a step a second."""

from pathlib import Path
from typing import Any

import msgspec

from boltmesh.telemetry.snapshot import MetricPoint
from boltmesh.tui.commands.record import RecordingWriter
from boltmesh.tui.devices import DeviceReading
from boltmesh.tui.sources.live import Observation
from tests.tui.samples import NOW, job, rank, step, total

RING = 8
"""Steps that the rings of the job hold."""


def look(second: int, *, last: int | None = None, **changes: Any) -> Observation:
    """What a viewer sees of the job after so many seconds; after ``last`` it has finished."""
    steps = tuple(
        step(index, end_time=NOW + index, loss=10.0 - index / 100)
        for index in range(max(0, second - RING), second)
    )
    history = tuple(MetricPoint("loss", index + 1, 10.0 - index / 100) for index in range(second))
    is_over = last is not None and second >= last
    ranks = tuple(
        rank(
            number,
            steps=steps,
            global_step=second,
            last_seen=NOW + second,
            state="finished" if is_over else "running",
            collectives=(total(calls=second, payload_bytes=100 * second),),
        )
        for number in range(2)
    )
    fields: dict[str, Any] = {
        "ranks": ranks,
        "global_step": second,
        "history": history,
        "metrics": {"loss": history[-1].value} if history else {},
        "started": NOW,
        "updated": NOW + second,
        "state": "finished" if is_over else "running",
    }
    device = DeviceReading(kind="process", ranks=(0,), name="here", pid=1, utilization_percent=50.0)
    return Observation(time=NOW + second, job=job(**fields | changes), devices=(device,))


def write(path: Path, *looks: Observation) -> Path:
    """Record observations as they are."""
    with RecordingWriter(path) as recording:
        for seen in looks:
            recording.add(seen)
    return path


def rewound(seen: Observation) -> Observation:
    """The same, as a source gives it after it went back."""
    return msgspec.structs.replace(seen, is_rewound=True)
