"""A model is built, and trained, by ranks whose memory is not enough for the whole of it."""

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.support.limited_memory import run_limited

RUN = """
import json, os, resource, sys, warnings
warnings.simplefilter("ignore")
folder, rank, world_size = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
os.environ.update(
    RANK=str(rank), LOCAL_RANK=str(rank), GROUP_RANK="0", WORLD_SIZE=str(world_size),
    LOCAL_WORLD_SIZE=str(world_size), MASTER_ADDR="127.0.0.1", MASTER_PORT="29500",
    TORCHELASTIC_RUN_ID="tests", GLOO_SOCKET_IFNAME="lo",
)
import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer, seed_everything
from torch.utils.data import DataLoader, TensorDataset
from boltmesh.strategies import TensorParallelStrategy

WIDTH, BLOCKS, STEPS = 512, 48, 2
WHOLE_BYTES = 4 * BLOCKS * 4 * WIDTH**2
ADAM = 4  # parameters, gradients and two moments


def allow_now(num_bytes):
    hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
    resource.setrlimit(resource.RLIMIT_DATA, (data_bytes() + num_bytes, hard))


class Block(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up = torch.nn.Linear(width, 2 * width, bias=False)
        self.down = torch.nn.Linear(2 * width, width, bias=False)

    def forward(self, x):
        return x + 0.1 * self.down(torch.relu(self.up(x)))


class Stack(LightningModule):
    def __init__(self, num_blocks, width):
        super().__init__()
        self.num_blocks, self.width = num_blocks, width
        self.blocks = None

    def configure_model(self):
        if self.blocks is None:
            blocks = (Block(self.width) for _ in range(self.num_blocks))
            self.blocks = torch.nn.ModuleList(blocks)

    def training_step(self, batch, batch_idx):
        x = batch[0]
        for block in self.blocks:
            x = block(x)
        return x.square().mean()

    validation_step = training_step

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3, foreach=False)


def run(function, num_blocks, width):
    seed_everything(3, verbose=False)
    data = DataLoader(TensorDataset(torch.randn(8 * STEPS, width)), batch_size=8)
    module = Stack(num_blocks, width)
    trainer = Trainer(
        accelerator="cpu", devices=world_size, max_epochs=1, logger=False,
        strategy=TensorParallelStrategy(telemetry=False), enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )
    getattr(trainer, function)(module, data)
    return module, trainer


dist.init_process_group(
    "gloo", init_method=f"file://{folder}/tensor", rank=rank, world_size=world_size
)
for function in ("validate", "fit"):
    run(function, 2, 8)  # what is made once is made before the limit
dist.barrier()
allow_now(int(0.8 * WHOLE_BYTES))
try:
    torch.empty(WHOLE_BYTES // 4)
except RuntimeError:
    print("the whole does not fit", flush=True)
before = data_bytes()
module, _ = run("validate", BLOCKS, WIDTH)
held = (data_bytes() - before) / WHOLE_BYTES
shapes = sorted({tuple(each.shape) for each in module.parameters()})
del module
allow_now(int(0.8 * ADAM * WHOLE_BYTES))
before = data_bytes()
module, trainer = run("fit", BLOCKS, WIDTH)
print(json.dumps({
    "shapes": shapes,
    "held": held,
    "trained": (data_bytes() - before) / (ADAM * WHOLE_BYTES),
    "blocks": len({name.split(".")[1] for name in trainer.strategy.plan.sharded}),
}), flush=True)
dist.barrier()
os._exit(0)
"""


@pytest.mark.full
@pytest.mark.slow
def test_two_ranks_build_what_neither_can_hold_and_train_it_in_half_of_the_memory(
    tmp_path: Path,
) -> None:
    def run(rank: int) -> str:
        done = run_limited(RUN, tmp_path, rank, 2, timeout_s=600, stack_kib=2048)
        assert done.returncode == 0, done.stderr[-2000:]
        return done.stdout

    with ThreadPoolExecutor(2) as pool:
        for said in pool.map(run, range(2)):
            refused, measured = said.strip().splitlines()
            assert refused == "the whole does not fit"
            found = json.loads(measured)
            assert found["shapes"] == [[512, 512]]  # of 1024 x 512 and 512 x 1024
            assert found["blocks"] == 48
            # Half, and the threads of the run's process groups: a tenth of so small a model.
            assert 0.5 <= found["held"] < 0.75
            assert 0.5 <= found["trained"] < 0.6
