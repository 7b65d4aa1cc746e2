"""Times the steps of several ways to train that take turns in the same processes.

A machine that is slow for a while is slow for all of them, and what counts is the median of the
rounds' ratios. Two gloo groups of the same ranks differ by up to 8 % of a step for as long as they
live, either way and by chance, so everybody who can be is put on that of the world.
"""

import ctypes
import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from torch.distributed import ProcessGroup

Clocks = tuple[float, float]
"""Seconds of wall time and of CPU time of the thread that trains."""


class OnWorld:
    """Puts a strategy of ours, to be named behind this, on the process group of the world."""

    def _build_groups(self) -> dict[str, ProcessGroup]:
        world = dist.group.WORLD
        assert world is not None
        return {"data": world}


_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
"""Of ``malloc.h``."""
_KEPT_BYTES = 1 << 30


def keep_freed_memory() -> None:
    """Have glibc keep what this process frees, as torch does on a GPU.

    By itself it gives the end of its heap back as soon as some MB of it are free, and every page
    of that is a fault in the next step. Whether gradients lie at the end is chance, and stays as it
    is for a whole run.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)
        libc.mallopt(_M_MMAP_THRESHOLD, _KEPT_BYTES)


def read_clocks() -> Clocks:
    return time.perf_counter(), time.thread_time()


class Stopwatch(Callback):
    """From the start of one batch to the start of the next: everything that a step costs."""

    def __init__(self) -> None:
        self.starts: list[Clocks] = []

    def on_train_batch_start(self, *args: Any) -> None:
        self.starts.append(read_clocks())


def fit(
    network: LightningModule, data: object, *, strategy: Any, devices: int, steps: int, **more: Any
) -> list[Clocks]:
    """Train under a Trainer that does nothing else; return when each step began."""
    watch = Stopwatch()
    trainer = Trainer(
        accelerator="cpu", devices=devices, strategy=strategy, max_steps=steps, logger=False,
        callbacks=[watch], enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, **more,
    )  # fmt: skip
    trainer.fit(network, data)
    return watch.starts


def median_step(starts: Sequence[Clocks], *, skipped: int) -> Clocks:
    """Return the median step behind the first few, in which caches fill."""
    wall, cpu = (
        statistics.median([after - before for before, after in itertools.pairwise(clock)][skipped:])
        for clock in zip(*starts, strict=True)
    )
    return wall, cpu


def take_turns(names: Sequence[str], rounds: int) -> Iterator[list[str]]:
    """Give the order of each round: nobody always comes first."""
    for number in range(rounds):
        turn = number % len(names)
        yield [*names[turn:], *names[:turn]]


def print_ratios(times: Mapping[str, Sequence[Clocks]], peers: Sequence[str]) -> None:
    """Print the medians over the rounds, and the median ratio of a round to each peer."""
    pick: list[Callable[[Clocks], float]] = [lambda each: each[0], lambda each: each[1]]
    for name, mine in times.items():
        line = f"  {name:<24}"
        for kind, clock in zip(("wall", "CPU"), pick, strict=True):
            line += f"   {kind} {1e3 * statistics.median(map(clock, mine)):7.3f} ms"
            for peer in peers:
                pairs = zip(map(clock, mine), map(clock, times[peer]), strict=True)
                line += f"  {statistics.median(a / b for a, b in pairs):.3f} x {peer}"
        print(line)
