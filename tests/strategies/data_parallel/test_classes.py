"""Units of any class are sharded: abstract and generic ones, and those below them."""

from abc import ABC, abstractmethod
from typing import Any, Generic, TypeVar

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.utils.data import DataLoader

from boltmesh.strategies import ZeROStrategy, gathered_parameters
from tests.support.ranks import run_ranks

Kind = TypeVar("Kind")


class Layer(ABC, nn.Module):
    """Named abstract first, as layers of pytorch-forecasting are."""

    @abstractmethod
    def mix(self, x: Tensor) -> Tensor: ...

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mix(x)


class Dense(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def mix(self, x: Tensor) -> Tensor:
        mixed: Tensor = self.linear(x).relu()
        return mixed


class Recurrent(ABC, nn.RNNBase):
    @abstractmethod
    def start(self) -> int: ...


class Lstm(Recurrent, nn.LSTM):
    def start(self) -> int:
        return 0


class Typed(Generic[Kind], nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.inner = Dense()

    def forward(self, x: Tensor) -> Tensor:
        scaled: Tensor = self.inner(self.linear(x))
        return scaled


class Model(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.found: dict[str, Tensor] = {}
        self.dense = nn.ModuleList(Dense() for _ in range(2))
        self.typed: nn.ModuleList = nn.ModuleList(Typed[int]() for _ in range(2))
        self.rnn = nn.ModuleList([Lstm(8, 8, batch_first=True)])

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        for each in (*self.dense, *self.typed):
            batch = each(batch)
        hidden: Tensor = self.rnn[0](batch)[0]
        return hidden.square().mean()

    def on_train_end(self) -> None:
        units = [type(each) for each in self.modules() if isinstance(each, FSDPModule)]
        assert self.trainer.world_size == 1 or {Dense, Typed, Lstm} <= {k.__mro__[2] for k in units}
        assert all(kind.__mro__[1] is FSDPModule for kind in units)
        with gathered_parameters(self) as found:
            self.found = {name: each.clone() for name, each in found.items()}

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def train(rank: int, world_size: int) -> dict[str, Tensor]:
    model = Model()
    strategy: Any = "auto"
    if world_size > 1:
        blocks = ["dense.*", "typed.*", "rnn.*"]
        strategy = ZeROStrategy(stage=3, telemetry=False, blocks=blocks)
    trainer = Trainer(
        accelerator="cpu", devices=world_size, strategy=strategy, max_steps=3, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        use_distributed_sampler=False,
    )  # fmt: skip
    rows = torch.randn(24, 3, 8, generator=torch.Generator().manual_seed(1))
    trainer.fit(model, DataLoader(rows, 8))  # type: ignore[arg-type]
    return model.found


@pytest.mark.full
@pytest.mark.ranks
def test_units_of_abstract_and_generic_classes_train_as_in_one_process() -> None:
    (alone,) = run_ranks(train, 1)
    for found in run_ranks(train, 2):
        torch.testing.assert_close(found, alone)
