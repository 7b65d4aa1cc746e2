"""python examples/01_ddp.py [--devices 2] [--max-steps 200] [--compression bf16]

Data parallel training on two CPU processes, in about a minute. Every process has the whole model
and its own share of the windows; gradients are averaged bucket by bucket while the backward pass
is still running. From another terminal, ``boltmesh top`` shows it.
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

    strategy: str | DDPStrategy = "bolt_ddp"  # by name, all arguments at their defaults
    if options.compression:  # an object takes arguments
        strategy = DDPStrategy(gradient_compression=options.compression)

    seed_everything(0, verbose=False)  # the same initial weights in every process
    trainer = Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=options.devices,
        max_steps=options.max_steps,
        limit_val_batches=20,
    )
    trainer.fit(GPT(), TextData(batch_size=16))  # 16 windows for each process


if __name__ == "__main__":
    main()
