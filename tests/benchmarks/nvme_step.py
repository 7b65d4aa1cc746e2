"""The optimizer step on disk, beside what the disk and the arithmetic take by themselves.

    OMP_NUM_THREADS=2 python tests/benchmarks/nvme_step.py [FOLDER] [--numel 200e6] [--rounds 9]

The step is AdamW over state in a ``DiskStateStore``: chunk by chunk it is read, stepped by torch's
fused kernel, copied out in bf16 and written back, with checksums. Each round runs, in random order,

* the step,
* the same reads and writes, both at once and without sums, and nothing else (``raw``),
* the same arithmetic on state in host memory (``memory``).

A step cannot be faster than the slower of raw and memory; printed is the median over the rounds of
how much of that limit it reaches. Raw moves the step's own bytes, in the step's own file: on a
virtual disk files differ by half in how fast they are written, for as long as they live, and a
limit taken from another file is no limit. The state is compared with the one in memory at the end,
to the bit. A virtual disk that its host caches flatters reading and writing alike: trust ratios.

FOLDER is on the disk to measure; by default a temporary folder in the current directory.
"""

import argparse
import contextlib
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
from torch import Tensor

from boltmesh.strategies.offload.disk.state_store import NUM_BUFFERS, DiskStateStore
from boltmesh.strategies.offload.disk.swap_file import NUM_THREADS, Swap
from boltmesh.strategies.offload.disk.transfer import BLOCK_BYTES, Block, Ticket, TransferPool
from boltmesh.strategies.offload.host_memory import allocate_host, as_bytes
from boltmesh.strategies.offload.memory_stores import HostStore
from boltmesh.strategies.offload.store_api import CHUNK_NUMEL, StateStore
from boltmesh.strategies.torch_compat.optimizers import fused_adam

CPU = torch.device("cpu")
AHEAD = 3
RING_BYTES = 384 << 20
"""What raw reads into: as much as a ring of 4 buffers, and more than any cache."""
ADAMW = {
    "lr": 1e-3, "beta1": 0.9, "beta2": 0.999, "weight_decay": 0.01, "eps": 1e-8,
    "amsgrad": False, "maximize": False,
}  # fmt: skip


class Stepper:
    """AdamW over the chunks of one store."""

    def __init__(self, store: StateStore, numel: int) -> None:
        self.store = store
        self.sizes = [min(CHUNK_NUMEL, numel - at) for at in range(0, numel, CHUNK_NUMEL)]
        self.number = 0
        for chunk, size in enumerate(self.sizes):
            generator = torch.Generator().manual_seed(chunk)
            master = torch.randn(size, generator=generator)
            store.create(chunk, [master, torch.zeros(size), torch.zeros(size)])
        store.flush()

    def step(self, gradient: Tensor, copy: Tensor) -> None:
        """One optimizer step; returns when everything is written."""
        self.number += 1
        count = torch.tensor(float(self.number))
        for chunk, size in enumerate(self.sizes):
            for ahead in range(chunk, min(len(self.sizes), chunk + AHEAD + 1)):
                self.store.prefetch(ahead)
            master, first, second = self.store.acquire(chunk)
            here = slice(chunk * CHUNK_NUMEL, chunk * CHUNK_NUMEL + size)
            fused_adam(is_decoupled=True)(
                [master], [gradient[here]], [first], [second], [], [count], **ADAMW
            )
            copy[here].copy_(master)
            self.store.release(chunk, is_dirty=True)
        self.store.flush()


