"""Seconds from ``fit`` to the end of the first step, by strategy and model, beside DDP.

    python tests/benchmarks/start_up.py [--models llama unet gpt] [--strategies pipeline ...]
                                        [--telemetry]

CPU seconds are those of a rank, user and system together, the largest of all ranks; they hold on a
machine that others use too, wall seconds do not. ``UNet2DConditionModel`` needs diffusers.
"""

import argparse
import logging
import resource
import statistics
import sys
import time
import warnings
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from torch.utils.data import DataLoader

from boltmesh.strategies.registry import build_strategy
from tests.support.ranks import RankFailure, run_ranks

STRATEGIES: dict[str, tuple[int, str, dict[str, Any]]] = {
    "ddp": (2, "bolt_ddp", {}),
    "zero3": (2, "bolt_zero3", {}),
    "pipeline": (2, "bolt_pipeline", {"stages": 2}),
    "tensor": (2, "bolt_tensor", {"size": 2}),
    "pipeline x tensor": (4, "bolt_3d", {"pipeline": 2, "tensor": 2}),
}
"""By name: the ranks, and what they run."""

ROWS, TOKENS, WORDS = 8, 16, 128


class Trained(LightningModule):
    """A model that is called with a batch."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.net = MODELS[kind]()
        self.kind = kind

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        output: Any = self.net(**batch)
        if self.kind == "unet":
            return torch.nn.functional.mse_loss(output.sample, batch["sample"])
        loss: Tensor = output.loss
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 32}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=WORDS, use_cache=False, **sizes, **heads))


def gpt() -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(
        GPT2Config(vocab_size=WORDS, n_embd=32, n_layer=4, n_head=4, use_cache=False)
    )


def unet() -> Any:
    from diffusers.models import UNet2DConditionModel  # type: ignore[import-not-found]

    down = ("CrossAttnDownBlock2D", "CrossAttnDownBlock2D", "DownBlock2D")
    up = ("UpBlock2D", "CrossAttnUpBlock2D", "CrossAttnUpBlock2D")
    return UNet2DConditionModel(
        sample_size=8,
        block_out_channels=(16, 32, 32),
        down_block_types=down,
        up_block_types=up,
        cross_attention_dim=32,
        attention_head_dim=8,
        norm_num_groups=4,
    )


MODELS = {"llama": llama, "unet": unet, "gpt": gpt}


def batches(kind: str) -> "DataLoader[Any]":
    generator = torch.Generator().manual_seed(0)
    rows: list[dict[str, Tensor]] = []
    for _ in range(4 * ROWS):
        if kind == "unet":
            rows.append({
                "sample": torch.randn(4, 8, 8, generator=generator),
                "timestep": torch.randint(1000, (), generator=generator),
                "encoder_hidden_states": torch.randn(5, 32, generator=generator),
            })  # fmt: skip
        else:
            tokens = torch.randint(WORDS, (TOKENS,), generator=generator)
            rows.append({"input_ids": tokens, "labels": tokens})
    return DataLoader(rows, batch_size=ROWS)  # type: ignore[arg-type]


class FirstStep(Callback):
    """Notes when the first batch has ended."""

    spent: tuple[float, float] | None = None

    def on_train_batch_end(self, *_: Any) -> None:
        if self.spent is None:
            self.spent = now()


def now() -> tuple[float, float]:
    """Seconds on the wall, and of CPU in all threads."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return time.monotonic(), used.ru_utime + used.ru_stime


def start(
    rank: int, world_size: int, kind: str, name: str, telemetry: bool, profile: str
) -> tuple[float, float]:
    """Train two batches, and return the seconds until the first of them had ended."""
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    torch.manual_seed(0)
    _, strategy, arguments = STRATEGIES[name]
    module, loader, first = Trained(kind), batches(kind), FirstStep()
    trainer = Trainer(
        strategy=build_strategy(strategy, telemetry=telemetry, **arguments),
        accelerator="cpu",
        devices=world_size,
        max_steps=2,
        callbacks=[first],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
    )
    began = now()
    if profile and rank == 0:
        import cProfile

        with cProfile.Profile(time.process_time) as record:
            trainer.fit(module, loader)
        record.dump_stats(profile)
    else:
        trainer.fit(module, loader)
    assert first.spent is not None
    return first.spent[0] - began[0], first.spent[1] - began[1]


def measure(
    kind: str, name: str, *, rounds: int, telemetry: bool = False, profile: str = ""
) -> tuple[float, float]:
    """Return the medians of several starts: wall seconds, CPU seconds of the slowest rank."""
    found = []
    for _ in range(rounds):
        arguments = (kind, name, telemetry, profile)
        ranks = run_ranks(start, STRATEGIES[name][0], *arguments, timeout_s=600.0)
        found.append([max(each) for each in zip(*ranks, strict=True)])
    wall, used = (statistics.median(each) for each in zip(*found, strict=True))
    return wall, used


def main() -> None:
    """Print a table for each model."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--strategies", nargs="+", default=list(STRATEGIES))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--telemetry", action="store_true", help="record what the dashboard shows")
    parser.add_argument("--profile", default="", help="file for the profile of rank 0")
    options = parser.parse_args()
    for kind in options.models:
        print(f"{kind:20}{'wall s':>9}{'CPU s':>9}{'CPU to ddp':>12}", flush=True)
        alone = None
        for name in options.strategies:
            try:
                wall, used = measure(
                    kind, name, rounds=options.rounds,
                    telemetry=options.telemetry, profile=options.profile,
                )  # fmt: skip
            except RankFailure as failure:
                print(f"  {name:18}{str(failure).strip().splitlines()[-1][:90]:>9}", flush=True)
                continue
            alone = used if alone is None else alone
            print(f"  {name:18}{wall:9.2f}{used:9.2f}{used / alone:12.1f}", flush=True)


if __name__ == "__main__":
    main()
