"""A step of Muon with one owner for each matrix, beside one that every rank repeats.

    python tests/benchmarks/muon_step.py [--ranks 2] [--rounds 8] [--steps 8] [--width 256]
                                         [--deepspeed]

``torch.optim.Muon`` steps the matrices of a GPT's blocks and AdamW the rest. Under ``bolt_ddp``
every rank orthogonalizes every matrix; under ZeRO each matrix has one owner, to which its shards
are sent and from which they come back. All train on the same data in the same processes, in turn,
round after round. Each round's figure is the median step; printed are the medians over the rounds
and the medians of the rounds' ratios to ``bolt_ddp``. Losses have to be equal within what bf16, in
which Muon multiplies matrices, explains. With ``--deepspeed`` its Muon takes turns with ours.
"""

import argparse
import sys
import warnings
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
from lightning.pytorch import LightningModule
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from boltmesh.strategies import DDPStrategy, ZeROStrategy
from tests.benchmarks.peers import deepspeed_muon
from tests.benchmarks.peers.stepping import (
    Clocks,
    OnWorld,
    fit,
    median_step,
    print_ratios,
    take_turns,
)
from tests.benchmarks.peers.transformer import build, cross_entropy
from tests.support.matrix_optimizers import Combined
from tests.support.ranks import run_ranks

ROWS, TOKENS, WORDS, HEADS, LAYERS = 4, 128, 256, 4, 4
SKIPPED = 2
"""First steps of a round, in which FSDP2 sets up and caches fill."""
TOLERANCE = 1e-3
"""Relative, of losses: a matrix that was multiplied in bf16 has 8 bits."""


class GPT(LightningModule):
    """As its author wrote it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.net = build(width, layers=LAYERS, words=WORDS, heads=HEADS)
        self.losses: list[float] = []

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        tokens = batch[0]
        loss = cross_entropy(self.net(tokens[:, :-1]), tokens[:, 1:])
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        matrices = [each for each in self.net.blocks.parameters() if each.dim() == 2]
        others = [each for each in self.parameters() if all(each is not one for one in matrices)]
        return Combined(torch.optim.Muon(matrices, lr=1e-3), torch.optim.AdamW(others, lr=1e-3))


class OnWorldDDP(OnWorld, DDPStrategy):
    """Steps every matrix on every rank."""


class OnWorldZeRO(OnWorld, ZeROStrategy):
    """Steps each matrix at its owner."""


STRATEGIES = {
    "bolt_ddp": lambda: OnWorldDDP(telemetry=False),
    "bolt_zero1": lambda: OnWorldZeRO(stage=1, telemetry=False),
    "bolt_zero2": lambda: OnWorldZeRO(stage=2, telemetry=False),
    "bolt_zero3": lambda: OnWorldZeRO(stage=3, telemetry=False),
}


DEEPSPEED = {"DeepSpeed, stage 2": 2, "DeepSpeed, stage 3": 3}
"""Stages by name."""


def loader(steps: int, rank: int) -> DataLoader[Any]:
    """Return texts of one rank, in each of which a token follows from the one before."""
    generator = torch.Generator().manual_seed(rank)
    starts = torch.randint(WORDS, (steps * ROWS, 1), generator=generator)
    texts = (starts + 7 * torch.arange(TOKENS + 1)) % WORDS
    return DataLoader(TensorDataset(texts), ROWS)


def measure(
    rank: int, world_size: int, rounds: int, steps: int, width: int, has_peer: bool
) -> dict[str, list[Clocks]]:
    warnings.simplefilter("ignore")
    every = [*STRATEGIES, *(DEEPSPEED if has_peer else ())]
    times: dict[str, list[Clocks]] = {name: [] for name in every}
    for names in take_turns(every, rounds):
        losses = {}
        for name in names:
            gpt = GPT(width)
            if name in DEEPSPEED:
                data = loader(steps, rank)
                starts, losses[name] = deepspeed_muon.train(
                    gpt.net, data, stage=DEEPSPEED[name], rows=ROWS
                )
                times[name].append(median_step(starts, skipped=SKIPPED))
                continue
            starts = fit(
                gpt,
                loader(steps, rank),
                strategy=STRATEGIES[name](),
                devices=world_size,
                steps=steps,
                use_distributed_sampler=False,
            )
            times[name].append(median_step(starts, skipped=SKIPPED))
            losses[name] = gpt.losses
        for name in names:
            torch.testing.assert_close(losses[name], losses["bolt_ddp"], rtol=TOLERANCE, atol=0.0)
    return times


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--deepspeed", action="store_true", help="beside DeepSpeed's Muon")
    options = parser.parse_args()
    sizes = options.rounds, options.steps, options.width
    times = run_ranks(measure, options.ranks, *sizes, options.deepspeed, timeout_s=1800.0)[0]
    print(f"{options.ranks} ranks, {LAYERS} blocks of width {options.width}, {options.rounds} "
          f"rounds of {options.steps} steps")  # fmt: skip
    print_ratios(times, ["bolt_ddp"])


if __name__ == "__main__":
    main()
