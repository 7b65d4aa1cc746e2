"""The jobs of this user on this host, as a table."""

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from boltmesh.tui import units
from boltmesh.tui.panels.header import job_state
from boltmesh.tui.render.line import Line
from boltmesh.tui.render.style import Style, heading
from boltmesh.tui.render.table import Cell, Column, browse
from boltmesh.tui.view import Cells, TableView, arrange_rows

if TYPE_CHECKING:
    from boltmesh.telemetry.reader.reader import JobSummary

COLUMNS = ("id", "name", "state", "recipe", "strategy", "mesh", "step", "age")
"""Titles that the table can be sorted by."""


def draw_jobs(
    jobs: Sequence["JobSummary"],
    width: int,
    height: int,
    look: Style,
    *,
    table: TableView | None = None,
    now: float | None = None,
) -> list[Line]:
    """A header and one line for each job; what is out of sight is told in the heading."""
    now = time.time() if now is None else now
    table = table or TableView()
    shown = shown_jobs(jobs, table, now=now)
    top = int(look.has_headings)
    seen = browse(
        _columns(jobs),
        shown,
        lambda job: _cells(job, jobs, look, now),
        width,
        max(0, height - top - 1),
        look,
        table,
    )
    lines = [seen.header, *seen.lines]
    if look.has_headings:
        lines.insert(0, heading("jobs on this host", width, look, right=seen.hidden))
    if not shown:
        lines.append(Line("no job fits the filter" if jobs else "none", "muted").crop(width))
    return lines[:height]


def shown_jobs(
    jobs: Sequence["JobSummary"], table: TableView, *, now: float | None = None
) -> list["JobSummary"]:
    """Return the jobs that stay, in the order in which they are drawn."""
    moment = time.time() if now is None else now
    return arrange_rows(jobs, lambda job: cells_of(job, moment), table)


def cells_of(job: "JobSummary", now: float) -> Cells:
    """Return a job as it is filtered and sorted; ages in seconds."""
    return {
        "id": job.id,
        "name": job.name,
        "state": _state_word(job),
        "recipe": job.recipe,
        "strategy": job.strategy,
        "mesh": units.mesh(job.mesh, job.world_size, times=" x "),
        "step": job.global_step,
        "age": now - job.started,
    }


def _state_word(job: "JobSummary") -> str:
    if job.stalled_s is not None:
        return "stalled"
    return "stopped" if job.stopped else job.state


def _columns(jobs: Sequence["JobSummary"]) -> list[Column]:
    return [
        Column("id", shrinks_to=12),
        Column("name", rank=2, shrinks_to=10),
        Column("state"),
        *([Column("recipe", rank=5, shrinks_to=8)] if _has_recipes(jobs) else []),
        Column("strategy", rank=4),
        Column("mesh", rank=3),
        Column("step", is_number=True, rank=1),
        Column("age", is_number=True),
    ]


def _cells(job: "JobSummary", jobs: Sequence["JobSummary"], look: Style, now: float) -> list[Cell]:
    return [
        Line(job.id, "strong"),
        Line(job.name if job.name != job.id else "", "muted"),
        job_state(job.state, look, stalled_s=job.stalled_s, is_stopped=job.stopped),
        *([job.recipe or units.UNKNOWN] if _has_recipes(jobs) else []),
        job.strategy,
        units.mesh(job.mesh, job.world_size, times=f" {look.glyphs.times} "),
        units.count(job.global_step),
        units.duration(max(0.0, now - job.started)),
    ]


def _has_recipes(jobs: Sequence["JobSummary"]) -> bool:
    """A column of nothing, where all jobs are scripts, is left out."""
    return any(job.recipe is not None for job in jobs)
