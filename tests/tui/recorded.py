"""Steps of real pipelines; tests/tui/data/README.md says how they were recorded."""

import functools
import json
from pathlib import Path

from boltmesh.telemetry.snapshot import Chunk, JobSnapshot, PipelinePlan
from tests.tui.samples import NOW, job, rank

_FILE = Path(__file__).with_name("data") / "pipelines.json"


@functools.lru_cache(maxsize=1)
def recorded_pipelines() -> dict[str, JobSnapshot]:
    """Each recording as a job whose only axis is the pipeline, by its name."""
    runs = json.loads(_FILE.read_text(encoding="utf-8"))
    return {run["name"]: pipeline_job(_plan(run), _chunks(run["ranks"])) for run in runs}


def pipeline_job(
    plan: PipelinePlan | None, chunks: tuple[tuple[Chunk, ...], ...], **changes: object
) -> JobSnapshot:
    """A job of one pipeline in which each rank has recorded the chunks of its row."""
    ranks = tuple(
        rank(at, coordinates={"pipeline": at, "data": 0, "tensor": 0}, chunks=row)
        for at, row in enumerate(chunks)
    )
    mesh = {"pipeline": len(chunks), "data": 1, "tensor": 1}
    return job(**{"ranks": ranks, "mesh": mesh, "pipeline": plan} | changes)


def _plan(run: dict[str, list[list[str | None]]]) -> PipelinePlan:
    return PipelinePlan(
        schedule=str(run["schedule"]),
        num_stages=int(str(run["num_stages"])),
        num_microbatches=int(str(run["num_microbatches"])),
        order=tuple(map(tuple, run["order"])),
    )


def _chunks(ranks: list[list[list[object]]]) -> tuple[tuple[Chunk, ...], ...]:
    return tuple(
        tuple(
            Chunk(step, stage, microbatch, kind, NOW + start, NOW + end)  # type: ignore[operator, arg-type]
            for step, stage, microbatch, kind, start, end in row
        )
        for row in ranks
    )
