"""The plans that a job has told, read again only when their files change.

They come from files that somebody wrote: strings are cleaned, numbers that no job has are refused.
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Final, Generic, TypeVar

from boltmesh.telemetry.cleaning import clean
from boltmesh.telemetry.plan_files import PLAN_FILE, TENSOR_FILE, read_plan, read_tensor_plan
from boltmesh.telemetry.reading.job_view import MAX_RANKS, clean_plan
from boltmesh.telemetry.recording.file_records import MAX_NUMBER
from boltmesh.telemetry.snapshot import PipelinePlan
from boltmesh.telemetry.tensor_plan import PlannedBlocks, PlannedParameters, TensorPlanTable

MAX_ROWS: Final = 4096
"""Kinds of parameters, kinds of blocks and notes beyond these are left out."""

MAX_DIMENSIONS: Final = 16

Plan = TypeVar("Plan")
Stamp = tuple[int, int, int]


class PlansView:
    """The plans in one job's folder."""

    def __init__(self, path: Path) -> None:
        self._pipeline = _PlanView(path / PLAN_FILE, lambda: read_plan(path), clean_plan)
        self._tensor = _PlanView(
            path / TENSOR_FILE, lambda: read_tensor_plan(path), clean_tensor_plan
        )

    @property
    def pipeline(self) -> PipelinePlan | None:
        """The schedule of the pipeline, as it is told now."""
        return self._pipeline.newest()

    @property
    def tensor(self) -> TensorPlanTable | None:
        """How layers are divided, as it is told now."""
        return self._tensor.newest()


class _PlanView(Generic[Plan]):
    def __init__(
        self,
        path: Path,
        read: Callable[[], Plan | None],
        cleaned: Callable[[Plan], Plan | None],
    ) -> None:
        self._path = path
        self._read = read
        self._cleaned = cleaned
        self._stamp: Stamp | None = None
        self._plan: Plan | None = None

    def newest(self) -> Plan | None:
        stamp = stamp_of(self._path)
        if stamp != self._stamp:
            plan = self._read() if stamp is not None else None
            self._plan = None if plan is None else self._cleaned(plan)
            self._stamp = stamp
        return self._plan


def stamp_of(path: Path) -> Stamp | None:
    """Return what changes with a file's content, for files that are only ever replaced."""
    try:
        found = os.lstat(path)
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size


def clean_tensor_plan(plan: TensorPlanTable) -> TensorPlanTable | None:
    """Return a plan that can be drawn; None when it is none."""
    if not 0 < plan.size <= MAX_RANKS:
        return None
    return TensorPlanTable(
        size=plan.size,
        rows=tuple(_clean_row(row) for row in plan.rows[:MAX_ROWS] if _is_possible(row)),
        blocks=tuple(
            PlannedBlocks(clean(each.first, 200), each.count, clean(each.backend, 40))
            for each in plan.blocks[:MAX_ROWS]
            if 0 <= each.count <= MAX_NUMBER
        ),
        notes=tuple(map(clean, plan.notes[:MAX_ROWS])),
    )


def _clean_row(row: PlannedParameters) -> PlannedParameters:
    return PlannedParameters(
        pattern=clean(row.pattern, 200),
        count=row.count,
        shape=row.shape[:MAX_DIMENSIONS],
        style=clean(row.style, 200),
        why=clean(row.why),
        rank_bytes=row.rank_bytes,
        whole_bytes=row.whole_bytes,
        collectives=clean(row.collectives, 200),
    )


def _is_possible(row: PlannedParameters) -> bool:
    numbers = (row.count, row.rank_bytes, row.whole_bytes, *row.shape)
    return all(0 <= number <= MAX_NUMBER for number in numbers)
