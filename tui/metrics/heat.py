"""One figure of every rank beside each other, on a scale whose ends are named.

A scale is never narrower than what is worth a look: ranks that differ by noise all look the same.
"""

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Final, Literal

import msgspec

from boltmesh.tui import units
from boltmesh.tui.metrics.memo import remember_last
from boltmesh.tui.metrics.pipelines import mean_idle_shares, pipelines
from boltmesh.tui.metrics.ranks import RankRow, ShownState, rank_rows
from boltmesh.tui.metrics.status import rates_are_current
from boltmesh.tui.metrics.step_time import optimizer_step_seconds
from boltmesh.tui.state import State
from boltmesh.tui.view import View

Mark = ShownState | Literal["not finite"]
"""Statistics without an order."""


class HeatValue(msgspec.Struct, frozen=True):
    """One rank."""

    text: str
    """The figure as people read it."""
    level: float | None
    """From 0, the low end of the scale, to 1; None if there is no figure."""
    mark: Mark | None
    """Shown instead of the level."""
    value: float | None = None
    """The figure itself, where it is finite."""


class Heat(msgspec.Struct, frozen=True):
    """All ranks in one figure."""

    figure: str
    title: str
    """Subject of the figure, where its name does not say it."""
    values: Mapping[int, HeatValue]
    low: str
    """The scale's ends in words; empty where no rank has a figure."""
    high: str
    is_bad_high: bool
    """Whether more is worse; the worst of several ranks is shown where one cell stands for them."""
    widest: int
    """Characters of the longest text of a rank."""
    text: Callable[[float | None], str] = units.number
    """Writes a figure of this kind."""


class _Figure(msgspec.Struct, frozen=True):
    value: Callable[[RankRow], float | None] | None
    """Value of a rank; None where it needs the whole state."""
    text: Callable[[float | None], str]
    ends: tuple[float, float] | None = None
    """Ends of the scale; None: from the least to the most of the ranks."""
    least_span: float = 0.0
    """The scale's least width, as a share of its high end."""
    is_bad_high: bool = True
    of_all: Callable[[State], Mapping[int, float]] | None = None
    """Values of all ranks at once; those that are missing are not known."""


def _idle(state: State) -> dict[int, float]:
    """Return the mean idle share of each rank in the whole steps of its pipeline."""
    return {
        rank: share
        for pipeline in pipelines(state.job)
        if pipeline.whole
        for rank, share in zip(pipeline.ranks, mean_idle_shares(pipeline), strict=True)
    }


def _bytes_per_second(state: State) -> dict[int, float]:
    """Return the payload of a step's operators on each rank, over the time of a step."""
    step_s = optimizer_step_seconds(state.job)
    if not step_s or not rates_are_current(state):
        return {}
    found: dict[int, float] = {}
    for rank in state.job.ranks:
        sizes = [each.bytes_per_step for each in rank.collectives if each.bytes_per_step]
        if sizes:
            found[rank.rank] = sum(sizes) / step_s
    return found


def _share(value: float | None) -> str:
    return units.percent(None if value is None else 100 * value)


def _steps(value: float | None) -> str:
    return units.count(value)


_TIMES: Final = 0.2
"""``least_span`` of rates and times: a fifth is worth a look, less is what machines differ by."""

_FIGURES: Final[Mapping[str, _Figure]] = MappingProxyType(
    {
        "compute time": _Figure(lambda row: row.compute_s, units.seconds, least_span=_TIMES),
        "step time": _Figure(lambda row: row.step_s, units.seconds, least_span=_TIMES),
        "communication": _Figure(
            lambda row: row.phase_share("communication"), _share, ends=(0.0, 0.5)
        ),
        "bubble": _Figure(None, _share, ends=(0.0, 0.5), of_all=_idle),
        "bytes/s": _Figure(None, units.bandwidth, least_span=_TIMES, of_all=_bytes_per_second),
        "data": _Figure(lambda row: row.phase_share("data", "transfer"), _share, ends=(0.0, 0.5)),
        "utilisation": _Figure(
            lambda row: _percent(row.utilization_percent),
            _share,
            ends=(0.0, 1.0),
            is_bad_high=False,
        ),
        "memory": _Figure(lambda row: row.memory_share, _share, ends=(0.0, 1.0)),
        "memory used": _Figure(lambda row: row.memory_used_bytes, units.memory, least_span=_TIMES),
        "temperature": _Figure(
            lambda row: row.temperature_celsius, units.celsius, ends=(30.0, 95.0)
        ),
        "tokens/s": _Figure(
            lambda row: row.tokens_per_second, units.rate, least_span=_TIMES, is_bad_high=False
        ),
        "samples/s": _Figure(
            lambda row: row.samples_per_second, units.rate, least_span=_TIMES, is_bad_high=False
        ),
        "behind": _Figure(lambda row: float(row.behind), _steps, ends=(0.0, 4.0)),
        "loss": _Figure(lambda row: row.loss, units.number, least_span=0.1),
    }
)

