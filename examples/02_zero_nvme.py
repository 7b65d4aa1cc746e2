"""python examples/02_zero_nvme.py [--devices 2] [--max-steps 100] [--folder .] [--layers 4]

ZeRO stage 3 with offload to a disk, on two CPU processes, in about a minute. Parameters and
optimizer state are in one file per process. Shards are read ahead of each block, and the optimizer
steps chunk by chunk during the backward pass. Results equal those of data parallelism.
``boltmesh top`` in another terminal shows the bytes to and from the disk.

``--layers 48 --width 1024`` is a model of 600 million parameters, which needs 10 GB on each process
with data parallelism.
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
        stage=3,  # shards parameters, gradients and optimizer state
        offload_optimizer="nvme",  # "cpu": in host memory; None: on the device
        offload_parameters="nvme",
        offload_path=options.folder,
    )
    seed_everything(0, verbose=False)  # the same initial weights in every process
    with deferred_init():  # no memory yet: each process will materialize its shards only
        model = GPT(n_layer=options.layers, n_embd=options.width)
    trainer = Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=options.devices,
        max_steps=options.max_steps,
        gradient_clip_val=1.0,  # the optimizer still steps before the norm is known
        limit_val_batches=20,
    )
    trainer.fit(model, TextData(batch_size=16))  # 16 windows per process


if __name__ == "__main__":
    main()
