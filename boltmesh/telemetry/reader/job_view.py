"""Turns a job's own description into the constant part of a snapshot.

``PlansView`` has the plans of a job, read again only when their files change; ``mean_expected``
what a step is expected to move on a rank, from what the ranks state.

The files are not trusted: strings are cleaned, numbers that no job has are refused, or cut to what
a viewer can lay out.
"""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, Generic, TypeVar

import msgspec

from boltmesh.telemetry.job import JobInfo, Stamp, stamp_of
from boltmesh.telemetry.plan_files import PLAN_FILE, TENSOR_FILE, read_plan, read_tensor_plan
from boltmesh.telemetry.reader.file_records import MAX_NUMBER, is_time
from boltmesh.telemetry.reader.rank_view import RankView
from boltmesh.telemetry.sanitize import clean, clean_mapping
from boltmesh.telemetry.snapshot import AlertThresholds, PipelinePlan, RankSnapshot
from boltmesh.telemetry.tensor_plan import PlannedBlocks, PlannedParameters, TensorPlanTable
from boltmesh.telemetry.traffic import ExpectedTraffic

MAX_RANKS: Final = 65_536
_MAX_AXES: Final = 8


def num_ranks(info: JobInfo) -> int:
    """Return how many ranks the job has.

    Its mesh has as many places; a larger number is damaged, and would be as many empty rows.
    """
    places = math.prod(size for size in info.mesh.values() if size > 0)
    return min(max(info.world_size, 0), places if info.mesh else MAX_RANKS, MAX_RANKS)


def started_at(info: JobInfo) -> float:
    """Return when the job started; 0 if the value is no time."""
    return info.started if is_time(info.started) else 0.0


def clean_mesh(info: JobInfo) -> dict[str, int]:
    """Return the sizes of the axes."""
    return {
        clean(axis, 40): min(max(size, 0), MAX_RANKS)
        for axis, size in list(info.mesh.items())[:_MAX_AXES]
    }


def clean_plan(plan: PipelinePlan) -> PipelinePlan | None:
    """Return a schedule that can be drawn; None when it is none."""
    if not (0 < plan.num_stages <= MAX_RANKS and 0 < plan.num_microbatches <= MAX_RANKS):
        return None
    is_told = (
        len(plan.rank_of_stage) == len(plan.border_bytes) + 1 == plan.num_stages
        and all(0 <= rank < MAX_RANKS for rank in plan.rank_of_stage)
        and all(0 <= size < math.inf for sizes in plan.border_bytes for size in sizes)
    )
    return PipelinePlan(
        rank_of_stage=plan.rank_of_stage if is_told else (),
        border_bytes=plan.border_bytes if is_told else (),
        schedule=clean(plan.schedule, 60),
        num_stages=plan.num_stages,
        num_microbatches=plan.num_microbatches,
        order=tuple(
            tuple(None if action is None else clean(action, 20) for action in actions)
            for actions in plan.order[:MAX_RANKS]
        ),
    )


def describe(info: JobInfo) -> dict[str, Any]:
    """Return the fields of a ``JobSnapshot`` that do not change while the job runs."""
    is_limited = info.max_steps is not None and 0 <= info.max_steps <= MAX_NUMBER
    return {
        "id": clean(info.id, 64),
        "name": clean(info.name, 100),
        "user": clean(info.user, 100),
        "command": tuple(clean(word) for word in info.command[:200]),
        "folder": clean(info.folder),
        "strategy": clean(info.strategy, 100),
        "mesh": clean_mesh(info),
        "world_size": num_ranks(info),
        "versions": clean_mapping(info.versions),
        "hyperparameters": clean_mapping(info.hyperparameters),
        "max_steps": info.max_steps if is_limited else None,
        "recipe": clean(info.recipe, 200) if info.recipe else None,
        "alerts": info.alerts or AlertThresholds(),
    }


MAX_ROWS: Final = 4096
"""Kinds of parameters, kinds of blocks and notes beyond these are left out."""

MAX_DIMENSIONS: Final = 16

Plan = TypeVar("Plan")


class PlansView:
    """The plans in one job's folder."""

    def __init__(self, path: Path) -> None:
        self._pipeline = _PlanView(path / PLAN_FILE, lambda: read_plan(path), clean_plan)
        self._tensor = _PlanView(
            path / TENSOR_FILE, lambda: read_tensor_plan(path), clean_tensor_plan
        )

    @property
    def pipeline(self) -> PipelinePlan | None:
        """The schedule of the pipeline, as its file has it now."""
        return self._pipeline.newest()

    @property
    def tensor(self) -> TensorPlanTable | None:
        """The division of layers, as its file has it now."""
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


def mean_expected(
    views: Sequence[RankView], ranks: Sequence[RankSnapshot]
) -> tuple[ExpectedTraffic, ...]:
    """Return the expected traffic of a rank: the mean over the parts of the model that state it.

    Stages of a pipeline differ, and so do tensor ranks, of which one may have a word more. Each
    part has as many ranks as the others.
    """
    by_part: dict[tuple[int | None, ...], list[ExpectedTraffic]] = {}
    for view, rank in zip(views, ranks, strict=True):
        part = rank.coordinates.get("pipeline"), rank.coordinates.get("tensor")
        if view.is_present and part not in by_part and (stated := _stated(view)):
            by_part[part] = stated
    by_key: dict[tuple[str, str], list[ExpectedTraffic]] = {}
    for stated in by_part.values():
        for each in stated:
            by_key.setdefault((each.axis, each.operator), []).append(each)
    return tuple(
        msgspec.structs.replace(
            same[0],
            payload_bytes=sum(each.payload_bytes for each in same) / len(same),
            calls=_mean_calls(same),
        )
        for same in by_key.values()
    )


def _mean_calls(same: Sequence[ExpectedTraffic]) -> float | None:
    known = [each.calls for each in same if each.calls is not None]
    return sum(known) / len(known) if len(known) == len(same) else None


def _stated(view: RankView) -> list[ExpectedTraffic]:
    try:
        found = msgspec.convert(view.expected, tuple[ExpectedTraffic, ...])
    except msgspec.ValidationError:
        return []
    return [
        msgspec.structs.replace(
            each,
            axis=clean(each.axis, 40),
            operator=clean(each.operator, 60),
            why=clean(each.why, 200),
        )
        for each in found[:200]
    ]
