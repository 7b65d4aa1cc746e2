"""What gradients that come a step late do to learning: pipedream_2bw beside 1f1b.

    python -m tests.benchmarks.late_gradients [--steps 100] [--seeds 2] [--lr 5e-4 2e-3]

The model and the text of the examples, 2 ranks, 8 microbatches, the same initial weights and the
same batches for both schedules. Prints the validation loss after the last step, mean and spread
over seeds.
"""

import statistics
import sys
from argparse import ArgumentParser
from pathlib import Path
from typing import Any

from lightning.pytorch import seed_everything

from tests.support.pipelines import pipeline, quiet_trainer
from tests.support.ranks import run_ranks

EXAMPLES = Path(__file__).parents[2] / "examples"
SCHEDULES = ("1f1b", "pipedream_2bw")


def train(
    rank: int, world_size: int, steps: int, seeds: int, rate: float
) -> dict[str, list[float]]:
    sys.path.insert(0, str(EXAMPLES))
    from gpt import GPT
    from text import TextData

    found: dict[str, list[float]] = {name: [] for name in SCHEDULES}
    for seed in range(seeds):
        for name in SCHEDULES:
            seed_everything(seed, verbose=False)
            strategy: Any = pipeline(schedule=name, microbatches=8)
            trainer = quiet_trainer(
                world_size,
                strategy,
                max_steps=steps,
                max_epochs=-1,
                gradient_clip_val=1.0,
                limit_val_batches=20,
                val_check_interval=steps,
                check_val_every_n_epoch=None,
            )
            trainer.fit(GPT(learning_rate=rate), TextData(batch_size=32))
            found[name].append(float(trainer.callback_metrics["val_loss"]))
    return found


def main() -> None:
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--lr", type=float, nargs="+", default=[5e-4, 2e-3])
    options = parser.parse_args()
    print("| learning rate | " + " | ".join(f"`{name}`" for name in SCHEDULES) + " |")
    print("| --- " * (1 + len(SCHEDULES)) + "|", flush=True)
    for rate in options.lr:
        found = run_ranks(train, 2, options.steps, options.seeds, rate, timeout_s=1200)[0]
        cells = [
            f"{statistics.fmean(found[name]):.3f} ± {statistics.pstdev(found[name]):.3f}"
            for name in SCHEDULES
        ]
        print(f"| {rate:g} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
