"""python examples/02_zero_nvme.py [--devices 2] [--max-steps 100] [--folder .] [--layers 4]

ZeRO stage 3 with a disk, on two CPU processes, in about a minute. Between two uses nothing of the
model is in a process's memory: parameters and optimizer state are in one file per process, shards
are read ahead of each block, and the optimizer steps chunk by chunk while the backward pass is
still running. With the same number of steps and the same clipping, the numbers are those of plain
data parallelism. From another terminal, ``boltmesh top`` shows what went to the disk and came from
it.

With ``--layers 48 --width 1024`` it is a model of 600 million parameters, whose training takes
10 GB in plain data parallelism on each process.
"""

from argparse import ArgumentParser

from gpt import GPT
from lightning.pytorch import Trainer, seed_everything
from text import TextData

from boltmesh.strategies import ZeROStrategy, deferred_init


def main() -> None:
    parser = ArgumentParser()
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--max-steps", type=int, default=100)
    parser.add_argument("--folder", default=".", help="on a fast local disk")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=128)
    options = parser.parse_args()

    strategy = ZeROStrategy(
        stage=3,  # each process keeps its share of parameters, gradients and optimizer state
        offload_optimizer="nvme",  # "cpu": in host memory; None: with the model
        offload_parameters="nvme",
        offload_path=options.folder,
    )
    seed_everything(0, verbose=False)  # the same initial weights in every process
    with deferred_init():  # no memory yet: each process will make its own share only
        model = GPT(n_layer=options.layers, n_embd=options.width)
    trainer = Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=options.devices,
        max_steps=options.max_steps,
        gradient_clip_val=1.0,  # the optimizer steps ahead of the norm all the same
        limit_val_batches=20,
    )
    trainer.fit(model, TextData(batch_size=16))  # 16 windows for each process


if __name__ == "__main__":
    main()
