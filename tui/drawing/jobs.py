"""The jobs of this user on this host, as a table."""

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from boltmesh.tui import units
from boltmesh.tui.drawing.header import job_state
from boltmesh.tui.drawing.line import Line
from boltmesh.tui.drawing.look import Look
from boltmesh.tui.drawing.table import Cell, Column, draw_table

if TYPE_CHECKING:
    from boltmesh.telemetry.reader import JobSummary


def draw_jobs(
    jobs: Sequence["JobSummary"], width: int, look: Look, *, now: float | None = None
) -> list[Line]:
    """A header and one line for each job."""
    now = time.time() if now is None else now
    glyphs = look.glyphs
    columns = [
        Column("id", shrinks_to=12),
        Column("name", rank=4, shrinks_to=10),
        Column("state"),
        Column("strategy", rank=3),
        Column("mesh", rank=2),
        Column("step", is_number=True, rank=1),
        Column("age", is_number=True),
    ]
    cells: list[list[Cell]] = [
        [
            Line(job.id, "strong"),
            Line(job.name if job.name != job.id else "", "muted"),
            job_state(job.state, look),
            job.strategy,
            units.mesh(job.mesh, job.world_size, times=f" {glyphs.times} "),
            units.count(job.global_step),
            units.duration(max(0.0, now - job.started)),
        ]
        for job in jobs
    ]
    return draw_table(columns, cells, width, ellipsis=glyphs.ellipsis)
