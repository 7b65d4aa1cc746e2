"""The chunks of a pipeline, as torch's own schedules run them, and the plan beside them."""

import time
from collections import Counter

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from boltmesh.telemetry import plan_files
from boltmesh.telemetry.plan_files import PLAN_FILE, read_plan
from boltmesh.telemetry.reader.reader import open_job
from boltmesh.telemetry.snapshot import PipelinePlan
from boltmesh.telemetry.writer.recorder import Recorder
from tests.support.ranks import run_ranks
from tests.telemetry.counting import open_counting
from tests.telemetry.test_reader import make_job, make_rank, snapshot
from tests.telemetry.test_recorder import CPU, make_info

NUM_MICROBATCHES = 4


class TimedStage(PipelineStage):
    """Tells a recorder of each chunk that it runs."""

    recorder: Recorder

    def _timed(self, kind, microbatch, run):
        start_ns = time.monotonic_ns()
        result = run()
        self.recorder.chunk(
            stage=self.stage_index,
            microbatch=microbatch,
            kind=kind,
            start_ns=start_ns,
            end_ns=time.monotonic_ns(),
        )
        return result

    def forward_one_chunk(self, fwd_chunk_id, *args, **kwargs):
        run = super().forward_one_chunk
        return self._timed("F", fwd_chunk_id, lambda: run(fwd_chunk_id, *args, **kwargs))

    def backward_one_chunk(self, bwd_chunk_id, *args, **kwargs):
        run = super().backward_one_chunk
        return self._timed("B", bwd_chunk_id, lambda: run(bwd_chunk_id, *args, **kwargs))


def pipeline_worker(rank, world_size):
    recorder = open_counting(rank, world_size)
    group = dist.new_group(list(range(world_size)))
    recorder.name_group(group, "pipeline")
    torch.manual_seed(0)
    stage = TimedStage(nn.Linear(8, 8), rank, world_size, torch.device("cpu"), group=group)
    stage.recorder = recorder
    schedule = Schedule1F1B(stage, NUM_MICROBATCHES, loss_fn=nn.functional.mse_loss)
    order = schedule._get_pipeline_order() if hasattr(schedule, "_get_pipeline_order") else {}
    recorder.schedule(
        PipelinePlan(
            schedule="1f1b",
            num_stages=world_size,
            num_microbatches=NUM_MICROBATCHES,
            order=tuple(
                tuple(None if action is None else str(action) for action in actions)
                for actions in (order or {}).values()
            ),
        )
    )
    recorder.begin_loop(epoch=0, global_step=0)
    began = time.time()
    for number in range(3):
        recorder.begin_batch(index=number, epoch=0)
        if rank == 0:
            schedule.step(torch.ones(8, 8))
        else:
            schedule.step(target=torch.zeros(8, 8))
        recorder.end_batch(global_step=number + 1, loss=None, samples=8, tokens=None)
    ended = time.time()
    with recorder.phase("validation"):
        recorder.chunk(stage=rank, microbatch=0, kind="F", start_ns=1, end_ns=2)
    recorder.close()
    dist.barrier()
    with open_job("counting") as job:
        return job.snapshot(), began, ended


@pytest.mark.ranks
def test_a_real_pipeline_is_read_back_chunk_by_chunk():
    for rank, (seen, began, ended) in enumerate(run_ranks(pipeline_worker, 2)):
        assert seen.pipeline is not None
        assert (seen.pipeline.schedule, seen.pipeline.num_stages) == ("1f1b", 2)
        mine = seen.ranks[rank]
        counts = Counter((each.step, each.stage, each.kind) for each in mine.chunks)
        assert counts == {
            (step, rank, kind): NUM_MICROBATCHES for step in (1, 2, 3) for kind in "FB"
        }
        for step in (1, 2, 3):
            forward = [
                each.microbatch for each in mine.chunks if (each.step, each.kind) == (step, "F")
            ]
            assert forward == list(range(NUM_MICROBATCHES))
        for chunk, following in zip(mine.chunks, mine.chunks[1:], strict=False):
            assert began - 0.01 <= chunk.start <= chunk.end <= following.start + 1e-6
            assert following.end <= ended + 0.01
        # What stage 1 computes it has received: its first forward follows that of stage 0.
        first = [next(each for each in other.chunks if each.kind == "F") for other in seen.ranks]
        assert first[0].end <= first[1].start + 1e-3
        assert [(each.axis, each.operator, each.peer) for each in mine.peers] == [
            ("pipeline", "recv", 1 - rank),
            ("pipeline", "send", 1 - rank),
        ]
        # 4 microbatches of 2 x 8 floats each way; before the first torch also sends shapes.
        assert [each.bytes_per_step for each in mine.peers] == [4 * 64, 4 * 64]


def test_a_plan_comes_back_clean_and_a_new_run_forgets_it():
    plan = PipelinePlan("1f1b\x1b[31m", 2, 2, (("0F0", None, "0B0"), (None, "1F0", "1B0")))
    recorder = Recorder.open(make_info(), rank=0, local_rank=0, device=CPU, coordinates={})
    recorder.schedule(plan)
    recorder.close()
    assert snapshot().pipeline == PipelinePlan("1f1b", 2, 2, plan.order)
    again = Recorder.open(make_info(), rank=0, local_rank=0, device=CPU, coordinates={})
    again.close()
    assert snapshot().pipeline is not None  # this very process goes on
    (recorder.path / "rank-0.bin").unlink()
    new = Recorder.open(make_info(), rank=0, local_rank=0, device=CPU, coordinates={})
    new.close()
    assert snapshot().pipeline is None


def test_only_the_first_rank_of_a_host_writes_the_plan():
    recorder = Recorder.open(make_info(), rank=1, local_rank=1, device=CPU, coordinates={})
    recorder.schedule(PipelinePlan("gpipe", 2, 2, ()))
    recorder.close()
    assert not (recorder.path / PLAN_FILE).exists()


def test_a_plan_that_is_too_long_keeps_its_name(monkeypatch):
    monkeypatch.setattr(plan_files, "MAX_JSON_BYTES", 1000)
    recorder = Recorder.open(make_info(), rank=0, local_rank=0, device=CPU, coordinates={})
    recorder.schedule(PipelinePlan("gpipe", 2, 100, (("0F0",) * 200,) * 2))
    recorder.close()
    assert read_plan(recorder.path) == PipelinePlan("gpipe", 2, 100, ())


@pytest.mark.parametrize("content", [b"", b"{", b"[" * 5000, b'{"schedule":"x"}', b"\xff\xfe"])
def test_a_damaged_plan_is_none(content):
    path = make_job()
    (path / PLAN_FILE).write_bytes(content)
    (path / PLAN_FILE).chmod(0o600)
    file = make_rank(path)
    assert snapshot().pipeline is None
    file.close()
