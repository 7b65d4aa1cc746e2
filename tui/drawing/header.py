"""The first two lines: which job this is, how it is laid out, and how far it has come."""

from boltmesh.telemetry.snapshot import JobState
from boltmesh.tui import units
from boltmesh.tui.drawing.bars import bar
from boltmesh.tui.drawing.line import Line, fit
from boltmesh.tui.drawing.look import Look, facts, labelled, spread
from boltmesh.tui.figures.progress import progress
from boltmesh.tui.state import State


def draw_header(
    state: State,
    width: int,
    height: int,
    look: Look,
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


def job_state(state: JobState, look: Look) -> Line:
    """The job's state as a sign and a word."""
    glyphs = look.glyphs
    if state == "running":
        return Line(look.sign(glyphs.running) + state, "good")
    if state == "finished":
        return Line(look.sign(glyphs.finished) + state, "good")
    return Line(look.sign(glyphs.failed) + state, "bad")


def _identity(state: State, width: int, look: Look, *, is_paused: bool) -> Line:
    job, glyphs = state.job, look.glyphs
    right = job_state(job.state, look)
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


def _progress(state: State, width: int, look: Look, *, has_bar: bool) -> Line:
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
        parts.append(labelled("left", units.duration(run.left_s)))
    line = facts(parts, width)
    if run.fraction is not None:
        share = Line(units.percent(100 * run.fraction), "muted")
        room = width - line.width - share.width - 4
        if has_bar and room >= 10:
            line.add("   ").join(bar(run.fraction, room, look.glyphs)).add(" ").join(share)
    return line.crop(width)
