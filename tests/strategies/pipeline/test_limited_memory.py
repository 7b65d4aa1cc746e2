"""A model that is larger than the memory of a rank is built and trained by several."""

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.support.limited_memory import run_limited

TRAINING = """
import json, os, sys, warnings
warnings.simplefilter("ignore")
folder, layout, rank, world_size = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
share = float(sys.argv[5])
os.environ.update(
    RANK=str(rank), LOCAL_RANK=str(rank), GROUP_RANK="0", WORLD_SIZE=str(world_size),
    LOCAL_WORLD_SIZE=str(world_size), MASTER_ADDR="127.0.0.1", MASTER_PORT="29500",
    TORCHELASTIC_RUN_ID="tests", GLOO_SOCKET_IFNAME="lo",
)
import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer, seed_everything
from torch.utils.data import DataLoader, TensorDataset
from boltmesh.strategies import DDPStrategy
from boltmesh.strategies.pipeline_parallel import PipelineParallelStrategy

WIDTH, LAYERS, STEPS = 1024, 48, 2
KEPT_BYTES = 16 * LAYERS * WIDTH**2


class Layer(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.inner = torch.nn.Linear(width, width, bias=False)

    def forward(self, x):
        return x + 0.1 * torch.relu(self.inner(x))


class Stack(LightningModule):
    def __init__(self, num_layers, width):
        super().__init__()
        self.num_layers, self.width = num_layers, width
        self.layers = None

    def configure_model(self):
        if self.layers is None:
            layers = (Layer(self.width) for _ in range(self.num_layers))
            self.layers = torch.nn.ModuleList(layers)

    def training_step(self, batch, batch_idx):
        x = batch[0]
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3, foreach=False)


def fit(num_layers, width):
    # The same on every rank: else each would begin with numbers of its own.
    seed_everything(3, verbose=False)
    data = DataLoader(TensorDataset(torch.randn(8 * STEPS, width)), batch_size=8)
    module = Stack(num_layers, width)
    strategy = DDPStrategy(telemetry=False)
    if layout == "pipeline":
        strategy = PipelineParallelStrategy(telemetry=False, microbatches=4)
    trainer = Trainer(
        accelerator="cpu", devices=world_size, strategy=strategy, max_epochs=1, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )
    trainer.fit(module, data)
    return module, trainer


dist.init_process_group(
    "gloo", init_method=f"file://{folder}/{layout}", rank=rank, world_size=world_size
)
fit(world_size, 8)  # what is made once is made before the limit
dist.barrier()
before = data_bytes()
allow(int(share * KEPT_BYTES))
try:
    module, trainer = fit(LAYERS, WIDTH)
except RuntimeError as error:
    print("refused:", str(error).splitlines()[0], flush=True)
    os._exit(0)
held = [name for name, each in module.named_parameters() if trainer.strategy.holds(name)]
print(json.dumps({
    "layers": len(held) / LAYERS,
    "kept": (data_bytes() - before) / KEPT_BYTES,
}), flush=True)
dist.barrier()
os._exit(0)
"""


def run_all(folder: Path, layout: str, world_size: int, share: float) -> list[str]:
    def run(rank: int) -> str:
        done = run_limited(TRAINING, folder, layout, rank, world_size, share, timeout_s=600)
        assert done.returncode == 0, done.stderr[-2000:]
        return done.stdout

    with ThreadPoolExecutor(world_size) as pool:
        return list(pool.map(run, range(world_size)))


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "share"), [(2, 0.75), pytest.param(4, 0.5, marks=pytest.mark.full)]
)
def test_ranks_build_and_train_what_none_of_them_could_hold(
    ranks: int, share: float, tmp_path: Path
) -> None:
    for said in run_all(tmp_path, "pipeline", ranks, share):
        found = json.loads(said)
        assert found["layers"] == 1 / ranks
        # The first fit may have held a little that is free by now.
        assert 1 / ranks - 0.005 < found["kept"] < 1 / ranks + 0.15


@pytest.mark.full
@pytest.mark.slow
def test_one_rank_cannot_hold_it(tmp_path: Path) -> None:
    assert run_all(tmp_path, "ddp", 1, 0.75)[0].startswith("refused: ")
