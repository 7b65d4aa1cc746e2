"""python examples/06_context.py [--devices 2] [--max-steps 200] [--balance zigzag]

Context parallelism on two CPU processes, in about a minute. Each process gets the whole batch and
keeps half of the positions of its sequence, from the embedding to the logits; attention fetches the
keys of earlier positions. Before the first step one batch runs whole and divided, to compare the
results. The model is unmodified.
"""

from argparse import ArgumentParser

from gpt import GPT
from lightning.pytorch import Trainer, seed_everything
from text import TextData

from boltmesh.strategies import ContextParallelStrategy


def main() -> None:
    parser = ArgumentParser()
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--max-steps", type=int, default=200)
    parser.add_argument("--balance", choices=["contiguous", "zigzag"], default="contiguous")
    options = parser.parse_args()

    strategy = ContextParallelStrategy(size=options.devices, balance=options.balance)
    seed_everything(0, verbose=False)  # the same initial weights in every process
    trainer = Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=options.devices,
        max_steps=options.max_steps,
        gradient_clip_val=1.0,
        limit_val_batches=20,
    )
    trainer.fit(GPT(), TextData(batch_size=32))  # 32 windows in all


if __name__ == "__main__":
    main()
