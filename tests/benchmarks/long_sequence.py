"""The longest sequence that fits the memory of a rank: divided, in tiles, with offload.

    OMP_NUM_THREADS=1 python tests/benchmarks/long_sequence.py [--ranks 4] [--budget-mib 72]
    python tests/benchmarks/long_sequence.py --ranks 2 --vocabulary 2048 --budget-mib 80    # smoke

A Llama-shaped model of Hugging Face's trains on one row per step, with AdamW and with
activation_checkpointing="full" in every line. Printed is, for the rank that needs most:
  bytes/position  the slope of the resident peak of a step between two lengths
  fixed           MiB of that peak at no positions: weights, optimizer, gathered units, buffers
  positions       the length at which the peak, less what was resident before the model was built,
                  reaches the budget; by a line through both. A tiny model has trained before,
                  so that libraries count for no way
  run at          a length that was run: that one, or 24 times what one process holds
  peak            of that run, as a part of the budget; where it is above 1 or far below, a line
                  through the last two lengths gives another one, three times at most
  of one          the length beside that of one process
Without tiles the axis alone divides bytes/position by the ranks; the rest of the factor is what a
rank no longer keeps of weights and optimizer, so it is larger the nearer the budget is to these.
Torch's context_parallel, cut by hand, is tried too; where it cannot run, its error is the line.
"""

import argparse
import logging
import os
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.benchmarks.peers.resident import OWN_MAPPINGS, forget_peak, resident_bytes

os.environ.update(OWN_MAPPINGS)  # for the processes of the ranks, which read it when they start

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from boltmesh.strategies import ContextParallelStrategy, DDPStrategy
from tests.support.ranks import RankFailure, run_ranks

TIMEOUT_S = 3000.0
STEPS = 2
TRIES = 3
CLOSE = 0.95
"""A peak that is less of the budget is tried again."""


@dataclass(frozen=True)
class Shape:
    """Sizes of the model."""

    width: int
    layers: int
    vocabulary: int


class Llama(LightningModule):
    """A causal language model with the loss of its authors."""

    def __init__(self, shape: Shape, length: int) -> None:
        super().__init__()
        from transformers import LlamaConfig, LlamaForCausalLM

        torch.manual_seed(0)
        self.net = LlamaForCausalLM(
            LlamaConfig(
                hidden_size=shape.width,
                intermediate_size=3 * shape.width,
                num_hidden_layers=shape.layers,
                num_attention_heads=4,
                num_key_value_heads=2,
                vocab_size=shape.vocabulary,
                max_position_embeddings=length,
                use_cache=False,
            )
        )

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss: Tensor = self.net(input_ids=batch[0], labels=batch[0]).loss
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class Peak(Callback):
    """The resident peak of the last step."""

    def __init__(self) -> None:
        self.num_bytes = 0

    def on_train_batch_start(self, *_: Any) -> None:
        forget_peak()

    def on_train_batch_end(self, *_: Any) -> None:
        self.num_bytes = resident_bytes("VmHWM")


def peak_bytes(rank: int, world_size: int, shape: Shape, length: int, way: str, disk: str) -> int:
    """Train some steps, and return the peak of this rank above what was there before."""
    torch.set_num_threads(1)
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    train(world_size, Shape(32, 2, 64), 32, way, disk)  # loads what a run loads
    before = resident_bytes()
    return train(world_size, shape, length, way, disk) - before


def train(world_size: int, shape: Shape, length: int, way: str, disk: str) -> int:
    """Train some steps, and return the peak of the last one."""
    options: dict[str, Any] = {"activation_checkpointing": "full", "telemetry": False}
    if "tiles" in way:
        options["tile_logits"] = 128
        if world_size > 1:
            options["tile_tokens"] = 128
    if "offload" in way:
        options["activation_offload"] = disk
    strategy: Any
    if world_size == 1:
        strategy = DDPStrategy(**options)
    else:
        strategy = ContextParallelStrategy(zero_stage=3, balance="zigzag", **options)
    peak = Peak()
    rows = torch.randint(shape.vocabulary, (STEPS, length))
    trainer = Trainer(
        strategy=strategy, accelerator="cpu", devices=world_size, max_steps=STEPS, logger=False,
        callbacks=[peak], enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, use_distributed_sampler=False,
    )  # fmt: skip
    trainer.fit(Llama(shape, length), DataLoader(TensorDataset(rows), batch_size=1))
    return peak.num_bytes


