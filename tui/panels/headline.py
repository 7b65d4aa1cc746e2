"""One line of the headline figures with their levels: on every screen of a job."""

from collections.abc import Iterator
from typing import Final, Literal

import msgspec

from boltmesh.tui import units
from boltmesh.tui.metrics.figures import Figures, figures
from boltmesh.tui.metrics.ranks import rank_rows
from boltmesh.tui.metrics.status import job_stalled_seconds
from boltmesh.tui.panels.throughput import Unit, rate_now, throughput
from boltmesh.tui.render.line import Line
from boltmesh.tui.render.style import Style, facts, labelled
from boltmesh.tui.state import State

Level = Literal["good", "warn", "bad"]


class Limits(msgspec.Struct, frozen=True):
    """From which value on a share is amber and red; where ``bad < warn`` low values are worse."""

    warn: float
    bad: float

    def level(self, value: float) -> Level:
        """Return the level of a value."""
        sign = 1 if self.bad > self.warn else -1
        if sign * value >= sign * self.bad:
            return "bad"
        return "warn" if sign * value >= sign * self.warn else "good"


MFU: Final = Limits(warn=0.35, bad=0.15)
UTILISATION: Final = Limits(warn=0.8, bad=0.5)
MEMORY: Final = Limits(warn=0.9, bad=0.97)
BUBBLE: Final = Limits(warn=0.2, bad=0.4)
EXPOSED: Final = Limits(warn=0.15, bad=0.3)

MARKS: Final[dict[Level, str]] = {"good": "", "warn": "!", "bad": "!!"}
"""Marks that stand for a level without colour."""


def draw_headline(state: State, width: int, look: Style) -> Line:
    """Rate, MFU, utilisation, memory, bubble, exposed communication and step time.

    As many of the first as fit. Rates of a stalled job are not known; nothing of a job that is
    stalled or has ended has a level, and its devices may serve others by now.
    """
    return facts(_parts(state), width)


def _parts(state: State) -> Iterator[Line]:
    found = figures(state)
    unit: Unit = "samples" if throughput(state.job, "tokens") is None else "tokens"
    yield labelled(f"{unit}/s", rate_now(state, unit), "strong")
    is_stalled = job_stalled_seconds(state) is not None
    is_running = state.job.state == "running"
    has_levels = is_running and not is_stalled
    if not is_stalled:
        yield from _work(found)
    rows = rank_rows(state)
    shares = [row.memory_share for row in rows if row.memory_share is not None]
    if is_running and (used := found.utilisation.value) is not None:
        level = UTILISATION.level(used) if shares and has_levels else None
        yield _graded("util" if shares else "CPU", units.percent(100 * used), level)
    if is_running and (memory := found.memory_bytes.value) is not None:
        text = units.memory(memory)
        if shares:
            text += f" {units.percent(100 * max(shares))}"
        level = MEMORY.level(max(shares)) if shares and has_levels else None
        yield _graded("memory", text, level)
    if not is_stalled:
        yield from _waits(found, has_levels=has_levels)


def _work(found: Figures) -> Iterator[Line]:
    if found.mfu.value is not None:
        yield _graded("MFU", units.share(found.mfu.value), MFU.level(found.mfu.value))
    elif found.model_tflops.value is not None:
        yield labelled("compute", units.flops(found.model_tflops.value * 1e12), "strong")


def _waits(found: Figures, *, has_levels: bool) -> Iterator[Line]:
    for label, value, limits in (
        ("bubble", found.bubble_ratio.value, BUBBLE),
        ("exposed comm", found.exposed_communication.value, EXPOSED),
    ):
        if value is not None:
            level = limits.level(value) if has_levels else None
            yield _graded(label, units.share(value), level)
    if found.step_s.value is not None:
        yield labelled("step", units.seconds(found.step_s.value), "strong")


def _graded(label: str, text: str, level: Level | None) -> Line:
    if level is None:
        return labelled(label, text, "strong")
    return labelled(label, text + MARKS[level], level)
