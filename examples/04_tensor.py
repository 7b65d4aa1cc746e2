"""python examples/04_tensor.py [--devices 2] [--max-steps 200] [--sequence-parallel]

Tensor parallelism on two CPU processes, in about a minute. Each process holds half of every layer:
half of the attention heads, half of the hidden channels of each MLP. The plan is found from the
unmodified model and verified on a batch before the first step; ``boltmesh fit tensor --dry-run``
prints it.
"""

from argparse import ArgumentParser

from gpt import GPT
from lightning.pytorch import Trainer, seed_everything
from text import TextData

from boltmesh.strategies import TensorParallelStrategy


def main() -> None:
    parser = ArgumentParser()
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--max-steps", type=int, default=200)
    parser.add_argument("--sequence-parallel", action="store_true")
    options = parser.parse_args()

    strategy = TensorParallelStrategy(
        size=options.devices,
        sequence_parallel=options.sequence_parallel,
    )
    seed_everything(0, verbose=False)  # the same initial weights in every process
    trainer = Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=options.devices,
        max_steps=options.max_steps,
        gradient_clip_val=1.0,  # by the norm over all parts
        limit_val_batches=20,
    )
    trainer.fit(GPT(), TextData(batch_size=32))  # 32 windows in all


if __name__ == "__main__":
    main()
