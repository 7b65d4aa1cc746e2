"""One rank of the measurement of a machine: ``python -m boltmesh.advisor.microbenchmark``.

All ranks compute at the same time, as in training, so each gets its share of the machine. Rank 0
prints the mean over the ranks as JSON, with the keys of ``cost_model.step_time.Machine``.
"""

import json
import statistics
import sys
import time
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist

PRODUCT = 768
"""Rows and columns of the matrices."""
NUMEL = 2**20
"""Elements that an elementwise operator reads: activations of a small model."""
BUCKET = 2**20
"""Elements of an all-reduce."""
CHAIN = 200
"""Operators of one element, with their backward passes."""
REPEATS = 5


def measure(accelerator: str, dtype: torch.dtype, rank: int) -> dict[str, float]:
    """Return the rates of this rank. Collective."""
    device = torch.device("cpu" if accelerator == "cpu" else f"cuda:{rank}")
    matrix = torch.randn(PRODUCT, PRODUCT, device=device).to(dtype)
    vector = torch.randn(NUMEL, device=device)
    bucket = torch.zeros(BUCKET, device=device)
    one = torch.ones(1, device=device)

    def chain() -> None:
        value = one.clone().requires_grad_()
        for _ in range(CHAIN):
            value = value * one
        value.sum().backward()  # type: ignore[no-untyped-call]

    found = {
        "device_tflops": 2 * PRODUCT**3 / _seconds(lambda: matrix @ matrix, device) / 1e12,
        "memory_gb_s": 3 * 4 * NUMEL / _seconds(lambda: vector + vector, device) / 1e9,
        "operator_us": _seconds(chain, device) / (2 * CHAIN) * 1e6,
    }
    size = dist.get_world_size()
    if size > 1:
        latency = _seconds(lambda: dist.all_reduce(one), device)
        moved = _seconds(lambda: dist.all_reduce(bucket), device)
        sent = 2 * (size - 1) / size * 4 * BUCKET
        found["collective_us"] = latency * 1e6
        found["network_gb_s"] = sent / max(moved - latency, moved / 10) / 1e9
    return found


def _seconds(work: Callable[[], object], device: torch.device) -> float:
    """Return the median time of some work, run by all ranks at once."""
    work()
    taken = []
    for _ in range(REPEATS):
        if dist.get_world_size() > 1:
            dist.barrier()
        _wait(device)
        start = time.perf_counter()
        work()
        _wait(device)
        taken.append(time.perf_counter() - start)
    return statistics.median(taken)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def main(folder: str, rank: str, size: str, accelerator: str, dtype: str) -> None:
    """Join the other ranks by a file, measure, and print."""
    if accelerator != "cpu":
        torch.cuda.set_device(int(rank))
    dist.init_process_group(
        "gloo" if accelerator == "cpu" else "nccl",
        init_method=f"file://{folder}/ranks",
        rank=int(rank),
        world_size=int(size),
        timeout=timedelta(seconds=60),
    )
    own = measure(accelerator, getattr(torch, dtype), int(rank))
    all_ranks: list[dict[str, float]] = [{} for _ in range(int(size))]
    dist.all_gather_object(all_ranks, own)
    if int(rank) == 0:
        mean = {key: statistics.fmean(each[key] for each in all_ranks) for key in own}
        print(json.dumps(mean), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
