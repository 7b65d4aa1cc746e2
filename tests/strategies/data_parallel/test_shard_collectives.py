"""In what order, with which timeouts and when a step communicates."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

from boltmesh.strategies import ZeROStrategy
from boltmesh.strategies.torch_compat.fsdp_hooks import observe_waits
from boltmesh.telemetry.writer.torch_compat.hook import COLLECTIVES, CollectiveObserver
from tests.support.ranks import run_ranks
from tests.support.shard_runs import QUIET, STAGES, trainer
from tests.support.sharded import build
from tests.support.stack import Stack, token_data
from tests.support.turns import in_turn

pytestmark = pytest.mark.ranks


class Order:
    """Writes gathers (G) and reductions (R) down; small letters are not a block's."""

    KINDS = {"_allgather_base": "G", "_reduce_scatter_base": "R"}  # noqa: RUF012

    def __init__(self) -> None:
        self.seen = ""

    def enqueued(
        self, operator: str, group: dist.ProcessGroup, payload_bytes: int, *_: Any, **__: Any
    ) -> None:
        kind = self.KINDS.get(operator, "")
        self.seen += kind if payload_bytes == 4 * BLOCK_NUMEL else kind.lower()


def order_of_collectives(rank: int, world_size: int) -> str:
    """Return those of the second step."""
    order = Order()
    module = Stack(depth=4)
    run = trainer(world_size, 3, max_steps=2)

    class Listens(Callback):
        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, at: int) -> None:
            if at == 1:
                COLLECTIVES.attach(cast("CollectiveObserver", order))

    run.callbacks.append(Listens())  # type: ignore[attr-defined]
    run.fit(module, token_data(16, 2))
    COLLECTIVES.detach(cast("CollectiveObserver", order))
    return order.seen


BLOCK_NUMEL = 2 * (4 + 4 + 6 * 7 + 6 + 4 * 11 + 4)
"""Elements of a gathered block of ``Stack`` on two ranks, padding included."""


def test_a_block_is_gathered_before_the_gradients_of_the_one_behind_it_are_reduced() -> None:
    # Small letters are the root's. Backward: block 3 and, ahead, block 2 are gathered before block
    # 3 is reduced, and so on down to block 0; so the links are never idle for want of a request.
    expected = "g GGGG GGR GR GR R r".replace(" ", "")
    assert run_ranks(order_of_collectives, 2)[0] == expected


def timeouts_of_groups(rank: int, world_size: int) -> list[float]:
    strategy = ZeROStrategy(telemetry=False, shard_size=1, timeout_s=77.0)
    found: list[float] = []

    class Looks(Callback):
        def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
            axis = cast("Any", strategy.data_axis)
            mesh = axis.sharded.mesh
            for group in (mesh.shard_group, mesh.replica_group, axis._guard._group):
                options = group._get_backend(torch.device("cpu")).options
                found.append(options._timeout.total_seconds())

    run = Trainer(
        accelerator="cpu", devices=world_size, strategy=strategy, max_steps=1, callbacks=[Looks()],
        **QUIET,
    )  # fmt: skip
    run.fit(Stack(), token_data(4, 2))
    return found


@pytest.mark.full
def test_groups_that_are_made_later_have_the_timeout_that_was_asked() -> None:
    assert run_ranks(timeouts_of_groups, 2) == [[77.0] * 3] * 2


class Alternates(LightningModule):
    """Runs one head in the first batch of a step and the other one in the second."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleList(nn.Linear(2, 2, bias=False) for _ in range(2))
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.gradients: list[Tensor] = []
        self.kinds: list[bool] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss: Tensor = (self.heads[batch_idx % 2](batch) * self.scale).sum() * (
            self.global_rank + 1
        )
        return loss

    def on_train_batch_end(self, *_: Any) -> None:
        self.kinds.append(isinstance(self.scale, DTensor))

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        grads = [each.grad for each in self.heads.parameters()]
        for each in grads:
            assert isinstance(each, DTensor)
            self.gradients.append(each.full_tensor())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.0)


def fit_alternating(rank: int, world_size: int, stage: int) -> Any:
    strategy = ZeROStrategy(telemetry=False, stage=stage, shard_size=1, blocks=["heads.*"])
    module = Alternates()
    run = Trainer(
        accelerator="cpu", devices=world_size, strategy=strategy, max_steps=1,
        accumulate_grad_batches=2, **QUIET,
    )  # fmt: skip
    run.fit(module, DataLoader(cast("Any", torch.ones(4, 2)), batch_size=1))
    return module.gradients, module.kinds


@pytest.mark.full
def test_a_unit_that_rests_in_the_last_batch_keeps_its_gradient_in_every_copy() -> None:
    for stages in run_ranks(in_turn, 2, fit_alternating, STAGES):
        for gradients, kinds in stages:
            # 2 per element, by the mean of the ranks' factors 1 and 2, by half of the batches.
            assert [each.tolist() for each in gradients] == [[[1.5, 1.5]] * 2] * 2
            assert kinds == [True, True]  # between batches too, a scalar is no plain tensor


def waits_of_a_step(rank: int, world_size: int) -> list[int]:
    """Return how often the computation waits in the forward and in the backward pass."""
    module = build()
    found: list[None] = []

    @contextmanager
    def wait() -> Iterator[None]:
        found.append(None)
        yield

    observe_waits(cast("Any", [module, module.hidden]), wait)
    loss = module(torch.arange(4)).sum()
    in_forward = len(found)
    loss.backward()
    return [in_forward, len(found) - in_forward]


@pytest.mark.full
def test_a_device_waits_for_each_gather_and_at_the_end_for_the_reductions() -> None:
    # The root stays gathered; a unit that is behind the others has its reduction waited for.
    assert run_ranks(waits_of_a_step, 2) == [[2, 1 + 2]] * 2
