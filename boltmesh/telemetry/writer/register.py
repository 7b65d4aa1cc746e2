"""Steps of a rank when it joins the telemetry of its job."""

import functools
import socket
from collections.abc import Mapping

import torch

from boltmesh.telemetry.job import (
    JobInfo,
    job_path,
    make_private_folder,
    rank_file,
    run_dir,
    write_job,
)
from boltmesh.telemetry.plan_files import remove_plans
from boltmesh.telemetry.pruning import remove_old_jobs
from boltmesh.telemetry.writer import device as devices
from boltmesh.telemetry.writer.nodes import NodeExchange, remove_nodes
from boltmesh.telemetry.writer.rank_file import RankFile
from boltmesh.torch_compat import job_store


def open_file(job: JobInfo, rank: int, *, is_fit: bool) -> RankFile:
    """Create a rank's file in the job's folder, or continue it.

    A fit begins a new one, also where this process has trained under the same id before.

    Raises:
        TelemetryError: The folder or the file cannot be had.
        OSError: As the system says it.
    """
    make_private_folder(run_dir())
    folder = job_path(job.id)
    make_private_folder(folder)
    path = rank_file(folder, rank)
    return RankFile(path, rank=rank, world_size=job.world_size, continues_earlier=not is_fit)


def open_host(job: JobInfo, file: RankFile) -> NodeExchange:
    """Write the facts that the ranks of this host share, and return the exchange with other hosts.

    For local rank 0 only.
    """
    folder = file.path.parent
    if file.is_new:
        remove_plans(folder)  # of an earlier run under the same id
        remove_nodes(folder)
        remove_old_jobs(folder.parent)
    write_job(job, folder)
    return NodeExchange(
        folder,
        rank=file.header.rank,
        world_size=job.world_size,
        find_store=functools.partial(job_store, f"boltmesh-{job.id}", in_memory=True),
        say=functools.partial(file.event, "warning"),
    )


def introduce(
    job: JobInfo,
    file: RankFile,
    device: torch.device,
    coordinates: Mapping[str, int],
    note: str | None,
) -> None:
    """Write the facts of a rank that a reader needs before its first step.

    Args:
        job: The job of the rank.
        file: The rank's file.
        device: The device of the rank.
        coordinates: Its place on each axis of the mesh.
        note: Communication that is not counted, with the reason.
    """
    name = devices.describe(device)
    file.write_facts(
        {
            "host": socket.gethostname(),
            "device": name,
            "device_uuid": devices.uuid(device),
            "coordinates": coordinates,
            "communication_note": note,
            "expected": [],
        }
    )
    # Without its own number, so that a reader can show the ranks of a job as one line.
    ranks = f"{job.world_size} ranks" if job.world_size > 1 else "1 rank"
    file.event("start", f"{ranks}, {job.strategy}, on {name}")
    if note is not None:
        file.event("warning", note)
