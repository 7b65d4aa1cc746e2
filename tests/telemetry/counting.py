"""What the tests of counting share: a recorder on every rank, and its totals by operator."""

import time
from contextlib import contextmanager

import torch

from boltmesh.telemetry.job import JOB_FILE, JobInfo, job_path
from boltmesh.telemetry.reader.job_reader import JobReader
from boltmesh.telemetry.writer.recorder import Recorder


def open_counting(rank, world_size, job_id="counting"):
    """Open a live recorder whose failure fails the test."""
    info = JobInfo.create(
        strategy="DDPStrategy", mesh={"data": world_size}, world_size=world_size, id=job_id
    )
    recorder = Recorder.open(
        info,
        rank=rank,
        local_rank=rank,
        device=torch.device("cpu"),
        coordinates={"data": rank},
    )
    while not (job_path(job_id) / JOB_FILE).exists():  # rank 0 writes it; a barrier would count
        time.sleep(0.01)
    return recorder


def totals(rank, job_id="counting"):
    """Return (axis, operator) -> (calls, payload bytes) as a reader sees them."""
    with JobReader(job_path(job_id)) as job:
        snapshot = job.snapshot()
    assert snapshot.communication_note is None
    found: dict[tuple[str, str], tuple[int, int]] = {}
    for total in snapshot.ranks[rank].collectives:
        calls, payload_bytes = found.get((total.axis, total.operator), (0, 0))
        found[total.axis, total.operator] = (
            calls + total.calls,
            payload_bytes + total.payload_bytes,
        )
    return found


@contextmanager
def counted(recorder, rank):
    """Collect, into the dictionary that it gives, what the block moves."""
    moved: dict[tuple[str, str], tuple[int, int]] = {}
    before = totals(rank)
    yield moved
    assert recorder.is_on
    for key, (calls, payload_bytes) in totals(rank).items():
        was_calls, was_bytes = before.get(key, (0, 0))
        if calls > was_calls:
            moved[key] = (calls - was_calls, payload_bytes - was_bytes)


def parameter_bytes(module):
    """Return P of the formulas."""
    return sum(each.numel() * each.element_size() for each in module.parameters())
