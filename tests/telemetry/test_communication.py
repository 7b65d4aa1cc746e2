"""Counting is exact to the byte, on every way in which torch communicates over gloo."""

import threading
import time
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from boltmesh.strategies.data_parallel.cpu_collectives import CpuAllGather
from boltmesh.telemetry.reader.reader import open_job
from boltmesh.telemetry.writer.torch_compat.hook import COLLECTIVES
from boltmesh.telemetry.writer.torch_compat.operators import PAYLOAD
from tests.support.ranks import run_ranks
from tests.telemetry.counting import counted, open_counting, parameter_bytes, totals

pytestmark = pytest.mark.ranks


def build_ddp(**options):
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 65), nn.Linear(65, 3))
    return DistributedDataParallel(module, **options)


def train(ddp, num_batches, accumulate=1):
    """Run batches; the gradients are synchronised on each last of ``accumulate``."""
    for number in range(num_batches):
        if (number + 1) % accumulate:
            with ddp.no_sync():
                ddp(torch.randn(8, 64)).sum().backward()
        else:
            ddp(torch.randn(8, 64)).sum().backward()


DDP_CASES = [(25, 1), (25, 3), (0.02, 1), (0.02, 3)]
"""Bucket size in MB, and batches that are accumulated under ``no_sync``."""


def ddp_worker(rank, world_size):
    recorder = open_counting(rank, world_size)
    group = dist.new_group(list(range(world_size)))
    recorder.name_group(group, "data")
    results = []
    for bucket_cap_mb, accumulate in DDP_CASES:
        ddp = build_ddp(process_group=group, bucket_cap_mb=bucket_cap_mb)
        train(ddp, 3 * accumulate, accumulate)  # buckets are rebuilt after the first
        with counted(recorder, rank) as moved:
            train(ddp, 4 * accumulate, accumulate)
        num_buckets = len(ddp._get_ddp_logging_data()["rebuilt_bucket_sizes"].split(","))
        results.append((moved, num_buckets, parameter_bytes(ddp)))
    recorder.close()
    return results


@pytest.mark.sample("2")
@pytest.mark.parametrize("world_size", [2, 4])
def test_ddp_reduces_its_parameters_once_a_synchronised_step(world_size):
    for results in run_ranks(ddp_worker, world_size):
        for (bucket_cap_mb, _), (moved, num_buckets, size) in zip(DDP_CASES, results, strict=True):
            assert num_buckets == 1 if bucket_cap_mb == 25 else num_buckets >= 2
            assert moved == {("data", "allreduce"): (4 * num_buckets, 4 * size)}


def as_bfloat16(group, bucket):
    """Compress as torch's ``bf16_compress_hook``, which torch refuses on a CPU by its name."""
    size = group.size()
    work = dist.all_reduce(bucket.buffer().bfloat16().div_(size), group=group, async_op=True)
    return work.get_future().then(lambda done: bucket.buffer().copy_(done.value()[0]))


def compression_worker(rank, world_size):
    recorder = open_counting(rank, world_size)
    halved = build_ddp()
    halved.register_comm_hook(dist.group.WORLD, as_bfloat16)
    train(halved, 3)
    with counted(recorder, rank) as moved_halved:
        train(halved, 4)

    torch.manual_seed(0)
    factored = DistributedDataParallel(nn.Sequential(nn.Linear(128, 128), nn.Linear(128, 128)))
    state = powerSGD_hook.PowerSGDState(
        dist.group.WORLD, matrix_approximation_rank=2, start_powerSGD_iter=2
    )
    factored.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    for _ in range(5):
        factored(torch.randn(8, 128)).sum().backward()
    with counted(recorder, rank) as moved_factored:
        for _ in range(4):
            factored(torch.randn(8, 128)).sum().backward()
    recorder.close()
    return moved_halved, parameter_bytes(halved), moved_factored


