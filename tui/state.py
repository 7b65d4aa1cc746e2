"""Everything the dashboard knows, as one immutable value folded from a source's observations.

The rings of a job forget; the state remembers each metric for as long as the job is watched,
thinned so that its size stays bounded however long that is.
"""

import math
from collections.abc import Mapping

import msgspec

from boltmesh.telemetry.snapshot import JobSnapshot, MetricPoint
from boltmesh.tui.devices import DeviceReading
from boltmesh.tui.sources.live import Observation

MAX_POINTS = 4096
"""Points kept of one metric; beyond it every second one of the older half goes."""


class Series(msgspec.Struct, frozen=True):
    """One metric over the run, steps ascending."""

    steps: tuple[float, ...]
    values: tuple[float, ...]


class State(msgspec.Struct, frozen=True):
    """Contents of the screens."""

    time: float
    """When the job was last seen, by the watcher's wall clock."""
    job: JobSnapshot
    devices: tuple[DeviceReading, ...]
    series: Mapping[str, Series]
    trends: Mapping[str, Series] = {}
    """The same for the costs of the job, as ``JobSnapshot.trends`` names them."""
    standing: frozenset[str] = frozenset()
    """Kinds of the findings at the look before."""
    other: "State | None" = None
    """The run that this one is compared with."""
    lost: str | None = None
    """Why the job can no longer be read, while its last data stay on the screen."""


def fold(state: State | None, seen: Observation) -> State:
    """Return ``state`` with one more observation.

    Another job, another start under the same id, or an earlier time begins afresh.
    """
    goes_on = (
        state is not None
        and (state.job.id, state.job.started) == (seen.job.id, seen.job.started)
        and not seen.is_rewound
    )
    series: Mapping[str, Series] = {}
    trends: Mapping[str, Series] = {}
    standing: frozenset[str] = frozenset()
    before: JobSnapshot | None = None
    if state is not None and goes_on:
        from boltmesh.tui.metrics.findings.diagnose import diagnose  # it reads states

        standing = frozenset(finding.kind for finding in diagnose(state))
        series, trends, before = state.series, state.trends, state.job
    return State(
        time=seen.time,
        job=seen.job,
        devices=seen.devices,
        series=_extend(series, before.history if before else (), seen.job.history),
        trends=_extend(trends, before.trends if before else (), seen.job.trends),
        standing=standing,
    )


def fold_loss_of_source(state: State, reason: str) -> State:
    """Return ``state`` marked as the last that is known, and why."""
    return msgspec.structs.replace(state, lost=reason)


def metric_names(state: State) -> tuple[str, ...]:
    """Return the metrics that have a series: the loss first, then by name."""
    return tuple(sorted(state.series, key=lambda name: (name != "loss", name)))


def _extend(
    known: Mapping[str, Series], last: tuple[MetricPoint, ...], history: tuple[MetricPoint, ...]
) -> Mapping[str, Series]:
    """Return series with the points that are new in a history.

    Args:
        known: The series.
        last: The history at the look before. Where that of now has the same objects first, the
            rest alone is new.
        history: That of now.
    """
    num_known = len(last)
    if 0 < num_known <= len(history) and history[num_known - 1] is last[-1]:
        history = history[num_known:]
    fresh: dict[str, list[MetricPoint]] = {}
    newest: dict[str, float] = {name: series.steps[-1] for name, series in known.items()}
    for point in history:
        if point.global_step > newest.get(point.name, -math.inf):
            newest[point.name] = point.global_step
            fresh.setdefault(point.name, []).append(point)
    extended = dict(known)
    for name, points in fresh.items():
        before = known.get(name, Series((), ()))
        extended[name] = _thin(
            Series(
                steps=before.steps + tuple(point.global_step for point in points),
                values=before.values + tuple(point.value for point in points),
            )
        )
    return extended


def _thin(series: Series) -> Series:
    while len(series.steps) > MAX_POINTS:
        half = len(series.steps) // 2
        series = Series(
            steps=series.steps[:half:2] + series.steps[half:],
            values=series.values[:half:2] + series.values[half:],
        )
    return series
