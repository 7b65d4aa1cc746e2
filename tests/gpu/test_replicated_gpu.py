"""One process over several CUDA devices: torch's own copies, scatter and threads."""

from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from boltmesh.strategies.replicated import ReplicatedStrategy

pytestmark = pytest.mark.gpu


class Rows(LightningModule):
    """Notes where its steps run."""

    places: set[torch.device]

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
        self.places = set()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        (inputs,) = batch
        assert inputs.device == self.device == self.layers[0].weight.device
        self.places.add(self.device)
        loss = self.layers(inputs).square().mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit(strategy: Any, **settings: Any) -> tuple[Rows, Trainer]:
    seed_everything(2, verbose=False)
    module = Rows()
    trainer = Trainer(
        accelerator="cuda", devices=[0], strategy=strategy, max_epochs=2, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        **settings,
    )  # fmt: skip
    trainer.fit(module, DataLoader(TensorDataset(torch.randn(62, 8)), 15))
    return module, trainer


@pytest.mark.skipif("__import__('torch').cuda.device_count() < 2", reason="needs two GPUs")
@pytest.mark.parametrize(
    "settings",
    [{}, {"precision": "bf16-mixed"}, {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1}],
    ids=str,
)
def test_copies_on_all_devices_train_as_one_device(settings: Any) -> None:
    ours, trainer = fit(ReplicatedStrategy(), **settings)
    theirs, other = fit(SingleDeviceStrategy(torch.device("cuda", 0)), **settings)
    assert ours.places == {torch.device("cuda", at) for at in range(torch.cuda.device_count())}
    tolerance = 2e-2 if settings.get("precision") else 1e-5
    for one, another in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(one, another, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(
        trainer.callback_metrics["loss"], other.callback_metrics["loss"], rtol=2e-2, atol=tolerance
    )


def test_a_single_device_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"Use bolt_ddp with devices=1\."):
        fit(ReplicatedStrategy(devices=[0]))
