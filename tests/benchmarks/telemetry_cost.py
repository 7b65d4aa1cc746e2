"""What telemetry costs: OMP_NUM_THREADS=1 python tests/benchmarks/telemetry_cost.py

Two ranks train under DDP over gloo, about 10 ms a step, in blocks with telemetry and blocks
without, in pairs, so that a busy machine slows both alike. The median of the pairs' ratios is the
cost; the goal is under 1.01. Then single calls, each the best of several rounds. What Python
runs between the collectives of a step is fixed by hand here, as the engine and the callback do it.
"""

import argparse
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.multiprocessing.spawn import spawn
from torch.nn.parallel import DistributedDataParallel

from boltmesh.telemetry import layout
from boltmesh.telemetry.job import JobInfo, rank_file
from boltmesh.telemetry.writer.null_recorder import NullRecorder
from boltmesh.telemetry.writer.rank_file import RankFile
from boltmesh.telemetry.writer.recorder import Recorder
from boltmesh.telemetry.writer.torch_compat.hook import COLLECTIVES

WIDTH, DEPTH, BATCH = 256, 8, 96


def open_on(rank, world_size, job_id):
    """Open a live recorder."""
    info = JobInfo.create(
        strategy="DDPStrategy", mesh={"data": world_size}, world_size=world_size, id=job_id
    )
    return Recorder.open(
        info, rank=rank, local_rank=rank, device=torch.device("cpu"), coordinates={"data": rank}
    )


class Training:
    """The loop of the engine and the callback around one optimizer step."""

    def __init__(self):
        torch.manual_seed(0)
        layers = [nn.Linear(WIDTH, WIDTH) for _ in range(DEPTH)]
        self.model = DistributedDataParallel(nn.Sequential(*layers), bucket_cap_mb=25)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
        self.batch = torch.randn(BATCH, WIDTH)
        self.step = 0

    def run_step(self, recorder):
        with recorder.phase("transfer"):
            batch = self.batch.clone()
        recorder.begin_batch(index=self.step, epoch=0)
        with recorder.phase("optimizer"):
            with recorder.phase("forward"):
                loss = self.model(batch).square().mean()
            self.optimizer.zero_grad()
            with recorder.phase("backward"):
                loss.backward()
            self.optimizer.step()
        self.step += 1
        recorder.end_batch(global_step=self.step, loss=loss, samples=BATCH, tokens=None)
        # Lightning asks all ranks every step whether one was told to stop.
        flag = torch.zeros(1)
        dist.broadcast(flag, 0)


