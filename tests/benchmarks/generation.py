"""Tokens per second of Hugging Face's ``generate``, beside one process: medians of turns.

Run: ``OMP_NUM_THREADS=1 python tests/benchmarks/generation.py``
"""

import statistics
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
from lightning.pytorch import LightningModule, Trainer  # noqa: E402
from torch.utils.data import DataLoader  # noqa: E402

from boltmesh.strategies.registry import build_strategy  # noqa: E402
from tests.support.ranks import run_ranks  # noqa: E402

TURNS, NEW_TOKENS, ROWS = 3, 16, 4
STRATEGIES: dict[str, dict[str, Any]] = {
    "bolt_ddp": {},
    "bolt_zero3": {},
    "bolt_zero3 gathered": {"gather_for_generation": True},
    "bolt_tensor": {"size": 2},
    "bolt_pipeline": {"stages": 2},
    "bolt_3d": {"pipeline": 2, "tensor": 2, "zero_stage": 0},
}
RANKS = {"bolt_3d": 4}
"""Of a strategy, where they are not two."""


class Timed(LightningModule):
    """Generates from each batch and keeps how long that takes."""

    def __init__(self) -> None:
        super().__init__()
        import transformers as hf

        ids = {"vocab_size": 512, "pad_token_id": 0, "bos_token_id": 2, "eos_token_id": None}
        sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 8}
        heads = {"num_attention_heads": 8, "num_key_value_heads": 4}
        self.net = hf.LlamaForCausalLM(hf.LlamaConfig(**ids, **sizes, **heads))
        self.seconds: list[float] = []

    def predict_step(self, batch: Any, batch_idx: int) -> None:
        start = time.perf_counter()
        mask = torch.ones_like(batch)
        self.net.generate(batch, attention_mask=mask, max_new_tokens=NEW_TOKENS, do_sample=False)
        self.seconds.append(time.perf_counter() - start)


def seconds(rank: int, world_size: int, name: str | None) -> float:
    """Return the median time of a batch; the first one is left out."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    strategy: Any = "auto"
    if name is not None:
        strategy = build_strategy(name.split()[0], telemetry=False, **STRATEGIES[name])
    trainer = Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=world_size,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
    )
    timed = Timed()
    prompts: Any = [torch.randint(3, 512, (8,)) for _ in range(ROWS * 4 * world_size)]
    trainer.predict(timed, DataLoader(prompts, batch_size=ROWS), return_predictions=False)
    return statistics.median(timed.seconds[1:])


def main() -> None:
    """Print a table."""
    tokens = ROWS * NEW_TOKENS
    print(f"{'':24}{'tokens/s':>10}{'one process':>14}{'ratio':>8}")
    for name in STRATEGIES:
        # Data ranks have batches of their own.
        batches = 2 if name.startswith(("bolt_ddp", "bolt_zero")) else 1
        mine, alone = [], []
        for _ in range(TURNS):
            alone.append(tokens / run_ranks(seconds, 1, None, timeout_s=300)[0])
            slowest = max(run_ranks(seconds, RANKS.get(name, 2), name, timeout_s=300))
            mine.append(batches * tokens / slowest)
        ours, one = statistics.median(mine), statistics.median(alone)
        print(f"{name:24}{ours:10.0f}{one:14.0f}{ours / one:8.2f}", flush=True)


if __name__ == "__main__":
    main()
