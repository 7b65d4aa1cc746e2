"""The bubble and the step of schedules whose chunks sleep: what the schedule costs, and no more.

    python -m tests.benchmarks.sleeping_stages [--ranks 2 4] [--microbatches 8] [--steps 10]

20 ms forward, 40 ms backward, messages over gloo on one host. Prints medians of the steps after the
first two, of the first rank; the bubble as the executor tells it.
"""

import statistics
import time
from argparse import ArgumentParser

import torch
import torch.distributed as dist

from boltmesh.strategies.pipeline.options import PipelineOptions
from boltmesh.strategies.pipeline.runtime.runtime import PipelineRuntime
from boltmesh.strategies.pipeline.schedules.actions import RankPrograms
from tests.strategies.pipeline.runtime.test_bubble import SleepyStage
from tests.support.ranks import run_ranks

SCHEDULES = ("1f1b", "zero_bubble", "pipedream_2bw")
SETTLING = 2


def measure(
    rank: int, world_size: int, name: str, microbatches: int, steps: int
) -> tuple[list[float], list[float]]:
    """Seconds and bubble of each step; the bubble is known one step late."""
    executor = PipelineRuntime(dist.new_group(list(range(world_size))), torch.device("cpu"))
    programs = RankPrograms(
        PipelineOptions(schedule=name, microbatches=microbatches), world_size, rank
    )
    stages = [SleepyStage(rank, world_size)]
    seconds, bubbles, before = [], [], 0
    for _ in range(steps):
        if programs.is_asynchronous:
            program, before = programs.asynchronous(before, microbatches), microbatches
        else:
            program = programs.of(microbatches)
        start = time.monotonic()
        executor.run(program, stages)
        seconds.append(time.monotonic() - start)
        if executor.bubble is not None:
            bubbles.append(executor.bubble)
    if before:
        executor.run(programs.asynchronous(before, 0), [])
    executor.close()
    return seconds[SETTLING:], bubbles[SETTLING:]


def main() -> None:
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--steps", type=int, default=10)
    options = parser.parse_args()
    print("| ranks | schedule | bubble | step |\n| --- | --- | --- | --- |", flush=True)
    for ranks in options.ranks:
        for name in SCHEDULES:
            found = run_ranks(measure, ranks, name, options.microbatches, options.steps)[0]
            seconds, bubble = map(statistics.median, found)
            print(f"| {ranks} | `{name}` | {bubble:.1%} | {seconds:.3f} s |", flush=True)


if __name__ == "__main__":
    main()
