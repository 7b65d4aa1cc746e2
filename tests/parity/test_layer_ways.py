"""How published modules hold and call their layers: it trains, or one line says why not."""

import warnings
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities import grad_norm
from torch import Tensor, nn
from torch.utils.data import DataLoader

from boltmesh.errors import ConfigError
from boltmesh.strategies import PipelineParallelStrategy, TensorParallelStrategy, ZeROStrategy
from tests.support.numbered import Losses
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.ranks

STEPS = 3


class Model(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Linear(4, 8)
        self.blocks = nn.ModuleList(Residual() for _ in range(4))
        self.head = nn.Linear(8, 2)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        x = self.embedding(batch)
        for block in self.blocks:
            x = block(x)
        return self.head(x).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))


class TwoNames(Model):
    def __init__(self) -> None:
        super().__init__()
        self.last, self.classifier = self.blocks[-1], self.head
        self.encoder = nn.Sequential(*self.blocks)


class Compiled(Model):
    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.compile(backend="eager")


class Hooked(Model):
    def __init__(self) -> None:
        super().__init__()
        self.blocks[1].register_full_backward_hook(lambda *_: None)


class HookedInside(TwoNames):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[float] = []
        self.blocks[1].up.register_full_backward_hook(
            lambda _, __, out: self.seen.append(float(out[0].norm()))  # type: ignore[index]
        )


class Lazy(Model):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.LazyLinear(8)


class Norms(Model):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.log_dict(grad_norm(self.blocks[0], 2))


STRATEGIES: dict[str, Any] = {
    "pipeline": lambda: PipelineParallelStrategy(microbatches=2, telemetry=False),
    "tensor": lambda: TensorParallelStrategy(telemetry=False),
    "zero1": lambda: ZeROStrategy(stage=1, telemetry=False),
}

REFUSED = {
    ("pipeline", Compiled): "'blocks.0' was compiled by its method compile()",
    ("pipeline", Hooked): "'blocks.1' has a full backward hook",
    ("pipeline", Lazy): "'embedding.weight' of Lazy has no shape yet",
    ("zero1", Norms): "Norms.on_before_optimizer_step calls grad_norm, which would see this rank's",
}


def batches() -> list[Tensor]:
    return list(torch.randn(STEPS, 4, 4, generator=torch.Generator().manual_seed(1)))


def train(rank: int, world_size: int) -> tuple[list[list[float]], list[str]]:
    warnings.simplefilter("ignore")
    found = [losses(world_size, HookedInside, name) for name in ("pipeline", "tensor")]
    refusals = []
    for name, kind in REFUSED:
        with pytest.raises(ConfigError) as caught:
            losses(world_size, kind, name)
        refusals.append(str(caught.value))
    return found, refusals


def losses(world_size: int, kind: type[Model], name: str) -> list[float]:
    seen = Losses()
    Trainer(
        strategy=STRATEGIES[name](), accelerator="cpu", devices=world_size, max_steps=STEPS,
        logger=False, enable_checkpointing=False, enable_progress_bar=False, callbacks=[seen],
        enable_model_summary=False, use_distributed_sampler=False,
    ).fit(kind(), DataLoader(batches(), batch_size=None))  # type: ignore[arg-type]  # fmt: skip
    return seen.kept


@pytest.mark.full
def test_each_way_trains_as_in_one_process_or_is_refused_in_one_line() -> None:
    model = TwoNames()
    optimizer = model.configure_optimizers()
    wanted = []
    for batch in batches():
        loss = model.training_step(batch, 0)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        wanted.append(loss.item())
    for found, refusals in run_ranks(train, 2):
        assert found == [pytest.approx(wanted, rel=1e-5)] * 2
        for text, (_, message) in zip(refusals, REFUSED.items(), strict=True):
            assert message in text
            assert "\n" not in text
