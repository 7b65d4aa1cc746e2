"""A step of the pipeline's executor beside hand-written ``torch.distributed.pipelining``.

    python tests/benchmarks/pipeline_step.py [--ranks 2] [--rounds 8] [--steps 20] [--width 512]

Both train the same stages on the same microbatches in the same processes, in turn, round after
round: ``PipelineStage`` with ``Schedule1F1B`` and ``ScheduleGPipe`` there, the same schedules here.
Gradients are compared first. A round's figure is its median step on the first rank, which begins
and ends every step; printed are the medians and the median of the rounds' ratios. Messages go over
one group: two gloo groups of the same ranks differ by chance, see ``ddp_step.py``.
"""

import argparse
import itertools
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

from boltmesh.strategies.pipeline.runtime.runtime import PipelineRuntime
from boltmesh.strategies.pipeline.runtime.stage import ValueSpec
from tests.support.programs import programs
from tests.support.ranks import run_ranks

MICROBATCHES = 8
ROWS = 32
LAYERS = 3
SCHEDULES: dict[str, Any] = {"1f1b": Schedule1F1B, "gpipe": ScheduleGPipe}


def build_part(rank: int, width: int) -> nn.Sequential:
    torch.manual_seed(rank)
    return nn.Sequential(
        *(each for _ in range(LAYERS) for each in (nn.Linear(width, width), nn.GELU()))
    )


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean() / MICROBATCHES


class Part:
    """A part of the model as the executor sees it."""

    def __init__(self, rank: int, world_size: int, module: nn.Module, data: Tensor) -> None:
        self.index = rank
        self.is_first, self.is_last = rank == 0, rank == world_size - 1
        self.module, self.data = module, data.chunk(MICROBATCHES)
        self.specs = (ValueSpec(tuple(self.data[0].shape), torch.float32, True, "activation"),)

    def values_in(self, microbatch: int) -> tuple[ValueSpec, ...]:
        return () if self.is_first else self.specs

    def values_out(self, microbatch: int) -> tuple[ValueSpec, ...]:
        return () if self.is_last else self.specs

    def forward(self, microbatch: int, received: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        output = self.module(received[0] if received else self.data[microbatch])
        return (loss_of(output, self.data[microbatch]) if self.is_last else output,)


def ours(
    name: str, rank: int, world_size: int, module: nn.Module, data: Tensor
) -> Callable[[], object]:
    executor = PipelineRuntime(dist.group.WORLD, torch.device("cpu"))
    program = programs(name, world_size, MICROBATCHES)[rank]
    stages = [Part(rank, world_size, module, data)]
    return lambda: executor.run(program, stages)


def theirs(
    name: str, rank: int, world_size: int, module: nn.Module, data: Tensor
) -> Callable[[], object]:
    stage = PipelineStage(module, rank, world_size, torch.device("cpu"), group=dist.group.WORLD)
    schedule = SCHEDULES[name](stage, MICROBATCHES, loss_fn=loss_of, scale_grads=False)
    arguments = (data,) if rank == 0 else ()
    target = {"target": data} if rank == world_size - 1 else {}
    return lambda: schedule.step(*arguments, **target)


def measure(
    rank: int, world_size: int, rounds: int, steps: int, width: int
) -> dict[str, list[float]]:
    warnings.simplefilter("ignore")
    torch.manual_seed(99)
    data = torch.randn(MICROBATCHES * ROWS, width)
    module = build_part(rank, width)
    variants = {
        f"{name}, {who}": make(name, rank, world_size, module, data)
        for name in SCHEDULES
        for who, make in (("boltmesh", ours), ("torch", theirs))
    }
    grads = {}
    for name, run in variants.items():
        run()  # torch finds out shapes in its first step
        module.zero_grad()  # to None, so that gradients that were noted stay as they are
        run()
        grads[name] = [parameter.grad for parameter in module.parameters()]
        module.zero_grad()
    for each in grads.values():
        for mine, first in zip(each, grads["1f1b, torch"], strict=True):
            torch.testing.assert_close(mine, first)
    times: dict[str, list[float]] = {name: [] for name in variants}
    names = list(variants)
    for number in range(rounds):
        turn = number % len(names)  # nobody always comes first
        for name in names[turn:] + names[:turn]:
            dist.barrier()
            ends = [time.perf_counter()]
            for _ in range(steps):
                module.zero_grad()
                variants[name]()
                ends.append(time.perf_counter())
            times[name].append(
                statistics.median(after - before for before, after in itertools.pairwise(ends))
            )
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--width", type=int, default=512)
    options = parser.parse_args()
    times = run_ranks(
        measure, options.ranks, options.rounds, options.steps, options.width, timeout_s=1800.0
    )[0]
    print(f"{options.ranks} ranks, width {options.width}, {MICROBATCHES} microbatches, "
          f"{options.rounds} rounds of {options.steps} steps")  # fmt: skip
    for name in SCHEDULES:
        mine, peer = times[f"{name}, boltmesh"], times[f"{name}, torch"]
        ratios = sorted(a / b for a, b in zip(mine, peer, strict=True))
        print(f"  {name:<6} boltmesh {1e3 * statistics.median(mine):7.2f} ms   torch "
              f"{1e3 * statistics.median(peer):7.2f} ms   ratio {statistics.median(ratios):.3f} "
              f"({ratios[0]:.3f} to {ratios[-1]:.3f})")  # fmt: skip


if __name__ == "__main__":
    main()
