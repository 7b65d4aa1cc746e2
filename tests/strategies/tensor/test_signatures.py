"""Calls of blocks that are unlike those of the first batch are verified before they count."""

import warnings
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from torch import Tensor, nn
from torch.utils.data import DataLoader

from boltmesh.strategies import TensorParallelStrategy
from boltmesh.strategies.tensor.runtime.signatures import Verified, signature_of, without_sizes
from tests.support.numbered import Losses
from tests.support.ranks import RankFailure, run_ranks

WIDTH = 24


def test_a_signature_says_what_a_call_is_given_and_not_how_much() -> None:
    one = signature_of((torch.ones(4, 3), None), {"mask": [torch.ones(4, 1).bool()], "uses": True})
    other = signature_of((torch.ones(7, 5).half(), None), {"mask": [torch.ones(2, 1).bool()],
                                                           "uses": True})  # fmt: skip
    assert one == other
    assert one != signature_of((torch.ones(4, 3),), {})
    assert one != signature_of((torch.ones(4, 3), None), {"mask": [None], "uses": True})
    assert signature_of((torch.ones(4, 3),), {}) != signature_of((torch.ones(1, 3),), {})
    shapes = [signature_of((torch.ones(rows, 3),), {}) for rows in (4, 1)]
    assert without_sizes(shapes[0]) == without_sizes(shapes[1])


def test_a_call_that_was_verified_with_gradients_counts_without_them() -> None:
    verified = Verified()
    one, other = signature_of((1,), {}), signature_of((None,), {})
    verified.add(one, has_gradient=True, is_right=True)
    verified.add(other, has_gradient=False, is_right=True)
    assert verified.of_call(one, has_gradient=False)
    assert verified.of_call(other, has_gradient=False)
    assert verified.of_call(other, has_gradient=True) is None
    assert verified.is_of_training(one)
    verified.add(one, has_gradient=False, is_right=False)
    assert not verified.is_of_training(one)
    assert not verified.of_call(one, has_gradient=False)
    assert verified.of_call(one, has_gradient=True)


class Scaling(nn.Module):
    """On a part of its channels it is right without a scale, and silently wrong with one."""

    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 12), nn.Linear(12, WIDTH)
        self.dropout = nn.Dropout(0.5)
        self.register_buffer("calls", torch.zeros(()))

    def forward(
        self,
        x: Tensor,
        scale: Tensor | None = None,
        shift: Tensor | list[Tensor] | float = 0.0,
    ) -> Tensor:
        self.calls += 1
        hidden = self.up(x) + (shift[0] if isinstance(shift, list) else shift)
        if scale is not None:
            hidden = hidden * (scale + torch.arange(hidden.shape[-1]))
        return x + self.dropout(self.down(hidden.tanh()))


class Normalizing(nn.Module):
    """Looks at all of its channels in evaluation alone."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 12), nn.Linear(12, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.up(x).tanh()
        if not self.training:
            hidden = hidden / hidden.norm(dim=-1, keepdim=True)
        return x + self.down(hidden)


class Evaluated(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Normalizing() for _ in range(2))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        for block in self.blocks:
            batch = block(batch)
        return batch.square().mean()

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val", self.training_step(batch, batch_idx))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.5)


def evaluate(rank: int, world_size: int) -> tuple[float, list[str]]:
    seed_everything(1, verbose=False)
    batches: Any = DataLoader([torch.randn(5, WIDTH) for _ in range(2)], batch_size=None)  # type: ignore[arg-type]
    strategy: Any = TensorParallelStrategy(telemetry=False) if world_size > 1 else "auto"
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run = Trainer(
            accelerator="cpu", devices=world_size, strategy=strategy, max_epochs=1, logger=False,
            enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
            num_sanity_val_steps=0,
        )  # fmt: skip
        run.fit(Evaluated(), batches, batches)
    warned = [str(each.message) for each in caught if "runs whole" in str(each.message)]
    return float(run.callback_metrics["val"]), warned


@pytest.mark.ranks
def test_a_path_of_evaluation_is_verified_before_it_counts() -> None:
    wanted = run_ranks(evaluate, 1)[0][0]
    (found, warned), (other, _) = run_ranks(evaluate, 2)
    assert found == other == pytest.approx(wanted, rel=1e-5)
    assert len(warned) == 1
    assert "blocks.0 was in training mode" in warned[0]


class Stacked(LightningModule):
    def __init__(self, *, shares: bool, in_list: bool) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, 12)
        self.last = nn.Linear(12, WIDTH)
        self.blocks = nn.ModuleList(Scaling() for _ in range(3))
        self.shares, self.in_list = shares, in_list

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        hidden = self.first(batch["x"])
        x = self.last(hidden)
        for block in self.blocks:
            shift = [hidden] if self.in_list else hidden
            x = block(x, batch.get("scale"), *([shift] if self.shares else []))
        return x.square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.5)


def train(
    rank: int, world_size: int, shares: bool, in_list: bool = False
) -> tuple[list[float], list[float], list[str], list[str]]:
    seed_everything(1, verbose=False)
    module, losses = Stacked(shares=shares, in_list=in_list), Losses()
    batches: list[dict[str, Tensor]] = [{"x": torch.randn(5, WIDTH)} for _ in range(4)]
    batches[1]["scale"] = batches[3]["scale"] = torch.tensor(0.5)
    strategy: Any = TensorParallelStrategy(telemetry=False) if world_size > 1 else "auto"
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        Trainer(
            accelerator="cpu", devices=world_size, strategy=strategy, max_steps=4, logger=False,
            enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
            callbacks=[losses],
        ).fit(module, DataLoader(batches, batch_size=None))  # type: ignore[arg-type]  # fmt: skip
    told = [str(each.message) for each in caught if "runs whole" in str(each.message)]
    calls = [float(each.calls) for each in module.blocks]  # type: ignore[arg-type]
    sharded = [] if world_size == 1 else list(strategy.plan.sharded)
    return losses.kept, calls, told, sharded


@pytest.mark.ranks
@pytest.mark.parametrize("shares", [False, True], ids=["alone", "takes a divided tensor"])
def test_a_block_that_would_be_wrong_for_a_later_batch_runs_whole_for_it(shares: bool) -> None:
    wanted, calls, _, _ = run_ranks(train, 1, shares)[0]
    results = run_ranks(train, 2, shares)
    for losses, counted, _, sharded in results:
        assert losses == pytest.approx(wanted, rel=1e-5)
        assert counted == calls
        assert "blocks.1.up.weight" in sharded
    told = [each for _, _, several, _ in results for each in several]
    assert len(told) == 1
    assert "scale of blocks.0 was None" in told[0] or "argument 2 of blocks.0 was None" in told[0]


@pytest.mark.full
@pytest.mark.ranks
def test_a_block_that_takes_a_divided_tensor_in_a_list_refuses_a_later_batch() -> None:
    with pytest.raises(RankFailure, match="cannot be verified again in the run, because blocks"):
        run_ranks(train, 2, True, True)
