"""A collective that is waited for is the newest of its group, whoever looks and whenever."""

import time

from boltmesh.telemetry import layout
from boltmesh.telemetry.job import rank_file
from boltmesh.telemetry.reader.reader import open_job
from boltmesh.telemetry.writer.rank_file import RankFile
from tests.telemetry.test_reader import make_job


def test_the_collective_that_hangs_is_not_hidden_by_the_last_that_was_completed() -> None:
    path = make_job(world_size=1)
    file = RankFile(rank_file(path, 0), rank=0, world_size=1)
    file.write_facts({"host": "here", "device": "cpu", "coordinates": {"data": 0}})
    group, operator = file.group_number("0", "data", (0,)), file.operator_number("allreduce")
    for _ in range(7):
        done = file.enqueue(1, group, operator, 0, layout.TRAFFIC_IS_TIMED, 8)
        file.complete(done, time.monotonic_ns())
    file.write_counters()
    file.enqueue(1, group, operator, 0, layout.TRAFFIC_IS_TIMED, 8)
    for _ in range(2):  # who attaches now, and who looks again
        with open_job(path) as job:
            for _ in range(2):
                (progress,) = job.snapshot().ranks[0].groups
                assert (progress.sequence, progress.is_done) == (8, False)
    file.close()
