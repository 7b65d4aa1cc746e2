"""python examples/05_threed.py [--data 2] [--pipeline 2] [--tensor 2] [--max-steps 50]

Pipeline, data and tensor parallelism on eight CPU processes, in about two minutes: two pipelines
with batches of their own, each of two stages, each stage on two ranks that share its layers. The
optimizer state is sharded over the pipelines. The model is unmodified. ``--data 1`` runs on four
processes.
"""

from argparse import ArgumentParser

from gpt import GPT
from lightning.pytorch import Trainer, seed_everything
from text import TextData

from boltmesh.strategies import Parallel3DStrategy


def main() -> None:
    parser = ArgumentParser()
    parser.add_argument("--data", type=int, default=2)
    parser.add_argument("--pipeline", type=int, default=2)
    parser.add_argument("--tensor", type=int, default=2)
    parser.add_argument("--zero-stage", type=int, default=1)
    parser.add_argument("--max-steps", type=int, default=50)
    options = parser.parse_args()

    strategy = Parallel3DStrategy(
        data=options.data,
        pipeline=options.pipeline,
        tensor=options.tensor,
        zero_stage=options.zero_stage,
    )
    seed_everything(0, verbose=False)  # the same initial weights in every process
    trainer = Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=options.data * options.pipeline * options.tensor,
        max_steps=options.max_steps,
        gradient_clip_val=1.0,  # by the norm over all ranks
        limit_val_batches=20,
    )
    trainer.fit(GPT(), TextData(batch_size=32 // options.data))  # 32 windows in all


if __name__ == "__main__":
    main()
