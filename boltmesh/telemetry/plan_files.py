"""The plans of a job, a file each: the schedule of its pipeline, the division of its layers.

They lie beside ``job.json`` and are written later than it: a model has to be seen first. Where a
job has no plan there is no file.
"""

from pathlib import Path
from typing import Final, TypeVar

import msgspec

from boltmesh.telemetry.job import MAX_JSON_BYTES, UNREADABLE, read_private, write_whole
from boltmesh.telemetry.snapshot import PipelinePlan
from boltmesh.telemetry.tensor_plan import TensorPlanTable

PLAN_FILE: Final = "plan.json"
TENSOR_FILE: Final = "tensor.json"

Plan = TypeVar("Plan", PipelinePlan, TensorPlanTable)


def write_plan(plan: PipelinePlan, path: Path) -> None:
    """Write the schedule of the pipeline into the job's folder; a huge one by its name alone."""
    content = msgspec.json.encode(plan)
    if len(content) > MAX_JSON_BYTES:
        content = msgspec.json.encode(msgspec.structs.replace(plan, order=()))
    write_whole(path / PLAN_FILE, content)


def read_plan(path: Path) -> PipelinePlan | None:
    """Return the schedule of the pipeline, if the job has recorded one."""
    return _read(path / PLAN_FILE, PipelinePlan)


def write_tensor_plan(plan: TensorPlanTable, path: Path) -> None:
    """Write how layers are divided into the job's folder; of a huge table only that it is one."""
    content = msgspec.json.encode(plan)
    if len(content) > MAX_JSON_BYTES:
        note = f"the table is left out: its {len(plan.rows):,} kinds of parameters are too many"
        content = msgspec.json.encode(TensorPlanTable(plan.size, (), notes=(note,)))
    write_whole(path / TENSOR_FILE, content)


def read_tensor_plan(path: Path) -> TensorPlanTable | None:
    """Return how layers are divided, if the job has recorded that."""
    return _read(path / TENSOR_FILE, TensorPlanTable)


def remove_plans(path: Path) -> None:
    """Remove the plans of an earlier run."""
    for name in (PLAN_FILE, TENSOR_FILE):
        (path / name).unlink(missing_ok=True)


def _read(path: Path, kind: type[Plan]) -> Plan | None:
    try:
        return msgspec.json.decode(read_private(path), type=kind)
    except (OSError, *UNREADABLE):
        return None
