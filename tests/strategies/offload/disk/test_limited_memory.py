"""State four times the memory that a process may take trains on disk, and not in memory."""

import pytest

from tests.support.limited_memory import run_limited

STEPS = """
import sys
import torch
from boltmesh.errors import OffloadError
from boltmesh.strategies.offload.disk.store import DiskStore
from boltmesh.strategies.offload.disk.swap import Swap
from boltmesh.strategies.offload.host import HostStore

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
store = DiskStore(Swap(folder, state_bytes), device=CPU) if place == "disk" else None
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


@pytest.mark.slow
def test_state_of_four_times_the_memory_is_stepped_on_disk(tmp_path) -> None:
    done = run_limited(STEPS, "disk", tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "trained: 1.0 True\n"


@pytest.mark.slow
def test_the_same_state_does_not_fit_into_that_memory(tmp_path) -> None:
    done = run_limited(STEPS, "host", tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("refused: the system gives no ")


TRAINING = """
import sys, warnings
warnings.simplefilter("ignore")
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch.utils.data import DataLoader, TensorDataset
from boltmesh.errors import OffloadError
from boltmesh.strategies import ZeROStrategy

tier, folder, is_limited = sys.argv[1], sys.argv[2], sys.argv[3] == "limited"
WIDTH = 1024
losses = []


class Stack(LightningModule):
    def __init__(self, num_layers):
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.ModuleList(
            torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(num_layers)
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


def train(num_layers):
    offload = {}
    if tier != "none":
        offload = {"offload_optimizer": tier, "offload_parameters": tier}
    if tier == "nvme":
        offload["offload_path"] = folder
    trainer = Trainer(
        accelerator="cpu", devices=1, max_steps=3, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
        strategy=ZeROStrategy(stage=3, telemetry=False, **offload),
    )
    data = TensorDataset(torch.randn(32, WIDTH, generator=torch.Generator().manual_seed(1)))
    trainer.fit(Stack(num_layers), DataLoader(data, batch_size=8))


train(2)  # threads, groups and caches are there before the limit
losses.clear()
LAYERS = 88
model_bytes = 4 * LAYERS * WIDTH**2
state_bytes = 3 * model_bytes
if is_limited:
    # The device is the host here, so the model that a device would hold when training begins
    # counts too.
    allow(model_bytes + state_bytes // 4)
try:
    train(LAYERS)
except (OffloadError, RuntimeError) as error:
    print("refused:", type(error).__name__, error)
else:
    print(losses)
"""


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_model_whose_state_is_four_times_the_memory_trains_with_nvme(tmp_path) -> None:
    """As much as fits nowhere else: not on the device, not in host memory."""
    limited = run_limited(TRAINING, "nvme", tmp_path, "limited", timeout_s=250)
    assert limited.returncode == 0, limited.stderr
    assert limited.stdout.startswith("["), limited.stdout
    free = run_limited(TRAINING, "none", tmp_path, "free", timeout_s=250)
    found, expected = eval(limited.stdout), eval(free.stdout)
    assert len(found) == 3
    assert found == pytest.approx(expected, rel=1e-6)
    assert expected[2] < 0.9 * expected[0]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_same_model_does_not_train_with_its_state_in_host_memory(tmp_path) -> None:
    done = run_limited(TRAINING, "cpu", tmp_path, "limited", timeout_s=250)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("refused: OffloadError the system gives no ")