def compare(rank, world_size, folder, num_pairs, num_steps):
    """Alternate blocks with and without; rank 0 prints what the pairs of blocks say.

    One recorder stays open. In a block without, its kernels are out of torch's dispatcher and the
    loop talks to a NullRecorder, so nothing of telemetry runs.
    """
    torch.set_num_threads(1)
    os.environ["BOLTMESH_RUN_DIR"] = f"{folder}/telemetry"
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world_size
    )
    training = Training()
    recorder = open_on(rank, world_size, "bench")
    recorder.begin_loop(epoch=0, global_step=0)
    for _ in range(20):
        training.run_step(recorder)
    wall: dict[bool, list[float]] = {True: [], False: []}
    cpu: dict[bool, list[float]] = {True: [], False: []}
    for block in range(2 * num_pairs):
        is_on = bool(block % 2) ^ bool(block // 2 % 2)  # off on, on off, ...
        if not is_on:
            COLLECTIVES.detach(recorder._counter)
        for _ in range(3):
            training.run_step(recorder if is_on else NullRecorder())
        wall_s, cpu_s = [], []
        for _ in range(num_steps):
            start, start_cpu = time.perf_counter(), time.process_time()
            training.run_step(recorder if is_on else NullRecorder())
            wall_s.append(time.perf_counter() - start)
            cpu_s.append(time.process_time() - start_cpu)
        wall[is_on].append(statistics.median(wall_s))
        cpu[is_on].append(statistics.median(cpu_s))
        if not is_on:
            COLLECTIVES.attach(recorder._counter)
    if rank == 0:
        for name, times in (("wall", wall), ("CPU", cpu)):
            ratios = [on / off for off, on in zip(times[False], times[True], strict=True)]
            low, middle, high = statistics.quantiles(ratios, n=4)
            off, on = (statistics.median(times[each]) * 1e3 for each in (False, True))
            print(
                f"{name} a step, medians of blocks: off {off:.3f} ms, on {on:.3f} ms; ratio of "
                f"pairs {middle:.4f} (quartiles {low:.4f} to {high:.4f}, {num_pairs} pairs); "
                f"fastest blocks {min(times[False]) * 1e3:.3f}, {min(times[True]) * 1e3:.3f} ms"
            )
    dist.barrier()
    os._exit(0)


def best_of(call, repeat=2000, rounds=7):
    """Return microseconds a call, of the fastest round."""
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        for _ in range(repeat):
            call()
        times.append((time.perf_counter() - start) / repeat * 1e6)
    return min(times)


def measure_calls(folder):
    """Print what single calls cost, and the collective with and without the counter."""
    torch.set_num_threads(1)
    os.environ["BOLTMESH_RUN_DIR"] = f"{folder}/telemetry"
    file = RankFile(rank_file(Path(folder), 99), rank=0, world_size=1)
    file.write_facts({})
    group, operator = file.group_number("0", "data"), file.operator_number("allreduce")
    phases = [1000] * 9
    file.point("loss", 0, 0.0)
    ticket = file.enqueue(1, group, operator, 2, layout.TRAFFIC_IS_TIMED, 4096)
    calls = {
        "status": lambda: file.status(1, 0, 0, 0, 1, 1, 1.0, 1, -1, -1, -1),
        "step": lambda: file.step(1, 1, 0, 1, 1.0, 9000, *phases, 0.5, 8, -1),
        "metric": lambda: file.point("loss", 1, 0.5),
        "collective enqueued": lambda: file.enqueue(1, group, operator, 2, 2, 4096),
        "collective done": lambda: file.complete(ticket, time.monotonic_ns()),
        "event": lambda: file.event("warning", "x"),
    }
    for name, call in calls.items():
        print(f"record: {name:<20} {best_of(call):6.2f} us")
    file.close()

    dist.init_process_group("fake", rank=0, world_size=2)
    tensor = torch.zeros(256)

    def reduce():
        dist.all_reduce(tensor)

    bare_fake = best_of(reduce)
    recorder = open_on(0, 2, "calls")

    def phase():
        with recorder.phase("forward"):
            pass

    def batch():
        recorder.begin_batch(index=1, epoch=0)
        recorder.end_batch(global_step=1, loss=0.5, samples=8, tokens=None)

    print(f"a phase, entered and left    {best_of(phase):6.2f} us")
    print(f"a batch, begun and ended     {best_of(batch):6.2f} us")
    print(f"a collective on a fake group {bare_fake:6.2f} us, counted {best_of(reduce):6.2f} us")
    recorder.close()
    dist.destroy_process_group()

    dist.init_process_group("gloo", init_method=f"file://{folder}/alone", rank=0, world_size=1)
    bare_gloo = best_of(reduce)
    recorder = open_on(0, 1, "gloo")
    print(f"a collective on gloo alone   {bare_gloo:6.2f} us, counted {best_of(reduce):6.2f} us")
    recorder.close()
    dist.destroy_process_group()


def main():
    """Run both parts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=60, help="pairs of blocks")
    parser.add_argument("--steps", type=int, default=15, help="steps of a block")
    arguments = parser.parse_args()
    print(f"torch {torch.__version__}, Python {sys.version.split()[0]}, load {os.getloadavg()}")
    with tempfile.TemporaryDirectory() as folder:
        measure_calls(folder)
        spawn(compare, (2, folder, arguments.pairs, arguments.steps), nprocs=2)


if __name__ == "__main__":
    main()
