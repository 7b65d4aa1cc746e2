"""Step time of ``DDPStrategy`` with telemetry, beside Lightning's DDPStrategy and plain torch DDP.

    python tests/benchmarks/ddp_step.py [--ranks 2] [--rounds 9] [--steps 60] [--width 512]

All variants train the same model on the same data in the same processes, in turn, round after
round; a machine that is slow for a while is slow for all of them. Each round's figure is the
median step; printed are the medians over the rounds and the median of the rounds' ratios, in wall
time and in CPU time of the thread that trains.

Lightning and plain torch reduce over the group of the world; ours makes one of its own for the
data axis, and here is given that of the world, see ``peers/stepping.py``.
"""

import argparse
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.strategies import DDPStrategy as LightningDDPStrategy
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from boltmesh.strategies import DDPStrategy
from tests.benchmarks.peers.stepping import (
    Clocks,
    OnWorld,
    fit,
    median_step,
    print_ratios,
    read_clocks,
    take_turns,
)
from tests.support.ranks import run_ranks

BATCH = 16
SKIPPED = 8
"""First steps of a round, in which DDP rebuilds its buckets and caches fill."""


class Network(LightningModule):
    """A multilayer perceptron; the width sets how long a step takes."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 1)
        )

    def forward(self, inputs: Tensor) -> Tensor:
        return self.net(inputs).square().mean()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self(batch[0])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


class OnWorldDDP(OnWorld, DDPStrategy):
    """Ours."""


def loader(steps: int, world_size: int) -> DataLoader[Any]:
    data = TensorDataset(torch.randn(steps * BATCH * world_size, 64))
    return DataLoader(data, batch_size=BATCH)


def with_trainer(make: Callable[[], Any]) -> Callable[[int, int, int], Clocks]:
    def run(world_size: int, steps: int, width: int) -> Clocks:
        starts = fit(
            Network(width),
            loader(steps, world_size),
            strategy=make(),
            devices=world_size,
            steps=steps,
        )
        return median_step(starts, skipped=SKIPPED)

    return run


def plain_torch(world_size: int, steps: int, width: int) -> Clocks:
    module = DistributedDataParallel(Network(width))
    optimizer = torch.optim.SGD(module.parameters(), lr=1e-3)
    starts = []
    for (inputs,) in loader(steps, 1):
        starts.append(read_clocks())
        loss = module(inputs)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return median_step(starts, skipped=SKIPPED)


VARIANTS: dict[str, Callable[[int, int, int], Clocks]] = {
    "boltmesh": with_trainer(OnWorldDDP),
    "boltmesh, telemetry off": with_trainer(lambda: OnWorldDDP(telemetry=False)),
    "lightning": with_trainer(lambda: LightningDDPStrategy(process_group_backend="gloo")),
    "torch": plain_torch,
}


def measure(
    rank: int, world_size: int, rounds: int, steps: int, width: int
) -> dict[str, list[Clocks]]:
    warnings.simplefilter("ignore")
    times: dict[str, list[Clocks]] = {name: [] for name in VARIANTS}
    for names in take_turns(list(VARIANTS), rounds):
        for name in names:
            times[name].append(VARIANTS[name](world_size, steps, width))
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--width", type=int, default=512)
    options = parser.parse_args()
    times = run_ranks(
        measure, options.ranks, options.rounds, options.steps, options.width, timeout_s=1800.0
    )[0]
    print(f"{options.ranks} ranks, width {options.width}, {options.rounds} rounds of "
          f"{options.steps} steps")  # fmt: skip
    print_ratios(times, ["lightning"])


if __name__ == "__main__":
    main()