@pytest.mark.full
@pytest.mark.parametrize("world_size", [2, 4])
def test_compressed_gradients_count_as_they_travel(world_size):
    # Two weights of 128 x 128 become factors P and Q of 128 x 2 each; two biases of 128 stay.
    biases, factor = 2 * 128 * 4, 2 * 128 * 2 * 4
    for moved_halved, size, moved_factored in run_ranks(compression_worker, world_size):
        assert moved_halved == {("world", "allreduce"): (4, 4 * size // 2)}
        assert moved_factored == {("world", "allreduce"): (4 * 3, 4 * (biases + 2 * factor))}


def operators_worker(rank, world_size):
    recorder = open_counting(rank, world_size)
    ones = torch.ones(10, dtype=torch.float64)
    whole = torch.ones(10 * world_size, dtype=torch.float64)
    pieces = [torch.empty_like(ones) for _ in range(world_size)]
    peer = rank ^ 1
    results = {}

    def count(name, call):
        with counted(recorder, rank) as moved, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # names of before torch 2.13 are counted, too
            call()
        results[name] = moved

    def exchange():
        received = torch.empty(7)
        if rank < peer:
            dist.send(torch.ones(7), peer)
            dist.recv(received, peer)
        else:
            dist.recv(received, peer)
            dist.send(torch.ones(7), peer)

    def exchange_in_a_batch():
        received = torch.empty(7)
        works = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, torch.ones(7), peer),
                dist.P2POp(dist.irecv, received, peer),
            ]
        )
        for work in works:
            work.wait()

    def scatter():
        dist.scatter(torch.empty_like(ones), pieces if rank == 0 else None, src=0)

    count("all_reduce", lambda: dist.all_reduce(ones.clone()))
    count("all_reduce async", lambda: dist.all_reduce(ones.clone(), async_op=True).wait())
    count("all_gather", lambda: dist.all_gather(pieces, ones))
    count("all_gather_into_tensor", lambda: dist.all_gather_into_tensor(whole, ones))
    count("reduce_scatter", lambda: dist.reduce_scatter(ones.clone(), pieces))
    count("reduce_scatter_tensor", lambda: dist.reduce_scatter_tensor(ones.clone(), whole))
    count("broadcast", lambda: dist.broadcast(ones, 0))
    count("reduce", lambda: dist.reduce(ones.clone(), 0))
    count("gather", lambda: dist.gather(ones, pieces if rank == 0 else None, dst=0))
    count("scatter", scatter)
    count("all_to_all_single", lambda: dist.all_to_all_single(torch.empty_like(whole), whole))
    count("send and recv", exchange)
    count("batch_isend_irecv", exchange_in_a_batch)
    count("barrier", dist.barrier)
    count("monitored_barrier", dist.monitored_barrier)
    with torch.inference_mode():
        count("inference", lambda: dist.all_reduce(torch.ones(3)))
    half = dist.new_group([0, 1])
    recorder.name_group(half, "tensor")
    if rank < 2:
        count("named group", lambda: dist.all_reduce(torch.ones(3), group=half))
    unnamed = dist.new_group([0, 1])
    if rank < 2 < world_size:
        count("unnamed group", lambda: dist.all_reduce(torch.ones(3), group=unnamed))
    thread = threading.Thread(target=lambda: count("thread", lambda: dist.all_reduce(ones.clone())))
    thread.start()
    thread.join()
    recorder.close()
    return results


@pytest.mark.sample("2")
@pytest.mark.parametrize("world_size", [2, 4])
def test_each_operator_counts_its_full_side(world_size):
    part, whole = 80, 80 * world_size
    for rank, results in enumerate(run_ranks(operators_worker, world_size)):
        expected = {
            "all_reduce": {("world", "allreduce"): (1, part)},
            "all_reduce async": {("world", "allreduce"): (1, part)},
            "all_gather": {("world", "allgather"): (1, whole)},
            "all_gather_into_tensor": {("world", "_allgather_base"): (1, whole)},
            "reduce_scatter": {("world", "reduce_scatter"): (1, whole)},
            "reduce_scatter_tensor": {("world", "_reduce_scatter_base"): (1, whole)},
            "broadcast": {("world", "broadcast"): (1, part)},
            "reduce": {("world", "reduce"): (1, part)},
            "gather": {("world", "gather"): (1, part)},
            "scatter": {("world", "scatter"): (1, whole if rank == 0 else 0)},
            "all_to_all_single": {("world", "alltoall_base"): (1, whole)},
            "send and recv": {("world", "send"): (1, 28), ("world", "recv"): (1, 28)},
            "batch_isend_irecv": {("world", "send"): (1, 28), ("world", "recv"): (1, 28)},
            "barrier": {("world", "barrier"): (1, 0)},
            "monitored_barrier": {("world", "monitored_barrier"): (1, 0)},
            "inference": {("world", "allreduce"): (1, 12)},
            "thread": {("world", "allreduce"): (1, part)},
        }
        if rank < 2:
            expected["named group"] = {("tensor", "allreduce"): (1, 12)}
        if rank < 2 < world_size:
            expected["unnamed group"] = {("other", "allreduce"): (1, 12)}
        assert results == expected


NUM_TIMED = 3
"""Steps."""
CLOCK_S = 1e-6
"""What a float of seconds leaves of the nanoseconds of a clock."""


