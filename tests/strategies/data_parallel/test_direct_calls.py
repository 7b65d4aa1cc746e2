"""Blocks whose forward is called by name train under ZeRO as in one process, or are refused.

SqueezeBert of transformers and HoVerNet of MONAI call their layers like that.
"""

from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from boltmesh.strategies import ZeROStrategy
from tests.support.numbered import Losses
from tests.support.ranks import RankFailure, run_ranks

pytestmark = pytest.mark.ranks

WIDTH = 8


class Layer(nn.Module):
    """Takes a tensor, or a list of which it treats each by calling itself."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 12), nn.Linear(12, WIDTH)

    def forward(self, x: Any) -> Any:
        if isinstance(x, list):
            treated = [self.forward(each) for each in x]
            return [self.down(torch.relu(self.up(each))) for each in treated]
        return x + self.down(torch.tanh(self.up(x)))


class Calling(LightningModule):
    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.layers = nn.ModuleList(Layer() for _ in range(3))
        if way == "hooked":
            for layer in self.layers:
                layer.register_forward_hook(lambda module, args, output: output * 2)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        x: Any = batch
        for layer in self.layers:
            if self.way == "recursive":
                x = torch.stack(layer([x, x * 0.5])).sum(0)
            elif self.way == "checkpointed":
                x = checkpoint(layer.forward, x, use_reentrant=False)
            else:
                x = layer.forward(x)
        return x.square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def train(rank: int, world_size: int, way: str, options: dict[str, Any]) -> list[float]:
    seed_everything(1, verbose=False)
    generator = torch.Generator().manual_seed(2)
    batches = [torch.randn(4, WIDTH, generator=generator) for _ in range(3)]
    module, losses = Calling(way), Losses()
    trainer = Trainer(
        accelerator="cpu", devices=world_size, max_epochs=1, logger=False,
        strategy=ZeROStrategy(telemetry=False, **options) if world_size > 1 else "auto",
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        use_distributed_sampler=False, callbacks=[losses],
    )  # fmt: skip
    loader: Any = DataLoader(batches, batch_size=None)  # type: ignore[arg-type]
    trainer.fit(module, loader)
    trainer.fit_loop.max_epochs = 2
    trainer.fit(module, loader)  # what a fit has wrapped, it unwraps
    return losses.kept


@pytest.mark.sample("recomputed", "recursive")
@pytest.mark.parametrize(
    ("way", "options"),
    [
        pytest.param("plain", {"stage": 1}, id="stage 1"),
        pytest.param("plain", {"stage": 3}, id="stage 3"),
        pytest.param("plain", {"stage": 3, "activation_checkpointing": "full"}, id="recomputed"),
        pytest.param("plain", {"stage": 3, "offload_optimizer": "cpu", "offload_parameters": "cpu"},
                     id="offload"),
        pytest.param("recursive", {"stage": 3}, id="recursive"),
        pytest.param("checkpointed", {"stage": 3}, id="checkpointed"),
    ],
)  # fmt: skip
def test_it_trains_as_in_one_process(way: str, options: dict[str, Any]) -> None:
    (one,) = run_ranks(train, 1, way, {})
    for losses in run_ranks(train, 2, way, options):
        assert losses == pytest.approx(one, rel=1e-5)


def test_a_layer_with_hooks_is_refused_for_by_name_it_runs_without_them() -> None:
    with pytest.raises(RankFailure, match="the module ran without the forward of the block"):
        run_ranks(train, 2, "hooked", {"stage": 3})
