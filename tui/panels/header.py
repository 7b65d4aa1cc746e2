"""The first lines of every screen of a job: name and layout, progress, headline figures.

``progress`` has elapsed time, pace and time left, ``draw_timeline`` the position of a replay in its
recording.
"""

from collections.abc import Iterator
from typing import Final

import msgspec

from boltmesh.telemetry.snapshot import JobSnapshot, JobState
from boltmesh.tui import units
from boltmesh.tui.metrics.figures import Figures, figures
from boltmesh.tui.metrics.ranks import rank_rows
from boltmesh.tui.metrics.status import job_stalled_seconds, rates_are_current
from boltmesh.tui.panels.events import clock
from boltmesh.tui.panels.throughput import Unit, rate_line, throughput
from boltmesh.tui.render.bars import BUBBLE, EXPOSED, MEMORY, MFU, UTILISATION, Level, bar
from boltmesh.tui.render.line import Line, fit
from boltmesh.tui.render.style import Style, facts, labelled, spread
from boltmesh.tui.state import State


class Progress(msgspec.Struct, frozen=True):
    """``None`` where it cannot be known."""

    elapsed_s: float
    left_s: float | None
    fraction: float | None
    """Share of ``max_steps`` that is done."""


def progress(state: State) -> Progress:
    """Return how far the job is, and when it will end at its recent pace."""
    job = state.job
    is_running = job.state == "running"
    elapsed_s = max(0.0, (state.time if is_running else job.updated) - job.started)
    pace = _pace(job)
    # Lightning writes -1 for "no limit".
    limit = job.max_steps if job.max_steps is not None and job.max_steps > 0 else None
    left_s = None
    if is_running and limit is not None and pace is not None and not job_stalled_seconds(state):
        left_s = max(0, limit - job.global_step) / pace
    return Progress(
        elapsed_s=elapsed_s,
        left_s=left_s,
        fraction=None if limit is None else min(1.0, job.global_step / limit),
    )


def _pace(job: JobSnapshot) -> float | None:
    """Return optimizer steps a second, from the first rank that has records."""
    for rank in job.ranks:
        if len(rank.steps) >= 2:
            first, last = rank.steps[0], rank.steps[-1]
            steps = last.global_step - first.global_step
            seconds = last.end_time - first.end_time
            return steps / seconds if steps > 0 and seconds > 0 else None
    return None


def draw_header(
    state: State,
    width: int,
    height: int,
    look: Style,
    *,
    is_paused: bool = False,
    has_bar: bool = True,
) -> list[Line]:
    """Name, strategy, mesh and state; step, epoch and time below, where there is a second line."""
    lines = [
        _identity(state, width, look, is_paused=is_paused),
        _progress(state, width, look, has_bar=has_bar),
    ]
    return lines[:height]


def job_state(
    state: JobState, look: Style, *, stalled_s: float | None = None, is_stopped: bool = False
) -> Line:
    """The job's state as a sign and a word; of a stalled one also for how long."""
    glyphs = look.glyphs
    if stalled_s is not None:
        return Line(f"{look.sign('!')}stalled {units.duration(stalled_s)}", "warn")
    if is_stopped:
        return Line(look.sign("!") + "stopped", "warn")
    if state == "running":
        return Line(look.sign(glyphs.running) + state, "good")
    if state == "finished":
        return Line(look.sign(glyphs.finished) + state, "good")
    return Line(look.sign(glyphs.failed) + state, "bad")


def _identity(state: State, width: int, look: Style, *, is_paused: bool) -> Line:
    job, glyphs = state.job, look.glyphs
    right = job_state(
        job.state,
        look,
        stalled_s=job_stalled_seconds(state),
        is_stopped=job.stop_reason is not None,
    )
    if state.lost is not None:
        right = Line(look.sign(glyphs.absent) + "disconnected", "warn")
    if is_paused:
        right = Line("paused", "warn").add("  ").join(right)
    room = width - right.width - 2
    name = fit(job.name, max(8, min(room, width // 2)), ellipsis=glyphs.ellipsis)
    mesh = units.mesh(job.mesh, job.world_size, times=f" {glyphs.times} ")
    left = facts(
        [
            Line(name, "strong"),
            Line(job.strategy),
            Line(mesh),
            Line(job.id, "muted") if job.id != job.name else Line(),
        ],
        room,
    )
    return spread(left, right, width)


def _progress(state: State, width: int, look: Style, *, has_bar: bool) -> Line:
    job, run = state.job, progress(state)
    step = units.count(job.global_step)
    if run.fraction is not None:
        step = f"{step} / {units.count(job.max_steps)}"
    parts = [
        labelled("step", step),
        labelled("epoch", units.count(job.epoch)),
        labelled("elapsed", units.duration(run.elapsed_s)),
    ]
    if run.left_s is not None:
        parts.append(labelled("ETA", units.duration(run.left_s)))
    line = facts(parts, width)
    if run.fraction is not None:
        share = Line(units.percent(100 * run.fraction), "muted")
        room = width - line.width - share.width - 4
        if has_bar and room >= 10:
            line.add("   ").join(bar(run.fraction, room, look.glyphs)).add(" ").join(share)
    return line.crop(width)


def draw_timeline(
    span: tuple[float, float],
    now: float,
    width: int,
    look: Style,
    *,
    is_playing: bool,
    speed: float,
) -> Line:
    """Clock, position and length as words, and a bar in the rest of the line."""
    first, last = span
    position, length = max(0.0, now - first), max(0.0, last - first)
    how = f"replay {speed:g}x" if is_playing else "replay paused"
    line = facts(
        [
            Line(how, "accent" if is_playing else "warn"),
            Line(clock(now, now), "strong"),
            labelled("at", f"{units.duration(position)} of {units.duration(length)}"),
        ],
        width,
    )
    room = width - line.width - 3
    if room >= 8:
        line.add("   ").join(bar(position / length if length else 1.0, room, look.glyphs))
    return line.crop(width)


MARKS: Final[dict[Level, str]] = {"good": "", "warn": "!", "bad": "!!"}
"""Marks that stand for a level without colour."""


def draw_headline(state: State, width: int, look: Style) -> Line:
    """Rate, MFU, utilisation, memory, bubble, exposed communication and step time.

    Where they do not fit, FLOPs and then the step time go first: they have no limits. Rates of a
    stalled job are not known; nothing of a job that is stalled or has ended has a level, and its
    devices may serve others by now.
    """
    parts = list(_parts(state))
    for spare in ("compute ", "step "):
        if sum(part.width + 2 for part in parts) - 2 > width:
            parts = [part for part in parts if not part.plain.startswith(spare)]
    return facts(parts, width)


def _parts(state: State) -> Iterator[Line]:
    found = figures(state)
    unit: Unit = "samples" if throughput(state.job, "tokens") is None else "tokens"
    yield rate_line(state, unit)
    is_stalled = job_stalled_seconds(state) is not None
    is_running = state.job.state == "running"
    has_levels = rates_are_current(state)
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