class RawDisk:
    """The transfers of a step without the step, over the file that the step uses."""

    def __init__(self, swap: Swap, num_bytes: int) -> None:
        self.file = swap.file
        self.num_bytes = num_bytes
        self.into = allocate_host(RING_BYTES, device=CPU)
        self.state = allocate_host(num_bytes, device=CPU)
        self.reads, self.writes = (TransferPool(NUM_THREADS, name) for name in ("read", "write"))

    def prepare(self) -> None:
        """Take what is in the file now, for that is what ``step`` writes."""
        self.move(self.reads, self.file.read, self.state).wait()

    def step(self) -> None:
        """All reads and all writes of a step, at once, and never both of the same block."""
        tickets = [
            self.move(self.reads, self.file.read, self.into),
            self.move(self.writes, self.file.write, self.state, self.num_bytes // 2),
        ]
        for ticket in tickets:
            ticket.wait()

    def move(
        self,
        pool: TransferPool,
        call: Callable[[memoryview, int], None],
        memory: Tensor,
        first: int = 0,
    ) -> Ticket:
        offsets = range(0, self.num_bytes, BLOCK_BYTES)
        blocks: list[Block] = []
        for number in range(len(offsets)):
            offset = offsets[(number + first // BLOCK_BYTES) % len(offsets)]
            start = offset % memory.numel()
            size = min(BLOCK_BYTES, self.num_bytes - offset)
            blocks.append(partial(call, as_bytes(memory[start : start + size]), offset))
        ticket = Ticket(memory, len(blocks), lambda _: None)
        pool.submit(ticket, blocks)
        return ticket


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, nargs="?")
    parser.add_argument("--numel", type=float, default=200e6)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--buffers", type=int, default=NUM_BUFFERS, help="chunks in the ring")
    options = parser.parse_args()
    if options.numel <= options.buffers * CHUNK_NUMEL:
        parser.error(f"--numel {options.numel:.0f} fits into the ring: nothing would be read")
    with contextlib.ExitStack() as stack:
        folder = options.folder
        if folder is None:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=Path.cwd())))
        measure(folder, int(options.numel), options.rounds, options.buffers)


def measure(folder: Path, numel: int, rounds: int, num_buffers: int) -> None:
    gradient, copy = torch.randn(numel) * 1e-2, torch.zeros(numel, dtype=torch.bfloat16)
    num_bytes = sum(
        DiskStateStore.bytes_of(min(CHUNK_NUMEL, numel - at), 3)
        for at in range(0, numel, CHUNK_NUMEL)
    )
    swap = Swap(folder, num_bytes)
    disk = Stepper(DiskStateStore(swap, device=CPU, num_buffers=num_buffers), numel)
    memory = Stepper(HostStore(CPU), numel)
    raw = RawDisk(swap, num_bytes)
    variants: dict[str, Callable[[], None]] = {
        "step": partial(disk.step, gradient, copy),
        "raw": raw.step,
        "memory": partial(memory.step, gradient, torch.zeros_like(copy)),
    }
    times: dict[str, list[float]] = {name: [] for name in variants}
    for number in range(rounds + 1):
        for name in random.sample(list(variants), len(variants)):
            if name != "memory":
                raw.prepare()  # before the step too: what a host caches, it caches for both
            start = time.perf_counter()
            variants[name]()
            if number:  # the first round warms up
                times[name].append(time.perf_counter() - start)
    limits = [max(pair) for pair in zip(times["raw"], times["memory"], strict=True)]
    print(f"{numel / 1e6:.0f}M parameters, {num_bytes / 1e9:.2f} GB read and written, "
          f"ring of {num_buffers}, {rounds} rounds, direct I/O: {swap.file.is_direct}")  # fmt: skip
    for name, each in times.items():
        reached = sorted(a / b for a, b in zip(limits, each, strict=True))
        print(f"  {name:<10}{statistics.median(each):8.3f} s   "
              f"{statistics.median(reached):.3f} of the limit "
              f"({reached[0]:.3f} to {reached[-1]:.3f})")  # fmt: skip
    for chunk in range(len(memory.sizes)):
        here, there = disk.store.acquire(chunk), memory.store.acquire(chunk)
        assert all(torch.equal(a, b) for a, b in zip(here, there, strict=True)), chunk
        disk.store.release(chunk, is_dirty=False)
    print("  equal to memory, to the bit")
    disk.store.close()


if __name__ == "__main__":
    main()
