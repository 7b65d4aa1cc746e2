"""What a rank holds of each kind of memory."""

import gc
import weakref
from typing import Any

import pytest
from lightning.pytorch import Callback
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tests.support.ranks import run_ranks
from tests.support.shard_runs import STAGES, trainer
from tests.support.stack import Stack, token_data
from tests.support.turns import in_turn

pytestmark = pytest.mark.ranks


def bytes_held(rank: int, world_size: int, stage: int) -> dict[str, list[int]]:
    """Return bytes by kind before training, after a forward pass and after the steps."""
    seen: dict[str, list[int]] = {}

    def note(strategy: Any, when: str) -> None:
        kinds = strategy.data_axis.tensors_by_kind(strategy.model, strategy.optimizers)
        seen[when] = [
            sum(held(tensor) for tensor in kinds[kind])
            for kind in ("parameters", "gradients", "optimizer")
        ]

    def held(tensor: Tensor) -> int:
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        return local.numel() * local.element_size()

    class Notes(Callback):
        reads_gradients = False

        def on_before_zero_grad(self, trainer: Any, *args: Any) -> None:
            note(trainer.strategy, "after the forward pass")

        def on_after_backward(self, trainer: Any, *args: Any) -> None:
            note(trainer.strategy, "after the backward pass")

        def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
            note(trainer.strategy, "after the step")

    run = trainer(world_size, stage, max_steps=2, callbacks=[Notes()])
    run.fit(Even(), token_data(16, 2))
    return seen


class Even(Stack):
    """Sizes that 4 ranks divide."""

    def __init__(self) -> None:
        super().__init__(width=8, hidden=16)
        self.embedding = nn.Embedding(16, 8)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(batch)


@pytest.mark.sample("2")
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_a_rank_holds_its_share_of_each_kind(world_size: int) -> None:
    model = Even()
    model.head = nn.Linear(8, 13, bias=False)
    size = 4 * sum(each.numel() for each in model.parameters())
    padding = 4 * 8 * (-13 % world_size)  # of the head, on the last rank
    steps = 4 * len(list(model.parameters()))
    root = size - 4 * sum(each.numel() for each in model.blocks.parameters())
    ranks = run_ranks(in_turn, world_size, bytes_held, STAGES)
    for stage in (1, 2, 3):
        first = ranks[0][stage - 1]
        share = (size + padding) // world_size
        gathered = root if stage == 3 else size
        assert first["after the forward pass"][0] == share + gathered
        assert first["after the backward pass"][:2] == [share, share]
        assert first["after the step"] == [share, share, 2 * share + steps]
        total = sum(rank[stage - 1]["after the step"][0] for rank in ranks)
        assert total == size


def accumulate(rank: int, world_size: int, stage: int) -> list[int]:
    """Return the bytes of gradients between two batches of one accumulation window."""
    seen = []

    class Notes(Callback):
        reads_gradients = False

        def on_train_batch_end(
            self, trainer: Any, module: Any, out: Any, batch: Any, at: int
        ) -> None:
            if at == 0:
                kinds = trainer.strategy.data_axis.tensors_by_kind(trainer.strategy.model, [])
                for each in kinds["gradients"]:
                    local = each.to_local() if isinstance(each, DTensor) else each
                    seen.append(local.numel() * 4)

    run = trainer(world_size, stage, max_steps=1, callbacks=[Notes()], accumulate_grad_batches=2)
    run.fit(Even(), token_data(16, 2))
    return [sum(seen)]


@pytest.mark.full
def test_stage_1_accumulates_whole_gradients_and_stage_2_shards() -> None:
    size = 4 * sum(each.numel() for each in Even().parameters())
    padding = 4 * 8
    whole_gradients, shards, _ = run_ranks(in_turn, 2, accumulate, STAGES)[0]
    assert whole_gradients == [size]
    assert shards == [(size + padding) // 2]


def whole_ones_kept(rank: int, world_size: int, stage: int) -> list[str]:
    """Return which parameters are still there as they were before they were sharded."""
    model = Even()
    whole = {name: weakref.ref(each) for name, each in model.named_parameters()}
    kept: list[str] = []

    class Notes(Callback):
        reads_gradients = False

        def on_train_batch_end(self, *args: Any) -> None:
            gc.collect()
            kept.extend(name for name, each in whole.items() if each() is not None)

    trainer(world_size, stage, max_steps=1, callbacks=[Notes()]).fit(model, token_data(16, 2))
    return kept


@pytest.mark.full
def test_nobody_keeps_whole_parameters_beside_shards() -> None:
    assert run_ranks(in_turn, 1, whole_ones_kept, STAGES)[0] == [[], [], []]
