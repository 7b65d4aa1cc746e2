"""What an author did to parameters before the strategy saw them holds for their shards."""

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from torch import Tensor, nn

from boltmesh.errors import ConfigError
from boltmesh.strategies import ZeROStrategy
from tests.support.ranks import run_ranks
from tests.support.shard_runs import QUIET, whole_parameters
from tests.support.stack import VOCABULARY, Stack, token_data
from tests.support.turns import in_turn

pytestmark = pytest.mark.ranks


class Plain(Stack):
    def __init__(self, **options: Any) -> None:
        super().__init__(optimizer="sgd", **options)

    def decayed(self, decayed: list[nn.Parameter], rest: list[nn.Parameter]) -> Any:
        groups: list[dict[str, Any]] = [
            {"params": decayed, "weight_decay": 0.5},
            {"params": rest},
        ]
        return torch.optim.SGD(groups, lr=0.1, momentum=0.9)


class Marked(Plain):
    """Attributes decide about weight decay, and a layer's own about what it computes."""

    def __init__(self) -> None:
        super().__init__(has_scalar=True)
        first: Any = self.blocks[0]
        for each in (first.up.weight, self.head.weight, self.temperature):
            each.is_not_decayed = True
        self.norm.weight.scale = 0.5  # type: ignore[attr-defined]

    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(tokens) * getattr(self.norm.weight, "scale", 1.0)

    def configure_optimizers(self) -> Any:
        rest = [each for each in self.parameters() if hasattr(each, "is_not_decayed")]
        assert len(rest) == 3
        return self.decayed([p for p in self.parameters() if all(p is not r for r in rest)], rest)


class Hooked(Plain):
    """Rows that are not to be trained, and gradients that are scaled or removed again."""

    def __init__(self) -> None:
        super().__init__()
        rows = (torch.arange(VOCABULARY) % 2)[:, None]
        self.head.weight.register_hook(lambda gradient: gradient * rows)
        second: Any = self.blocks[1]
        second.up.bias.register_hook(lambda gradient: gradient.clamp(min=0.0))
        self.handle = self.embedding.weight.register_hook(lambda gradient: gradient * 0.0)

    def on_train_start(self) -> None:
        third: Any = self.blocks[2]
        third.down.weight.register_hook(torch.neg)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 2:
            self.handle.remove()


class HookedInStep(Plain):
    """Hangs hooks on what its first step has: copies that are gathered, or shards."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        if batch_idx == 0:
            first: Any = self.blocks[0]
            for each in (first.up.weight, self.head.weight):
                each.register_hook(torch.neg)
        return loss


class _Group(NamedTuple):
    name: str
    members: list[nn.Parameter]


class Listed(Plain):
    """Makes lists of parameters that ``configure_optimizers`` takes."""

    def __init__(self) -> None:
        super().__init__()
        self.sorted = [
            _Group("matrices", [each for each in self.parameters() if each.dim() > 1]),
            _Group("vectors", [each for each in self.parameters() if each.dim() < 2]),
        ]

    def configure_optimizers(self) -> Any:
        return self.decayed(*(each.members for each in self.sorted))


class Ready(Plain):
    """Has its optimizer from the start."""

    def __init__(self) -> None:
        super().__init__()
        self.optimizer = super().configure_optimizers()

    def configure_optimizers(self) -> Any:
        return self.optimizer


OPTIONS: list[dict[str, Any]] = [
    {"stage": 1},
    {"stage": 3},
    {"stage": 2, "offload_optimizer": "cpu"},
]


def fit(rank: int, world_size: int, kind: Callable[[], LightningModule], options: Any) -> Any:
    seed_everything(1)
    module = kind()
    strategy: Any = "auto" if options is None else ZeROStrategy(telemetry=False, **options)
    run = Trainer(
        accelerator="cpu", devices=world_size, strategy=strategy, max_steps=4,
        use_distributed_sampler=False, **QUIET,
    )  # fmt: skip
    run.fit(module, token_data(16, 4))
    return whole_parameters(module)


@pytest.mark.full
@pytest.mark.parametrize("kind", [Marked, Hooked, HookedInStep, Listed, Ready])
def test_it_trains_as_in_one_process(kind: Any) -> None:
    (wanted,) = run_ranks(fit, 1, kind, None)
    options = [each for each in OPTIONS if kind is not Marked or "offload_optimizer" not in each]
    for results in run_ranks(in_turn, 2, fit, [(kind, each) for each in options]):
        for found in results:
            torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)


class Stranger(Plain):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([*self.parameters(), nn.Parameter(torch.zeros(2, 5))], lr=0.1)


class Advanced(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.optimizer = torch.optim.Adagrad(self.parameters())

    def configure_optimizers(self) -> Any:
        return self.optimizer


def refused(rank: int, world_size: int, kind: Callable[[], LightningModule]) -> str:
    with pytest.raises(ConfigError) as caught:
        fit(rank, world_size, kind, {"stage": 2})
    return str(caught.value)


@pytest.mark.full
@pytest.mark.parametrize(
    ("kind", "says"),
    [
        (Stranger, "SGD updates a parameter of the shape (2, 5) that is none of Stranger's"),
        (Advanced, "Adagrad was made before the model was sharded, and has state"),
    ],
)
def test_optimizers_that_would_step_nothing_are_refused(kind: Any, says: str) -> None:
    for message in run_ranks(refused, 2, kind):
        assert says in message
