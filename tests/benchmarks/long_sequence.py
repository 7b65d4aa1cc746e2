"""The longest sequence that fits the memory of a rank: divided, in tiles, with offload.

    OMP_NUM_THREADS=1 python tests/benchmarks/long_sequence.py [--ranks 4] [--budget-mib 400]
    python tests/benchmarks/long_sequence.py --ranks 2 --budget-mib 200 --width 64    # smoke

A Llama-shaped model of Hugging Face's trains on one row per step, with AdamW and with
activation_checkpointing="full" in every line. Printed is, for the rank that needs most:
  bytes/position  the slope of the resident peak of a step between two lengths
  positions       the length at which the peak, less what was resident before the model was built,
                  reaches the budget; by a line through both
  checked         the peak of a run of that length, as a part of the budget
  of one          positions beside those of one process
"""

import argparse
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
from tests.support.ranks import run_ranks

TIMEOUT_S = 3000.0
STEPS = 3


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
    from transformers.models.llama import modeling_llama as modeling_llama

    before = resident_bytes()
    options: dict[str, Any] = {"activation_checkpointing": "full", "telemetry": False}
    if "tiles" in way:
        options["tile_logits"] = 128
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
    return peak.num_bytes - before


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--budget-mib", type=int, default=400)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--vocabulary", type=int, default=16384)
    parser.add_argument("--lengths", type=int, nargs=2, default=[512, 1024], help="of one process")
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
    print(f"{'':26}{'bytes/position':>15}{'positions':>11}{'checked':>9}{'of one':>8}")
    one = 0.0
    with tempfile.TemporaryDirectory() as disk:
        for way, (ranks, longer) in ways.items():

            def measure(length: int, way: str = way, ranks: int = ranks) -> int:
                arguments = (shape, length, way, disk)
                return max(run_ranks(peak_bytes, ranks, *arguments, timeout_s=TIMEOUT_S))

            lengths = [longer * each for each in options.lengths]
            peaks = [measure(each) for each in lengths]
            slope = (peaks[1] - peaks[0]) / (lengths[1] - lengths[0])
            if slope <= 0:
                sys.exit(f"{way}: {lengths} positions take the same memory. Raise --lengths.")
            positions = lengths[0] + (budget - peaks[0]) / slope
            if positions < ranks:
                rest = (peaks[0] - lengths[0] * slope) / 2**20
                sys.exit(
                    f"{way}: weights and the optimizer alone take {rest:,.0f} MiB, which "
                    f"--budget-mib {options.budget_mib} does not hold. Raise it, or lower --width, "
                    f"--layers or --vocabulary."
                )
            one = one or positions
            checked = measure(int(positions)) / budget
            print(
                f"{way:26}{slope:15,.0f}{positions:11,.0f}{checked:9.3f}{positions / one:8.1f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