class Timed:
    """A phase of a step as telemetry has it, and when this rank did what in it by its own clock.

    However late a rank is woken, it has waited for no longer than what lies around the wait, and no
    shorter than what it waited for. The ranks of a host share the monotonic clock.
    """

    def __init__(self, step, name, times):
        seconds = {each.name: each.seconds for each in step.phases}
        self.own_s, self.communication_s = seconds[name], seconds["communication"]
        self.entering, self.entered, *self.times, self.leaving, self.left = times

    def check(self):
        """The phase and the communication in it take all the time that it lasts."""
        inner_s, outer_s = self.leaving - self.entered, self.left - self.entering
        assert inner_s - CLOCK_S < self.own_s + self.communication_s < outer_s + CLOCK_S


def timed_steps(rank, world_size, name, work):
    """Give what ``work(number)`` of each step took, which returns when it did what."""
    recorder = open_counting(rank, world_size)
    recorder.begin_loop(epoch=0, global_step=0)
    times = []
    for number in range(NUM_TIMED):
        recorder.begin_batch(index=number, epoch=0)
        entering = time.monotonic()
        with recorder.phase(name):
            entered = time.monotonic()
            marks = work(number)
            leaving = time.monotonic()
        times.append([entering, entered, *marks, leaving, time.monotonic()])
        recorder.end_batch(global_step=number + 1, loss=None, samples=1, tokens=None)
    recorder.close()
    dist.barrier()
    with open_job("counting") as job:
        seen = job.snapshot().ranks[rank]
    timed = [Timed(step, name, each) for step, each in zip(seen.steps, times, strict=True)]
    return timed, [each.seconds_per_step for each in seen.collectives]


LATE_S = 0.2


def wait_until_rank_0_waits(number):
    with open_job("counting") as job:
        while True:
            newest = job.snapshot().ranks[0].in_flight
            if newest is not None and (newest.sequence, newest.is_done) == (number, False):
                return


def completion_worker(rank, world_size):
    def reduce(number):
        if rank == 1:
            wait_until_rank_0_waits(number + 1)
            time.sleep(LATE_S)
        called = time.monotonic()
        dist.all_reduce(torch.ones(3))
        return called, time.monotonic()

    return timed_steps(rank, world_size, "forward", reduce)


@pytest.mark.full
def test_completion_is_seen_and_waiting_for_a_late_peer_is_exposed():
    (punctual, (waits_s,)), (late, (late_s,)) = run_ranks(completion_worker, 2)
    for step in punctual:
        called, returned = step.times
        assert LATE_S - CLOCK_S < step.communication_s < returned - called + CLOCK_S
        step.check()
    for step in late:
        called, returned = step.times
        assert step.communication_s < returned - called + CLOCK_S
        step.check()
    assert waits_s > LATE_S - CLOCK_S
    assert late_s < CLOCK_S + max(step.times[1] - step.times[0] for step in late)


def ahead_worker(rank, world_size):
    comm, world = CpuAllGather(), dist.group.WORLD
    assert world is not None

    def gather(number):
        if rank == 1:
            time.sleep(0.3)
        called = time.monotonic()
        output = torch.zeros(2 * world_size)
        work = comm(output, output[2 * rank : 2 * rank + 2].fill_(rank), world)
        time.sleep(0.1)  # what is computed meanwhile
        waits = time.monotonic()
        work.wait()
        waited = time.monotonic()
        time.sleep(0.1)
        assert output.tolist() == [0.0, 0.0, 1.0, 1.0]
        return called, waits, waited

    return timed_steps(rank, world_size, "backward", gather)[0]


@pytest.mark.full
def test_of_a_gather_ahead_only_the_wait_for_it_is_exposed():
    punctual, late = run_ranks(ahead_worker, 2)
    for step in (*punctual, *late):
        _, waits, waited = step.times
        assert step.communication_s < waited - waits + CLOCK_S  # not the time of the whole gather
        step.check()
    # What a rank that is woken late loses before its wait began is no wait: not in every step.
    missed_s = [
        other.times[0] - step.times[1] - step.communication_s
        for step, other in zip(punctual, late, strict=True)
    ]
    assert min(missed_s) < 0.05


class SlowBackward(torch.autograd.Function):
    """Takes a while to compute a gradient."""

    ended = 0.0

    @staticmethod
    def forward(ctx, value, seconds):
        ctx.seconds = seconds
        return value.clone()

    @staticmethod
    def backward(ctx, grad):
        time.sleep(ctx.seconds)
        SlowBackward.ended = time.monotonic()
        return grad, None


