"""Steps that differentiate by themselves: by their inputs, by a weight, within a block, twice.

And a step that writes in place to what blocks give.
"""

from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from typing_extensions import override

from boltmesh.strategies import ZeROStrategy
from boltmesh.strategies.torch_compat.fsdp import is_gathered
from tests.support.ranks import run_ranks
from tests.support.shard_runs import QUIET, whole_parameters
from tests.support.stack import Block, Stack, token_data
from tests.support.turns import in_turn

pytestmark = pytest.mark.ranks


class Differentiated(Stack):
    """Blocks go on from the embedding, by which a step may differentiate."""

    def __init__(self) -> None:
        super().__init__(optimizer="sgd")

    def beyond(self, embedded: Tensor) -> Tensor:
        for block in self.blocks:
            embedded = block(embedded)
        return self.head(self.norm(embedded))


class Penalised(Differentiated):
    """The loss holds the square of its own derivative, and of that one's."""

    @override
    def loss(self, batch: Any) -> Tensor:
        embedded = self.embedding(batch[0])
        loss = functional.cross_entropy(self.beyond(embedded).flatten(0, 1), batch[1].flatten())
        (slope,) = torch.autograd.grad(loss, embedded, create_graph=True)
        (bend,) = torch.autograd.grad(slope.square().sum(), embedded, create_graph=True)
        return loss + slope.square().sum() + 0.1 * bend.square().sum()


class Attacked(Differentiated):
    """Trains on embeddings that are worse for it, and weighs by the gradient of a weight."""

    @override
    def loss(self, batch: Any) -> Tensor:
        embedded = self.embedding(batch[0])
        targets = batch[1].flatten()
        loss = functional.cross_entropy(self.beyond(embedded).flatten(0, 1), targets)
        slope, of_head = torch.autograd.grad(loss, [embedded, self.head.weight], retain_graph=True)
        worse = self.beyond(embedded + 0.1 * slope.sign()).flatten(0, 1)
        return loss + functional.cross_entropy(worse, targets) * of_head.norm().clamp(max=1.0)


class CalledTwice(Differentiated):
    """A gradient penalty at other places than those of the loss, as in WGAN-GP."""

    @override
    def loss(self, batch: Any) -> Tensor:
        between = 0.7 * self.embedding(batch[0]).detach().requires_grad_()
        (slope,) = torch.autograd.grad(self.beyond(between).sum(), between, create_graph=True)
        return super().loss(batch) + (slope.norm(dim=-1) - 1).square().mean()


class ByHand(Penalised):
    """The same under manual optimisation."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    @override
    def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        optimizer: Any = self.optimizers()
        self.manual_backward(self.loss(batch))
        optimizer.step()
        optimizer.zero_grad()


class Force(Block):
    """A block that gives the derivative of an energy."""

    @override
    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            place = x if x.requires_grad else x.detach().requires_grad_()
            energy = super().forward(place).square().sum()
            (force,) = torch.autograd.grad(energy, place, create_graph=True)
        return x - 0.01 * force


class Forced(Differentiated):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList(Force(7, 11) for _ in range(2))


class Projection(Block):
    """Returns a view, as a layer with a bias gives of more than two dims."""

    @override
    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(self.up(self.norm(x)).tanh())
        return out


class WrittenTo(Differentiated):
    """Adds in place to what blocks return."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList(Projection(7, 11) for _ in range(3))

    @override
    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            more = block(x)
            more += x
            x = more
        return self.head(self.norm(x))


class Checkpointed(Differentiated):
    """All that is trained has a backward pass of its own, within the step's."""

    @override
    def forward(self, tokens: Tensor) -> Tensor:
        start = torch.zeros(1, requires_grad=True)
        run = super().forward
        logits = checkpoint(lambda x: run(tokens) + x, start, use_reentrant=True)
        assert isinstance(logits, Tensor)
        return logits


LAYOUTS: list[dict[str, Any]] = [
    {"stage": 1},
    {"stage": 3},
    {"stage": 3, "offload_optimizer": "cpu", "offload_parameters": "cpu"},
]


def fit(rank: int, world_size: int, kind: type[LightningModule], options: Any) -> Any:
    seed_everything(1)
    module = kind()
    strategy: Any = "auto" if options is None else ZeROStrategy(telemetry=False, **options)
    run = Trainer(
        accelerator="cpu", devices=world_size, strategy=strategy, max_epochs=1,
        use_distributed_sampler=False, accumulate_grad_batches=1 if kind is ByHand else 2, **QUIET,
    )  # fmt: skip
    run.fit(module, token_data(16, 4))
    return whole_parameters(module)


KINDS = [Penalised, Attacked, CalledTwice, ByHand, Forced, WrittenTo, Checkpointed]


@pytest.mark.full
@pytest.mark.parametrize("kind", KINDS)
def test_it_trains_as_in_one_process(kind: type[LightningModule]) -> None:
    (wanted,) = run_ranks(fit, 1, kind, None)
    for results in run_ranks(in_turn, 2, fit, [(kind, each) for each in LAYOUTS]):
        for found in results:
            torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


class Prompted(Differentiated):
    """Trains what comes before frozen blocks, each of which is in a reentrant checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)
        self.embedding.requires_grad_(True)
        self.gathered: list[int] = []
        self.embedding.register_full_backward_pre_hook(self.look)

    def look(self, *_: object) -> None:
        units = [each for each in self.blocks if isinstance(each, FSDPModule)]
        assert len(units) == len(self.blocks)
        self.gathered.append(sum(map(is_gathered, units)))

    @override
    def beyond(self, embedded: Tensor) -> Tensor:
        for block in self.blocks:
            embedded = checkpoint(block, embedded, use_reentrant=True)
        return self.head(self.norm(embedded))

    @override
    def forward(self, tokens: Tensor) -> Tensor:
        return self.beyond(self.embedding(tokens))


def gathered_blocks(rank: int, world_size: int) -> list[int]:
    module = Prompted()
    strategy = ZeROStrategy(telemetry=False, stage=3)
    run = Trainer(accelerator="cpu", devices=world_size, strategy=strategy, max_steps=2, **QUIET)
    run.fit(module, token_data(16, 4))
    return module.gathered


@pytest.mark.full
def test_frozen_blocks_with_backward_passes_of_their_own_are_freed_after_them() -> None:
    for counts in run_ranks(gathered_blocks, 2):
        assert counts == [0, 0]
