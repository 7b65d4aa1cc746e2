"""One rank of the measurement of a machine: ``python -m boltmesh.advisor.microbenchmark``.

All ranks compute at the same time, as in training, so each gets its share of the machine. Rank 0
prints the mean over the ranks as JSON, with the keys of ``cost_model.step_time.Machine``.
"""

import contextlib
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

PRODUCT = 768
"""Rows and columns of the matrices."""
NUMEL = 2**20
"""Elements that an elementwise operator reads: activations of a small model."""
LARGE = 2**24
"""Elements that no cache holds: a step of the optimizer on a host."""
MESSAGES = {"cpu": (4, 2**16, 2**20, 2**24), "cuda": (4, 2**16, 2**20, 2**24, 2**27)}
"""Bytes of all-reduces, by the kind of device."""
CHAIN = 200
"""Operators of one element, with their backward passes."""
FILE_BYTES = 2**26
REPEATS = 5
ROUNDS = 3
"""Times that all is measured: the median of them leaves out a burst of other load."""


def measure(accelerator: str, dtype: torch.dtype, rank: int, folder: str) -> dict[str, Any]:
    """Return the rates of this rank; its disk is that of a folder. Collective."""
    device = torch.device("cpu" if accelerator == "cpu" else f"cuda:{rank}")
    found: dict[str, Any] = _joined(
        [_rates(device, dtype) for _ in range(ROUNDS)], statistics.median
    )
    with contextlib.suppress(OSError):  # it may not be written to, or be full
        found["disk_write_gb_s"], found["disk_read_gb_s"] = _disk_rates(folder)
    return found


def _rates(device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    """Return the rates of this rank but those of the disk. Collective."""
    matrix = torch.randn(PRODUCT, PRODUCT, device=device).to(dtype)
    vector = torch.randn(NUMEL, device=device)
    one = torch.ones(1, device=device)

    def chain() -> None:
        value = one.clone().requires_grad_()
        for _ in range(CHAIN):
            value = value * one
        value.sum().backward()  # type: ignore[no-untyped-call]

    found: dict[str, Any] = {
        "device_tflops": 2 * PRODUCT**3 / _seconds(lambda: matrix @ matrix, device) / 1e12,
        "memory_gb_s": 3 * 4 * NUMEL / _seconds(lambda: vector + vector, device) / 1e9,
        "operator_us": _seconds(chain, device) / (2 * CHAIN) * 1e6,
    }
    on_gpu = device.type == "cuda"
    host = torch.ones(LARGE, pin_memory=on_gpu)
    found["host_gb_s"] = 2 * 4 * LARGE / _seconds(lambda: host.add_(1.0), device) / 1e9
    if on_gpu:
        there = torch.empty(LARGE, device=device)
        found["bus_gb_s"] = 4 * LARGE / _seconds(lambda: there.copy_(host), device) / 1e9
    if dist.get_world_size() > 1:
        found["allreduce_s"] = _all_reduces(device)
    return found


def _all_reduces(device: torch.device) -> dict[int, dict[int, float]]:
    """Return the seconds of all-reduces by ranks of a group and bytes; all groups run at once."""
    world = dist.get_world_size()
    found: dict[int, dict[int, float]] = {}
    for size in (each for each in range(2, world + 1) if world % each == 0):
        group = None
        if size < world:
            group = dist.new_subgroups(size)[0]  # type: ignore[no-untyped-call]
        found[size] = {}
        for num_bytes in MESSAGES[device.type]:
            bucket = torch.zeros(num_bytes // 4, device=device)

            def reduce(bucket: torch.Tensor = bucket, group: Any = group) -> None:
                dist.all_reduce(bucket, group=group)

            found[size][num_bytes] = _seconds(reduce, device)
    return found


def _disk_rates(folder: str) -> tuple[float, float]:
    """Return 10^9 bytes per second that a file takes, and gives once it is in no cache."""
    content = os.urandom(FILE_BYTES)
    with tempfile.TemporaryDirectory(prefix=".boltmesh-rates-", dir=folder) as place:
        path = Path(place, "rank")

        def write() -> None:
            with path.open("wb", buffering=0) as file:
                file.write(content)
                os.fsync(file.fileno())

        def read() -> None:
            with path.open("rb", buffering=0) as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
                while file.read(2**23):
                    pass

        rates = [
            FILE_BYTES / _seconds(work, torch.device("cpu"), repeats=2) / 1e9
            for work in (write, read)
        ]
    return rates[0], rates[1]


def _seconds(work: Callable[[], object], device: torch.device, repeats: int = REPEATS) -> float:
    """Return the median time of some work, run by all ranks at once."""
    work()
    taken = []
    for _ in range(repeats):
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


def _joined(values: list[Any], join: Callable[[list[float]], float]) -> Any:
    """Return one number for several, or one mapping, joined by key."""
    if isinstance(values[0], dict):
        shared = [key for key in values[0] if all(key in each for each in values)]
        return {key: _joined([each[key] for each in values], join) for key in shared}
    return join(values)


def main(folder: str, disk: str, rank: str, size: str, accelerator: str, dtype: str) -> None:
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
    own = measure(accelerator, getattr(torch, dtype), int(rank), disk)
    all_ranks: list[dict[str, Any]] = [{} for _ in range(int(size))]
    dist.all_gather_object(all_ranks, own)
    if int(rank) == 0:
        print(json.dumps(_joined(all_ranks, statistics.fmean)), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
