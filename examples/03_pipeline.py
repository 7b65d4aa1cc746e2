"""python examples/03_pipeline.py [--devices 2] [--max-steps 200] [--schedule 1f1b]

Pipeline parallelism on two CPU processes, in about a minute. Each process holds half of the layers.
Every batch is split into eight microbatches, which pass through the processes forward and backward.
The model is unmodified. ``boltmesh schedule 1f1b --stages 2 --microbatches 8`` draws one step;
``boltmesh top`` in another terminal shows how long each process waits.
"""

from argparse import ArgumentParser

from gpt import GPT
from lightning.pytorch import Trainer, seed_everything
from text import TextData

from boltmesh.strategies import PipelineParallelStrategy


def main() -> None:
    parser = ArgumentParser()
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--max-steps", type=int, default=200)
    parser.add_argument("--schedule", default="1f1b", help="gpipe, zero_bubble, zbv, ...")
    options = parser.parse_args()

    strategy = PipelineParallelStrategy(
        stages=options.devices,
        microbatches=8,
        schedule=options.schedule,
    )
    seed_everything(0, verbose=False)  # the same initial weights in every process
    trainer = Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=options.devices,
        max_steps=options.max_steps,
        gradient_clip_val=1.0,  # by the norm over all stages
        limit_val_batches=20,
    )
    trainer.fit(GPT(), TextData(batch_size=32))  # 32 windows in all


if __name__ == "__main__":
    main()