def peer_error(rank: int, world_size: int, shape: Shape) -> str | None:
    """Run a step that torch's context_parallel divides, cut by hand; return why it cannot."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.experimental import context_parallel

    torch.set_num_threads(1)
    length = 64 * world_size
    module = Llama(shape, length)
    ids = torch.randint(shape.vocabulary, (1, length))
    labels = torch.cat([ids[:, 1:], torch.full((1, 1), -100)], 1)  # shifted before they are cut
    positions = torch.arange(length)[None]
    buffers = [ids, labels, positions]
    mesh = init_device_mesh("cpu", (world_size,))
    try:
        with context_parallel(mesh, buffers=buffers, buffer_seq_dims=[1, 1, 1]):
            logits = module.net(input_ids=ids, position_ids=positions).logits
            torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()).backward()
    except Exception as error:  # noqa: BLE001 - the line of the table
        return f"{type(error).__name__}: {error}".strip().splitlines()[0][:160]
    return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--budget-mib", type=int, default=72)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--vocabulary", type=int, default=8192)
    parser.add_argument("--lengths", type=int, nargs=2, default=[128, 256], help="of one process")
    parser.add_argument("--ways", type=int, nargs="+", default=[0, 1, 2, 3, 4], help="lines")
    parser.add_argument("--check", type=float, default=24.0, help="times one process, at most")
    parser.add_argument("--of-one", type=float, default=0.0, help="positions of an earlier run")
    options = parser.parse_args()
    shape = Shape(options.width, options.layers, options.vocabulary)
    budget = options.budget_mib << 20
    ways = {
        "one process": (1, 1),
        "one process, tiles": (1, 4),
        "divided": (options.ranks, 4),
        "divided, tiles": (options.ranks, 16),
        "divided, tiles, offload": (options.ranks, 16),
    }
    print(f"{shape}, {options.ranks} ranks, {options.budget_mib} MiB a rank above the start")
    titles = (
        f"{'bytes/position':>15}{'fixed':>7}{'positions':>11}{'run at':>9}{'peak':>9}{'of one':>8}"
    )
    print(f"{'':26}{titles}")
    one = options.of_one
    with tempfile.TemporaryDirectory() as disk:
        for way in (list(ways)[line] for line in options.ways):
            ranks, longer = ways[way]

            def measure(length: int, way: str = way, ranks: int = ranks) -> int:
                arguments = (shape, length, way, disk)
                return max(run_ranks(peak_bytes, ranks, *arguments, timeout_s=TIMEOUT_S))

            points = [(longer * each, measure(longer * each)) for each in options.lengths]
            for _ in range(TRIES):
                (shorter, low), (length, high) = points[-2:]
                slope = (high - low) / (length - shorter)
                if slope <= 0:
                    sys.exit(f"{way}: {points} take the same memory. Raise --lengths.")
                wanted = length + (budget - high) / slope
                fixed = (high - length * slope) / 2**20
                if wanted < ranks:
                    sys.exit(
                        f"{way}: weights and the optimizer alone take {fixed:,.0f} MiB, which "
                        f"--budget-mib {options.budget_mib} does not hold. Raise it, or lower "
                        f"--width, --layers or --vocabulary."
                    )
                length = int(min(wanted, options.check * (one or wanted)))
                points.append((length, measure(length)))
                checked = points[-1][1] / budget
                if checked <= 1 and (checked > CLOSE or length < int(wanted)):
                    break
            one = one or length
            print(
                f"{way:26}{slope:15,.0f}{fixed:7,.0f}{wanted:11,.0f}{length:9,}{checked:9.3f}"
                f"{length / one:8.1f}",
                flush=True,
            )
    try:
        error = run_ranks(peer_error, options.ranks, shape, timeout_s=120.0)[0]
    except RankFailure as failure:
        error = str(failure).splitlines()[0]
    print(f"{'context_parallel of torch':26} {error or 'runs; measure it on this machine'}")


if __name__ == "__main__":
    main()