_TITLES: Final[Mapping[str, str]] = MappingProxyType(
    {
        "compute time": "compute time (excl. comm wait)",
        "communication": "exposed communication, share of a step",
        "bubble": "bubble, idle share of the pipeline's time",
        "bytes/s": "bytes/s, payload of all operators",
        "data": "input, share of a step",
        "behind": "steps behind the first",
    }
)

STATE: Final = "state"
HEAT_FIGURES: Final = (*_FIGURES, STATE)
"""The figures that the map can show; the last one is no number."""


def _percent(value: float | None) -> float | None:
    return None if value is None else value / 100


def chosen_heat(view: View) -> str:
    """Return the figure that maps of the ranks show."""
    return view.heat_figure if view.heat_figure in HEAT_FIGURES else HEAT_FIGURES[0]


def heat(state: State, figure: str) -> Heat:
    """Return ``figure`` of every rank; the first of HEAT_FIGURES for an unknown name."""
    known = _known(state)
    if figure not in known:
        known[figure] = _heat(state, figure)
    return known[figure]


@remember_last
def _known(state: State) -> dict[str, Heat]:
    """Return the heats of this state by figure; ``heat`` adds to them."""
    del state
    return {}


def _heat(state: State, figure: str) -> Heat:
    if figure == STATE:
        return _states(state)
    name = figure if figure in _FIGURES else HEAT_FIGURES[0]
    shown = _FIGURES[name]
    of_ranks = {} if shown.of_all is None else shown.of_all(state)
    found = {
        row.rank: (row, of_ranks.get(row.rank) if shown.value is None else shown.value(row))
        for row in rank_rows(state)
    }
    finite = [value for _, value in found.values() if value is not None and math.isfinite(value)]
    low, high = _ends(shown, finite)
    values = {rank: _value(row, value, shown, low, high) for rank, (row, value) in found.items()}
    return Heat(
        figure=name,
        title=_TITLES.get(name, name),
        values=values,
        low=shown.text(low) if finite else "",
        high=shown.text(high) if finite else "",
        is_bad_high=shown.is_bad_high,
        widest=_widest(values),
        text=shown.text,
    )


def _ends(shown: _Figure, finite: list[float]) -> tuple[float, float]:
    if not finite:
        return 0.0, 1.0
    least, most = min(finite), max(finite)
    if shown.ends is not None:
        return min(shown.ends[0], least), max(shown.ends[1], most)
    span = max(most - least, shown.least_span * abs(most))
    if span <= 0:
        return least, least + 1.0
    # Normal values have the colour of the good end, so that only exceptions are visible.
    return (least, least + span) if shown.is_bad_high else (most - span, most)


def _value(row: RankRow, value: float | None, shown: _Figure, low: float, high: float) -> HeatValue:
    mark: Mark | None = row.state if row.state in {"failed", "dead", "missing"} else None
    text = shown.text(value)
    if value is None:
        return HeatValue(row.state if mark is not None else text, None, mark)
    if not math.isfinite(value):
        return HeatValue(text, None, mark or "not finite")
    # Two floats may be further apart than the largest one.
    span = high / 2 - low / 2
    level = (value / 2 - low / 2) / span if span > 0 else 0.0
    return HeatValue(text, min(1.0, max(0.0, level)), mark, value)


def _widest(values: Mapping[int, HeatValue]) -> int:
    return max((len(value.text) for value in values.values()), default=0)


def _states(state: State) -> Heat:
    values = {
        row.rank: HeatValue(row.state if row.phase is None else row.phase, None, row.state)
        for row in rank_rows(state)
    }
    return Heat(
        figure=STATE,
        title=STATE,
        values=values,
        low="",
        high="",
        is_bad_high=True,
        widest=_widest(values),
    )
