"""What the machine could do at most: the same arithmetic, and the same bytes to and from the disk.

Written without a line of the engines that are measured, and as simply as it can be: no ring, no
order, no waiting for anything but the end.
"""

import mmap
import os
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path

import torch
from torch import Tensor

from tests.benchmarks.peers.network import build_batches, build_network, loss_of
from tests.benchmarks.peers.problem import Problem
from tests.benchmarks.peers.turns import Turns

CHUNK = 8 << 20
"""Parameters stepped at once; their state of three fp32 tensors is 96 MiB."""
BLOCK_BYTES = 4 << 20
THREADS = 4
"""For reads, and as many for writes. More do not help, nor do smaller blocks or libaio."""
RING_BYTES = 384 << 20
"""Memory that is read into, and as much that is written from. More than any cache holds."""
HUGE_PAGE = 2 << 20


def forward_and_backward(connection: Connection, problem: Problem) -> None:
    """The network alone: what every engine has to compute, and nothing of an optimizer."""
    dtype = torch.bfloat16 if problem.is_bf16 else torch.float32
    network = build_network(problem.width, problem.depth).to(dtype)
    batches = build_batches(problem.width, problem.rows)
    turns = Turns(connection)
    number = 0
    while turns.begin_step():
        inputs, targets = batches[number % len(batches)]
        for each in network.parameters():
            each.grad = None
        loss = loss_of(network(inputs.to(dtype)), targets, scale=problem.loss_scale)
        loss.backward()
        turns.end_backward()
        turns.end_step(loss.item(), 0.0)
        number += 1


def adam(connection: Connection, problem: Problem) -> None:
    """torch's fused AdamW over flat fp32 tensors in memory, and the narrow copy it ends in."""
    numel = problem.num_parameters
    held = min(numel, 3 * CHUNK)  # more than any cache
    parameter, gradient, first, second = (_flat(held) for _ in range(4))
    narrow = torch.zeros(held, dtype=torch.bfloat16)
    count = torch.zeros(())
    turns = Turns(connection)
    while turns.begin_step():
        turns.end_backward()
        count += 1
        for start in range(0, numel, CHUNK):
            size = min(CHUNK, numel - start)
            cut = slice(start % held, start % held + size)
            torch._fused_adamw_(
                [parameter[cut]], [gradient[cut]], [first[cut]], [second[cut]], [], [count],
                lr=problem.lr, beta1=0.9, beta2=0.999, weight_decay=problem.weight_decay,
                eps=1e-8, amsgrad=False, maximize=False,
            )  # fmt: skip
            if problem.is_bf16:
                narrow[cut].copy_(parameter[cut])
        turns.end_step(0.0, 0.0)


def disk(connection: Connection, problem: Problem) -> None:
    """Read a file of the state's size and write another one, both at once."""
    num_blocks = -(-12 * problem.num_parameters // BLOCK_BYTES)
    read = Stripes(problem.folder / "limit-read", num_blocks, is_write=False)
    written = Stripes(problem.folder / "limit-written", num_blocks, is_write=True)
    turns = Turns(connection)
    with ThreadPoolExecutor(2 * THREADS) as pool:
        while turns.begin_step():
            turns.end_backward()
            jobs = [
                pool.submit(each.move, thread)
                for thread in range(THREADS)
                for each in (read, written)
            ]
            for job in jobs:
                job.result()
            turns.end_step(0.0, 0.0)


class Stripes:
    """A file whose blocks are dealt to threads like cards."""

    def __init__(self, path: Path, num_blocks: int, *, is_write: bool) -> None:
        self._num_blocks, self._is_write = num_blocks, is_write
        self._buffer = memoryview(_pages(RING_BYTES))
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)
        path.unlink()
        os.posix_fallocate(self._file, 0, num_blocks * BLOCK_BYTES)
        for block in range(num_blocks):  # what was never written is read as zeros, from nowhere
            self._write(block)

    def move(self, thread: int) -> None:
        for block in range(thread, self._num_blocks, THREADS):
            (self._write if self._is_write else self._read)(block)

    def _read(self, block: int) -> None:
        count = os.preadv(self._file, [self._slot(block)], block * BLOCK_BYTES)
        assert count == BLOCK_BYTES

    def _write(self, block: int) -> None:
        count = os.pwritev(self._file, [self._slot(block)], block * BLOCK_BYTES)
        assert count == BLOCK_BYTES

    def _slot(self, block: int) -> memoryview:
        start = block * BLOCK_BYTES % RING_BYTES
        return self._buffer[start : start + BLOCK_BYTES]


def _flat(numel: int) -> Tensor:
    return torch.frombuffer(_pages(4 * numel), dtype=torch.float32, count=numel)


def _pages(num_bytes: int) -> mmap.mmap:
    size = -(-num_bytes // HUGE_PAGE) * HUGE_PAGE
    pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    pages.madvise(mmap.MADV_HUGEPAGE)
    torch.frombuffer(pages, dtype=torch.uint8).zero_()  # they exist from now on
    return pages
