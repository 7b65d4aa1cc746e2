"""``PipelineParallelStrategy`` as users run it, beside a hand-written pipeline and beside DDP.

    python tests/benchmarks/pipeline_strategy.py [--ranks 2] [--rounds 6] [--sizes small ...]

Three times: with small steps of some 40 ms, which show what each chunk costs beside its
computation, with large ones of some 300 ms, and with long ones of about a second. The last two take
half the rounds. All together take about five minutes on two cores.

The same network, rows and optimizer everywhere, in the same processes in turn: a job of Lightning's
Trainer with ``PipelineParallelStrategy`` (1F1B), telemetry on and off; ``PipelineStage`` and
``Schedule1F1B`` of torch in a bare loop over the same loader; and ``DDPStrategy`` under a Trainer,
whose ranks have the same rows together. Beside them one process under a Trainer and in a bare loop:
their difference is what Lightning's own loop takes of a step, and it is part of the first ratio.

A round's figure is the median step of the first rank, behind the first few. The last weights of the
first rank's stage are compared before anything is printed. Freed memory is kept, for everybody
alike, see ``keep_freed_memory``.
"""

import argparse
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.utils.data import DataLoader, TensorDataset
from typing_extensions import override

from boltmesh.strategies import DDPStrategy
from boltmesh.strategies.pipeline_parallel import PipelineParallelStrategy
from tests.benchmarks.peers.stepping import (
    Clocks,
    OnWorld,
    fit,
    keep_freed_memory,
    median_step,
    print_ratios,
    read_clocks,
    take_turns,
)
from tests.support.ranks import run_ranks

MICROBATCHES = 8
LAYERS = 3
"""Of each rank."""
LEARNING_RATE = 1e-2


@dataclass(frozen=True)
class Size:
    """How much there is to compute."""

    width: int
    rows: int
    """Of a microbatch."""
    steps: int
    skipped: int
    """Steps at the beginning of a round that do not count."""
    share_of_rounds: float = 1.0


SIZES = {
    "small": Size(width=512, rows=32, steps=24, skipped=6),
    "large": Size(width=1024, rows=128, steps=9, skipped=3, share_of_rounds=0.5),
    "long": Size(width=1536, rows=192, steps=6, skipped=2, share_of_rounds=0.5),
}

Run = Callable[[int, Size], tuple[Clocks, list[Tensor]]]
"""Takes ranks and a size; returns a step's time, and the weights of the first stage."""


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, hidden: Tensor) -> Tensor:
        return nn.functional.gelu(self.linear(hidden))


