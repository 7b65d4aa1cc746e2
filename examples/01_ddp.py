"""python examples/01_ddp.py [--devices 2] [--max-steps 200] [--compression bf16]

Data parallelism on two CPU processes, in about a minute. Each process holds the whole model and
trains on its own part of the data; gradients are averaged in buckets during the backward pass.
``boltmesh top`` in another terminal shows the run.
"""

from argparse import ArgumentParser

from gpt import GPT
from lightning.pytorch import Trainer, seed_everything
from text import TextData

from boltmesh.strategies import DDPStrategy


def main() -> None:
    parser = ArgumentParser()
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--max-steps", type=int, default=200)
    parser.add_argument("--compression", choices=("bf16", "powersgd"))
    options = parser.parse_args()

    strategy: str | DDPStrategy = "bolt_ddp"  # by name, with default arguments
    if options.compression:  # as an object, with arguments
        strategy = DDPStrategy(gradient_compression=options.compression)

    seed_everything(0, verbose=False)  # the same initial weights in every process
    trainer = Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=options.devices,
        max_steps=options.max_steps,
        limit_val_batches=20,
    )
    trainer.fit(GPT(), TextData(batch_size=16))  # 16 windows per process


if __name__ == "__main__":
    main()
