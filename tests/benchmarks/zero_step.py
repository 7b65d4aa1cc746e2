"""Step time of ``ZeROStrategy(stage=3)`` beside plain fully_shard and ModelParallelStrategy.

    python tests/benchmarks/zero_step.py [--ranks 2] [--rounds 9] [--steps 30] [--width 512]

All variants train the same blocks on the same data in the same processes, in turn, round after
round. Each round's figure is the median step; printed are the medians over the rounds and the
medians of the rounds' ratios to Lightning's ``ModelParallelStrategy`` and to a bare loop over
``fully_shard``, in wall time and in CPU time of the thread that trains. Losses have to be equal:
whoever computes something else is not compared.

All of them gather and reduce the same units in as many collectives of the same sizes; under a
Trainer a broadcast of 8 bytes is added, by which Lightning asks whether a rank was told to stop.
The bare loop has no Trainer: what Lightning's own strategy costs beside it is the Trainer's part.
Everybody is on the process group of the world, for ``stepping.py``'s reason: of the mesh that
``ModelParallelStrategy`` makes, the network takes no notice.
"""

import argparse
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset

from boltmesh.strategies import ZeROStrategy
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

BATCH, DEPTH = 16, 6
SKIPPED = 5
"""First steps of a round, in which FSDP2 sets up and caches fill."""


class Block(nn.Module):
    """Half of a transformer block; the width sets how long a step takes."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs + self.down(nn.functional.gelu(self.up(self.norm(inputs))))


class Network(LightningModule):
    """As its author wrote it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.blocks = nn.ModuleList(Block(width) for _ in range(DEPTH))
        self.head = nn.Linear(width, 1)
        self.losses: list[float] = []

    def forward(self, inputs: Tensor) -> Tensor:
        for block in self.blocks:
            inputs = block(inputs)
        return self.head(inputs).square().mean()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self(batch[0])
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


class Prepared(Network):
    """As ``ModelParallelStrategy`` wants it."""

    def configure_model(self) -> None:
        if not isinstance(self.head.weight, torch.distributed.tensor.DTensor):
            shard(self, world_mesh())


def world_mesh() -> DeviceMesh:
    world = dist.group.WORLD
    assert world is not None
    return DeviceMesh.from_group(world, "cpu")


def shard(network: Network, mesh: DeviceMesh) -> None:
    for block in network.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(network, mesh=mesh)


class OnWorldZeRO(OnWorld, ZeROStrategy):
    """Ours."""


def loader(steps: int, width: int, rank: int) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(rank)
    return DataLoader(TensorDataset(torch.randn(steps * BATCH, width, generator=generator)), BATCH)


Result = tuple[Clocks, list[float]]
Variant = Callable[[int, int, int, int], Result]


def with_trainer(make: Callable[[int], Any], kind: type[Network]) -> Variant:
    def run(rank: int, world_size: int, steps: int, width: int) -> Result:
        network = kind(width)
        starts = fit(
            network,
            loader(steps, width, rank),
            strategy=make(world_size),
            devices=world_size,
            steps=steps,
            use_distributed_sampler=False,
        )
        return median_step(starts, skipped=SKIPPED), network.losses

    return run


def bare_loop(rank: int, world_size: int, steps: int, width: int) -> Result:
    network = Network(width)
    shard(network, world_mesh())
    optimizer = torch.optim.SGD(network.parameters(), lr=1e-3)
    starts = []
    for (inputs,) in loader(steps, width, rank):
        starts.append(read_clocks())
        loss = network(inputs)
        network.losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return median_step(starts, skipped=SKIPPED), network.losses


VARIANTS: dict[str, Variant] = {
    "boltmesh": with_trainer(lambda _: OnWorldZeRO(), Network),
    "boltmesh, telemetry off": with_trainer(lambda _: OnWorldZeRO(telemetry=False), Network),
    "lightning": with_trainer(
        lambda size: ModelParallelStrategy(size, 1, process_group_backend="gloo"), Prepared
    ),
    "fully_shard": bare_loop,
}


def measure(
    rank: int, world_size: int, rounds: int, steps: int, width: int
) -> dict[str, list[Clocks]]:
    warnings.simplefilter("ignore")
    times: dict[str, list[Clocks]] = {name: [] for name in VARIANTS}
    for names in take_turns(list(VARIANTS), rounds):
        losses = {}
        for name in names:
            clocks, losses[name] = VARIANTS[name](rank, world_size, steps, width)
            times[name].append(clocks)
        for name in names:
            torch.testing.assert_close(losses[name], losses["fully_shard"], rtol=1e-6, atol=1e-6)
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--width", type=int, default=512)
    options = parser.parse_args()
    times = run_ranks(
        measure, options.ranks, options.rounds, options.steps, options.width, timeout_s=1800.0
    )[0]
    print(f"{options.ranks} ranks, {DEPTH} blocks of width {options.width}, {options.rounds} "
          f"rounds of {options.steps} steps")  # fmt: skip
    print_ratios(times, ["lightning", "fully_shard"])


if __name__ == "__main__":
    main()