class TwoLayers(nn.Module):
    """The second layer's gradient is ready long before the first one's."""

    def __init__(self, late_s):
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.second = nn.Linear(8, 8)
        self.late_s = late_s

    def forward(self, x):
        return self.second(SlowBackward.apply(self.first(x), self.late_s))


def tail_worker(rank, world_size):
    # Rank 1 computes its first layer's gradient 0.2 s later: rank 0 waits for it at the end.
    ddp = DistributedDataParallel(TwoLayers(0.3 if rank else 0.1), bucket_cap_mb=1e-4)

    def pass_back(number):
        ddp(torch.ones(2, 8)).sum().backward()
        return (SlowBackward.ended,)

    return timed_steps(rank, world_size, "backward", pass_back)[0]


@pytest.mark.full
def test_the_exposed_part_of_a_backward_pass_is_the_wait_after_its_last_bucket():
    punctual, late = run_ranks(tail_worker, 2)
    for step in (*punctual, *late):
        (computed,) = step.times
        assert step.communication_s < step.leaving - computed + CLOCK_S
        step.check()
    # What a rank that is woken late loses before its last bucket is no wait: not in every step.
    missed_s = [
        other.times[0] - step.times[0] - step.communication_s
        for step, other in zip(punctual, late, strict=True)
    ]
    assert min(missed_s) < 0.05


def is_installed():
    return COLLECTIVES.is_installed


def installing_worker(rank, world_size):
    for _ in range(20):
        recorder = open_counting(rank, world_size)
        ddp = build_ddp(bucket_cap_mb=0.02)
        train(ddp, 3)
        dist.all_reduce(torch.ones(4))
        assert is_installed()
        recorder.close()
        assert not is_installed()
        dist.all_reduce(torch.ones(4))  # nobody counts this
    return totals(rank)[("world", "allreduce")]


@pytest.mark.full
def test_twenty_installs_and_removals_neither_hang_nor_count_between_them():
    size = parameter_bytes(build_plain())
    for calls, payload_bytes in run_ranks(installing_worker, 2):
        assert payload_bytes == 20 * (3 * size + 16)
        assert calls % 20 == 0


def build_plain():
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 65), nn.Linear(65, 3))


def two_counters_worker(rank, world_size):
    first = open_counting(rank, world_size, "first")
    second = open_counting(rank, world_size, "second")
    dist.all_reduce(torch.ones(4))
    first.close()
    dist.all_reduce(torch.ones(4))
    second.close()
    dist.all_reduce(torch.ones(4))
    key = ("world", "allreduce")
    return totals(rank, "first")[key], totals(rank, "second")[key]


@pytest.mark.full
def test_two_counters_share_one_set_of_kernels():
    assert run_ranks(two_counters_worker, 2) == [((1, 16), (2, 32))] * 2


def degraded_worker(rank, world_size):
    """Open a recorder under four torches that are not as they should be."""
    results: list[tuple[str | None, list[tuple[str, int]], bool]] = []

    def look():
        recorder = open_counting(rank, world_size, f"degraded-{len(results)}")
        dist.all_reduce(torch.ones(4))
        recorder.close()
        dist.barrier()
        snapshot = open_job(f"degraded-{len(results)}").snapshot()
        collectives = [
            (total.operator, total.payload_bytes) for total in snapshot.ranks[rank].collectives
        ]
        results.append((snapshot.communication_note, collectives, COLLECTIVES.is_installed))

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(PAYLOAD, "an_operator_of_the_future_", 0)
        look()
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(PAYLOAD, "allreduce_", None)
        look()
    with pytest.MonkeyPatch.context() as patch:
        patch.delitem(PAYLOAD, "gather_")
        look()
    library = torch.library.Library("c10d", "IMPL")
    library.impl("scatter_", lambda *args: None, "BackendSelect")
    look()
    library._destroy()
    return results


def test_what_torch_lacks_is_named_and_nothing_wrong_is_counted():
    for missing, lying, unknown, taken in run_ranks(degraded_worker, 2):
        assert missing[0].startswith("communication is not counted: torch")
        assert missing[0].endswith("has no operator c10d::an_operator_of_the_future_")
        assert "one all-reduce of 12 bytes as [('allreduce', 'boltmesh-self-test', 0)]" in lying[0]
        assert taken[0].endswith("something else already observes c10d::scatter_")
        for _, collectives, is_installed in (missing, lying, taken):
            assert collectives == []
            assert not is_installed
        assert unknown[0] == "not counted, because this boltmesh does not know them: gather_"
        assert unknown[1] == [("allreduce", 16)]
