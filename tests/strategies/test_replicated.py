"""One process over several devices: torch's own copies, on a CPU that plays two devices."""

import sys
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanMetric

from boltmesh.errors import ConfigError, LayoutError
from boltmesh.strategies import replicated
from boltmesh.strategies.replicated import ReplicatedStrategy

CPU = torch.device("cpu")


class Rows(LightningModule):
    """Has a buffer, a tied weight and a loss that is a mean over rows; logs in both forms."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 3), nn.Linear(3, 3)
        self.last.weight = self.first.weight
        self.offset: Tensor
        self.register_buffer("offset", torch.full((3,), 0.5))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        (inputs,) = batch
        assert inputs.device == self.device
        loss = self.last(torch.tanh(self.first(inputs)) + self.offset).square().mean()
        self.log("loss", loss, batch_size=len(inputs))
        self.log_dict({"twice": 2 * loss}, prog_bar=True)
        return {"loss": loss, "rows": len(inputs)}

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Scatter:
    @staticmethod
    def apply(devices: Sequence[torch.device], _: Any, dim: int, whole: Tensor) -> Any:
        return whole.chunk(len(devices), dim)


@pytest.fixture
def two_devices(monkeypatch) -> list[int]:
    """Let torch copy and cut on the CPU; returns how many copies each step made."""
    made: list[int] = []

    def broadcast(tensors: Any, devices: Any, detach: bool = False) -> list[list[Tensor]]:
        made.extend([len(devices)] * bool(tensors))
        return [[each.view_as(each) for each in tensors] for _ in devices]

    def apply(copies: Any, shares: Any, named: Any, devices: Any) -> list[Any]:
        assert len(copies) == len(shares) == len(named) == len(devices)
        return [
            copy(*share, **kwargs)
            for copy, share, kwargs in zip(copies, shares, named, strict=True)
        ]

    replicate = sys.modules["torch.nn.parallel.replicate"]
    monkeypatch.setattr(replicate, "_broadcast_coalesced_reshape", broadcast)
    monkeypatch.setattr(replicate, "_get_device_index", lambda device, *_: device)
    monkeypatch.setattr(sys.modules["torch.nn.parallel.scatter_gather"], "Scatter", Scatter)
    monkeypatch.setattr(replicated, "parallel_apply", apply)
    monkeypatch.setattr(ReplicatedStrategy, "find_devices", lambda _: (CPU, CPU))
    return made


def fit(strategy: Any, **settings: Any) -> tuple[Rows, Trainer]:
    seed_everything(1, verbose=False)
    module = Rows()
    trainer = Trainer(
        accelerator="cpu", devices=1, strategy=strategy, max_epochs=2, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        **settings,
    )  # fmt: skip
    # The last batch has a single row, and the others cannot be halved.
    trainer.fit(module, DataLoader(TensorDataset(torch.randn(22, 3)), 7))
    return module, trainer


@pytest.mark.parametrize(
    "settings",
    [{}, {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1}, {"precision": "bf16-mixed"}],
    ids=str,
)
def test_copies_train_as_one_device_with_the_same_batches(two_devices, settings: Any) -> None:
    ours, trainer = fit(ReplicatedStrategy(telemetry=False), **settings)
    assert two_devices == [2, 2, 2, 2, 2, 2, 1, 1] * 2  # parameters and buffers of each batch
    theirs, other = fit(SingleDeviceStrategy(CPU), **settings)
    tolerance = 1e-2 if settings.get("precision") else 1e-6
    for one, another in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(one, another, rtol=tolerance, atol=tolerance)
    assert not torch.equal(ours.first.weight, Rows().first.weight)
    assert trainer.callback_metrics.keys() == other.callback_metrics.keys()
    for name, value in trainer.callback_metrics.items():
        torch.testing.assert_close(value, other.callback_metrics[name], rtol=1e-2, atol=tolerance)


def test_a_step_weighs_shares_by_their_rows_and_keeps_what_each_returned(two_devices) -> None:
    module = Rows()
    logged: dict[str, Any] = {}
    vars(module)["log"] = lambda name, value, **options: logged.update({name: (value, options)})
    batch = (torch.randn(7, 3),)
    found = replicated.scattered_step(
        module, (batch, 0), {}, devices=(CPU, CPU), around=torch.enable_grad
    )
    assert found["rows"] == [4, 3]
    found["loss"].backward()
    gradients = [each.grad for each in module.parameters()]
    module.zero_grad()
    whole = module.training_step(batch, 0)["loss"]
    whole.backward()
    torch.testing.assert_close(found["loss"], whole)
    for mine, parameter in zip(gradients, module.parameters(), strict=True):
        torch.testing.assert_close(mine, parameter.grad)
    value, options = logged["loss"]
    torch.testing.assert_close(value, whole)
    assert options["batch_size"] == 7


class ByHand(Rows):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class Metered(Rows):
    def __init__(self) -> None:
        super().__init__()
        self.mean = MeanMetric()


def test_what_copies_cannot_do_is_refused(monkeypatch) -> None:
    quiet: dict[str, Any] = {
        "accelerator": "cpu", "logger": False, "max_steps": 1, "enable_progress_bar": False,
        "enable_checkpointing": False, "enable_model_summary": False,
    }  # fmt: skip
    data = DataLoader(TensorDataset(torch.randn(4, 3)), 2)
    with pytest.raises(LayoutError, match=r"the job has 2\. Set devices=1"):
        Trainer(strategy=ReplicatedStrategy(telemetry=False), devices=2, **quiet)

    def refused(module: Rows) -> str:
        trainer = Trainer(strategy=ReplicatedStrategy(telemetry=False), devices=1, **quiet)
        with pytest.raises(ConfigError) as caught:
            trainer.fit(module, data)
        return str(caught.value)

    assert "this runs on cpu. Use bolt_ddp" in refused(Rows())
    monkeypatch.setattr(ReplicatedStrategy, "find_devices", lambda _: (CPU, CPU))
    assert "optimises by hand" in refused(ByHand())
    assert "keeps the metric 'mean'" in refused(Metered())


def test_devices_are_those_that_there_are(monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    first = torch.device("cuda", 1)
    monkeypatch.setattr(ReplicatedStrategy, "root_device", first)

    def found(devices: Any) -> list[int | None]:
        return [each.index for each in ReplicatedStrategy(devices=devices).find_devices()]

    assert found(None) == [1, 2, 3]
    assert found([1, 3]) == [1, 3]
    for devices, said in (
        ([1], "gets \\[1\\] of 4"),
        ([1, 1], "gets \\[1, 1\\]"),
        ([0, 1], "has to begin with device 1"),
        ([1, 4], "Set strategy.devices=\\[1, 2, 3\\]"),
    ):
        with pytest.raises(ConfigError, match=said):
            found(devices)