class Network(LightningModule):
    """Equal layers one behind the other, as many for each rank."""

    def __init__(self, world_size: int, width: int) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.layers = nn.ModuleList(Layer(width) for _ in range(LAYERS * world_size))

    def forward(self, hidden: Tensor) -> Tensor:
        for each in self.layers:
            hidden = each(hidden)
        return hidden

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return loss_of(self(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=LEARNING_RATE)


class Pipeline(PipelineParallelStrategy):
    """Ours, with its messages on the group of the world."""

    @override
    def _build_groups(self) -> dict[str, ProcessGroup]:
        world = dist.group.WORLD
        assert world is not None
        return {**super()._build_groups(), "pipeline": world}


class OnWorldDDP(OnWorld, DDPStrategy):
    """Ours."""


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


def loader(size: Size, *, ranks: int = 1) -> DataLoader[Any]:
    """All rows of a batch; a rank of several that deal them out gets its share."""
    rows = MICROBATCHES * size.rows
    source = torch.Generator().manual_seed(9)
    shape = (size.steps * rows, size.width)
    inputs, targets = (torch.randn(shape, generator=source) for _ in range(2))
    return DataLoader(TensorDataset(inputs, targets), batch_size=rows // ranks)


def weights(layers: Iterable[nn.Module]) -> list[Tensor]:
    return [each.detach().clone() for layer in layers for each in layer.parameters()]


def with_trainer(make: Callable[[], Any], *, divides_rows: bool = False) -> Run:
    def run(world_size: int, size: Size) -> tuple[Clocks, list[Tensor]]:
        network = Network(world_size, size.width)
        data = loader(size, ranks=world_size if divides_rows else 1)
        starts = fit(network, data, strategy=make(), devices=world_size, steps=size.steps)
        return median_step(starts, skipped=size.skipped), weights(network.layers[:LAYERS])

    return run


def torch_pipeline(world_size: int, size: Size) -> tuple[Clocks, list[Tensor]]:
    rank = dist.get_rank()
    first = LAYERS * rank
    part = nn.Sequential(*Network(world_size, size.width).layers[first : first + LAYERS])
    stage = PipelineStage(part, rank, world_size, torch.device("cpu"), group=dist.group.WORLD)
    # Gradients are divided by the number of microbatches, which are of one size.
    schedule = Schedule1F1B(stage, MICROBATCHES, loss_fn=loss_of)
    optimizer = torch.optim.SGD(part.parameters(), lr=LEARNING_RATE)
    starts = []
    for inputs, targets in loader(size):
        starts.append(read_clocks())
        optimizer.zero_grad()
        schedule.step(
            *((inputs,) if rank == 0 else ()),
            **({"target": targets} if rank == world_size - 1 else {}),
        )
        optimizer.step()
    return median_step(starts, skipped=size.skipped), weights(part)


def bare_loop(world_size: int, size: Size) -> tuple[Clocks, list[Tensor]]:
    network = Network(world_size, size.width)
    optimizer = torch.optim.SGD(network.parameters(), lr=LEARNING_RATE)
    starts = []
    for inputs, targets in loader(size):
        starts.append(read_clocks())
        optimizer.zero_grad()
        loss_of(network(inputs), targets).backward()
        optimizer.step()
    return median_step(starts, skipped=size.skipped), weights(network.layers[:LAYERS])


TOGETHER: Mapping[str, Run] = {
    "boltmesh pipeline": with_trainer(lambda: Pipeline(microbatches=MICROBATCHES)),
    "the same, telemetry off": with_trainer(
        lambda: Pipeline(microbatches=MICROBATCHES, telemetry=False)
    ),
    "torch pipeline, no Trainer": torch_pipeline,
    "boltmesh DDP": with_trainer(OnWorldDDP, divides_rows=True),
}
ALONE: Mapping[str, Run] = {
    "one process, Trainer": with_trainer(lambda: "auto"),
    "one process, no Trainer": bare_loop,
}


def measure(
    rank: int, world_size: int, rounds: int, size: Size, names: Sequence[str]
) -> dict[str, list[Clocks]]:
    warnings.simplefilter("ignore")
    keep_freed_memory()
    runs = {**TOGETHER, **ALONE}
    times: dict[str, list[Clocks]] = {name: [] for name in names}
    known: list[Tensor] | None = None
    for turn in take_turns(names, rounds):
        for name in turn:
            taken, made = runs[name](world_size, size)
            times[name].append(taken)
            if rank == 0:
                known = made if known is None else known
                for mine, first in zip(made, known, strict=True):
                    torch.testing.assert_close(mine, first)
    return times


def forward_chunk_s(size: Size) -> float:
    """Return how long a rank's layers take for one microbatch, alone on the machine."""
    part = nn.Sequential(*Network(1, size.width).layers)
    rows = torch.randn(size.rows, size.width)
    taken = []
    for _ in range(20):
        start = time.perf_counter()
        part(rows)
        taken.append(time.perf_counter() - start)
    return statistics.median(taken)


def report(name: str, ranks: int, rounds: int) -> None:
    size = SIZES[name]
    rounds = max(1, round(rounds * size.share_of_rounds))
    together = run_ranks(measure, ranks, rounds, size, list(TOGETHER), timeout_s=1800.0)[0]
    alone = run_ranks(measure, 1, rounds, size, list(ALONE), timeout_s=1800.0)[0]
    print(f"{name}: {ranks} ranks, width {size.width}, {MICROBATCHES} microbatches of {size.rows} "
          f"rows, a forward chunk of {1e3 * forward_chunk_s(size):.1f} ms, {rounds} rounds of "
          f"{size.steps} steps")  # fmt: skip
    print_ratios(together, ["torch pipeline, no Trainer", "boltmesh DDP"])
    print_ratios(alone, ["one process, no Trainer"])
    hand_written, bare = together["torch pipeline, no Trainer"], alone["one process, no Trainer"]
    for title, mine, peer in (
        ("boltmesh", together["boltmesh pipeline"], hand_written),
        ("boltmesh without telemetry", together["the same, telemetry off"], hand_written),
        ("Lightning's own loop", alone["one process, Trainer"], bare),
    ):
        wall, cpu = (
            1e3 * statistics.median(a[clock] - b[clock] for a, b in zip(mine, peer, strict=True))
            for clock in range(2)
        )
        print(f"  {title} takes {wall:+.2f} ms of a step, {cpu:+.2f} ms of CPU time")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES))
    options = parser.parse_args()
    torch.set_num_threads(1)
    for name in options.sizes:
        report(name, options.ranks, options.rounds)


if __name__ == "__main__":
    main()
