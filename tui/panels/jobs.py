"""The jobs of this user on this host, as a table."""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from boltmesh.tui import units
from boltmesh.tui.panels.header import job_state
from boltmesh.tui.render.line import Line
from boltmesh.tui.render.style import Style, heading, sentence
from boltmesh.tui.render.table import Cell, Column, browse
from boltmesh.tui.view import Cells, TableView, arrange_rows

if TYPE_CHECKING:
    from boltmesh.telemetry.reader.reader import JobSummary

COLUMNS = (
    "name",
    "progress",
    "samples/s",
    "host",
    "state",
    "id",
    "recipe",
    "strategy",
    "mesh",
    "age",
)
"""Titles that the table can be sorted by."""


def draw_jobs(
    jobs: Sequence["JobSummary"],
    width: int,
    height: int,
    look: Style,
    *,
    table: TableView | None = None,
    now: float | None = None,
    trouble: str = "",
) -> list[Line]:
    """A header and one line for each job; the heading counts what is out of sight.

    ``trouble`` says why it is not known which jobs there are.
    """
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
        lines.insert(0, heading("jobs", width, look, right=seen.hidden))
    if not jobs:
        lines += sentence(trouble or "none", width, look, role="warn" if trouble else "muted")
    return lines[:height]


def shown_jobs(
    jobs: Sequence["JobSummary"], table: TableView, *, now: float | None = None
) -> list["JobSummary"]:
    """Return the jobs that stay, in the order in which they are drawn."""
    moment = time.time() if now is None else now
    return arrange_rows(jobs, lambda job: cells_of(job, moment), table)


def _progress(job: "JobSummary") -> float | None:
    """Return the share of its steps in percent."""
    if job.max_steps is None or job.max_steps <= 0:
        return None
    return min(100.0, 100 * job.global_step / job.max_steps)


def cells_of(job: "JobSummary", now: float) -> Cells:
    """Return a job as it is filtered and sorted; ages in seconds."""
    return {
        "name": job.name,
        "progress": _progress(job),
        "step": job.global_step,
        "samples/s": job.samples_per_second,
        "host": job.host,
        "state": _state_word(job),
        "id": job.id,
        "recipe": job.recipe,
        "strategy": job.strategy,
        "mesh": units.mesh(job.mesh, job.world_size, times=" x "),
        "age": now - job.started,
    }


def _state_word(job: "JobSummary") -> str:
    if job.stalled_s is not None:
        return "stalled"
    return "stopped" if job.stopped else job.state


def _columns(jobs: Sequence["JobSummary"]) -> list[Column]:
    return [
        Column("name", shrinks_to=20),
        Column("progress", is_number=True),
        Column("samples/s", is_number=True, rank=3),
        *([Column("host", rank=2, shrinks_to=8)] if any(job.host for job in jobs) else []),
        Column("state"),
        Column("id", shrinks_to=8),
        *([Column("recipe", rank=6, shrinks_to=8)] if _has_recipes(jobs) else []),
        Column("strategy", rank=5),
        Column("mesh", rank=4, shrinks_to=10),
        Column("age", is_number=True, rank=1),
    ]


def _cells(job: "JobSummary", jobs: Sequence["JobSummary"], look: Style, now: float) -> list[Cell]:
    return [
        Line(job.name, "strong"),
        _progress_text(job),
        units.rate(job.samples_per_second),
        *([job.host] if any(each.host for each in jobs) else []),
        job_state(job.state, look, stalled_s=job.stalled_s, is_stopped=job.stopped),
        Line(job.id, "muted"),
        *([Path(job.recipe or units.UNKNOWN).name] if _has_recipes(jobs) else []),
        job.strategy,
        units.mesh(job.mesh, job.world_size, times=f" {look.glyphs.times} "),
        units.duration(max(0.0, now - job.started)),
    ]


def _progress_text(job: "JobSummary") -> str:
    share = _progress(job)
    step = units.count(job.global_step)
    return step if share is None else f"{step} {units.percent(share)}"


def _has_recipes(jobs: Sequence["JobSummary"]) -> bool:
    """A column of nothing, where all jobs are scripts, is left out."""
    return any(job.recipe is not None for job in jobs)
