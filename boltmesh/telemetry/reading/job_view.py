"""Turns what a job says of itself into the part of a snapshot that stays.

All of it comes from a file that somebody wrote: strings are cleaned, numbers that no job has are
cut to what a viewer can lay out.
"""

import math
from typing import Any, Final

from boltmesh.telemetry.cleaning import clean, clean_mapping
from boltmesh.telemetry.job import JobInfo
from boltmesh.telemetry.recording.file_records import MAX_NUMBER, MAX_TIME_S
from boltmesh.telemetry.snapshot import AlertThresholds, PipelinePlan

MAX_RANKS: Final = 65_536
_MAX_AXES: Final = 8


def num_ranks(info: JobInfo) -> int:
    """Return how many ranks the job has."""
    return min(max(info.world_size, 0), MAX_RANKS)


def started_at(info: JobInfo) -> float:
    """Return when the job started; 0 where that is no time."""
    is_time = math.isfinite(info.started) and 0 <= info.started <= MAX_TIME_S
    return info.started if is_time else 0.0


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
