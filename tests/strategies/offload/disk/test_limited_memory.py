"""State four times the memory that a process may take trains on disk, and not in memory."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.limited_memory import run_limited

STEPS = """
import sys
import torch
from boltmesh.errors import OffloadError
from boltmesh.strategies.offload.disk.state_store import DiskStateStore
from boltmesh.strategies.offload.disk.swap_file import Swap
from boltmesh.strategies.offload.memory_stores import HostStore

CPU = torch.device("cpu")
place, folder = sys.argv[1:]
NUMEL, CHUNKS = 1 << 19, 64
state_bytes = CHUNKS * 3 * 4 * NUMEL


def chunk_values(chunk):
    generator = torch.Generator().manual_seed(chunk)
    master = torch.randn(NUMEL, generator=generator)
    return [master, torch.zeros(NUMEL), torch.zeros(NUMEL)]


def step(tensors, chunk, number):
    master, first, second = tensors
    gradient = torch.sin(master + chunk)
    torch._fused_adamw_(
        [master], [gradient], [first], [second], [], [torch.tensor(float(number))],
        lr=1e-3, beta1=0.9, beta2=0.999, weight_decay=0.01, eps=1e-8, amsgrad=False, maximize=False,
    )


# Everything that is made once is made before the limit.
warm = chunk_values(0)
step(warm, 0, 1)
store = DiskStateStore(Swap(folder, state_bytes), device=CPU) if place == "disk" else None
allow(state_bytes // 4)
if store is None:
    store = HostStore(CPU)
try:
    for chunk in range(CHUNKS):
        store.create(chunk, chunk_values(chunk))
except OffloadError as error:
    print("refused:", error)
    sys.exit()
for number in range(1, 4):
    for chunk in range(CHUNKS):
        for ahead in range(chunk, min(CHUNKS, chunk + 4)):
            store.prefetch(ahead)
        step(store.acquire(chunk), chunk, number)
        store.release(chunk, is_dirty=True)
for chunk in range(CHUNKS):
    expected = chunk_values(chunk)
    for number in range(1, 4):
        step(expected, chunk, number)
    stored = store.acquire(chunk)
    assert all(torch.equal(a, b) for a, b in zip(stored, expected)), chunk
    store.release(chunk, is_dirty=False)
places = store.bytes_by_place()
print("trained:", places["disk"] / state_bytes, places["host"] * 4 <= state_bytes)
store.close()
"""


@pytest.mark.full
@pytest.mark.slow
def test_state_of_four_times_the_memory_is_stepped_on_disk(tmp_path) -> None:
    done = run_limited(STEPS, "disk", tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "trained: 1.0 True\n"


@pytest.mark.full
@pytest.mark.slow
def test_the_same_state_does_not_fit_into_that_memory(tmp_path) -> None:
    done = run_limited(STEPS, "host", tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("refused: the system gives no ")


TRAINING = """
import hashlib, json, sys, warnings
warnings.simplefilter("ignore")
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch.utils.data import DataLoader, TensorDataset
from boltmesh.errors import OffloadError
from boltmesh.strategies import ZeROStrategy

tier, folder, limit, checkpoint = sys.argv[1:]
WIDTH, LAYERS, STEPS = 1024, 96, 3
STATE_BYTES = 12 * LAYERS * WIDTH**2
losses, digests = [], []


class Stack(LightningModule):
    def __init__(self, num_layers):
        super().__init__()
        self.num_layers = num_layers

    def configure_model(self):
        torch.manual_seed(0)
        self.layers = torch.nn.ModuleList(
            torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(self.num_layers)
        )

    def training_step(self, batch, batch_idx):
        x = batch[0]
        for layer in self.layers:
            x = x + 0.1 * torch.relu(layer(x))
        loss = x.square().mean()
        losses.append(loss.item())
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3, fused=True)


class Watch(Callback):
    def on_train_batch_end(self, trainer, module, *_):
        if trainer.global_step == STEPS - 1 and checkpoint == "save":
            trainer.save_checkpoint(f"{folder}/second.ckpt")
        if trainer.global_step == STEPS:
            digest = hashlib.blake2b()
            for parameter in module.parameters():
                state = trainer.optimizers[0].state[parameter]
                for tensor in (parameter, state["exp_avg"], state["exp_avg_sq"]):
                    digest.update(tensor.to_local().detach().clone().numpy())
            digests.append(digest.hexdigest())


def make_trainer():
    offload = {}
    if tier != "none":
        offload = {"offload_optimizer": tier, "offload_parameters": tier}
    if tier == "nvme":
        offload["offload_path"] = folder
    return Trainer(
        accelerator="cpu", devices=1, max_steps=STEPS, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, callbacks=[Watch()],
        strategy=ZeROStrategy(stage=3, telemetry=False, **offload),
    )


data = TensorDataset(torch.randn(32, WIDTH, generator=torch.Generator().manual_seed(1)))
trainer, model = make_trainer(), Stack(LAYERS)
if limit == "limited":
    # All there is, from here on: for the model, its gradients and activations, the threads and
    # their stacks, the buffers of the disk, and what libraries load late.
    allow(STATE_BYTES // 4)
resumed = f"{folder}/second.ckpt" if checkpoint == "resume" else None
try:
    trainer.fit(model, DataLoader(data, batch_size=8), ckpt_path=resumed)
except (OffloadError, RuntimeError) as error:
    print("refused:", type(error).__name__, error)
else:
    print(json.dumps({"losses": losses, "digests": digests}))
"""


def _train(folder: Path, tier: str, limit: str, checkpoint: str = "none") -> dict[str, Any]:
    # The fewer bytes threads reserve for stacks that they never fill, the smaller the model may be.
    done = run_limited(TRAINING, tier, folder, limit, checkpoint, timeout_s=600, stack_kib=1024)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("{"), done.stdout
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.full
@pytest.mark.slow(100)
def test_a_model_whose_state_is_four_times_all_of_the_memory_trains_with_nvme(
    tmp_path: Path,
) -> None:
    """Three steps, a checkpoint of the second and a resume, all of it to the bit.

    The limit is a quarter of the optimizer state, so neither the parameters (a third of the state)
    nor their gradients (another) would fit, let alone both.
    """
    limited = _train(tmp_path, "nvme", "limited", "save")
    assert limited == _train(tmp_path, "none", "free")
    assert len(limited["losses"]) == 3
    assert limited["losses"][2] < 0.9 * limited["losses"][0]
    resumed = _train(tmp_path, "nvme", "limited", "resume")
    assert resumed == {"losses": limited["losses"][2:], "digests": limited["digests"]}


@pytest.mark.full
@pytest.mark.slow
def test_the_same_model_does_not_train_with_its_state_in_host_memory(tmp_path: Path) -> None:
    done = run_limited(TRAINING, "cpu", tmp_path, "limited", "none", timeout_s=600, stack_kib=1024)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("refused: "), done.stdout
    assert "can't allocate memory" in done.stdout or "the system gives no" in done.stdout
