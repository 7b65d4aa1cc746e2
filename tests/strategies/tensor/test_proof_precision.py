"""Plans are verified in full fp32 where a step runs in it, and else in the precision of the run."""

from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from torch import Tensor, nn
from torch.utils.data import DataLoader

from boltmesh.strategies import TensorParallelStrategy
from boltmesh.strategies.dry_run.step import full_float32
from tests.support.numbered import Losses
from tests.support.ranks import run_ranks

WIDTH = 24


def precisions() -> list[str]:
    backends: Any = torch.backends
    return [
        each.fp32_precision
        for each in (backends.cuda.matmul, backends.cudnn.conv, backends.mkldnn.matmul)
    ]


@pytest.fixture(params=["high", "medium", "a backend", "nothing"])
def asked(request: pytest.FixtureRequest) -> Any:
    """Lightning's advice for tensor cores, torch's newer way to write it, or neither."""
    before = precisions()
    backends: Any = torch.backends
    if request.param == "a backend":
        backends.cuda.matmul.fp32_precision = "tf32"
    elif request.param != "nothing":
        torch.set_float32_matmul_precision(request.param)
    yield request.param
    matmul, conv, host = before
    backends.cuda.matmul.fp32_precision = matmul
    backends.cudnn.conv.fp32_precision = conv
    backends.mkldnn.matmul.fp32_precision = host


def test_products_have_all_bits_and_get_their_precision_back(asked: str) -> None:
    before = precisions()
    with full_float32():
        assert precisions() == ["ieee"] * 3
    assert precisions() == before
    if asked in {"high", "medium"}:
        assert torch.get_float32_matmul_precision() == asked


def test_flags_of_cudnn_may_be_used_within_and_are_given_back(asked: str) -> None:
    cudnn: Any = torch.backends.cudnn
    before = [cudnn.allow_tf32, cudnn.conv.fp32_precision, cudnn.rnn.fp32_precision]
    with full_float32():
        for _ in range(2):
            with cudnn.flags(enabled=False):  # as in the CTC loss of Hugging Face
                assert not cudnn.enabled
            assert not cudnn.allow_tf32
    assert [cudnn.allow_tf32, cudnn.conv.fp32_precision, cudnn.rnn.fp32_precision] == before


class Block(nn.Module):
    def __init__(self, *, wants_bf16: bool) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)
        self.wants_bf16 = wants_bf16
        self.seen: list[str] = []

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.up(x)
        if self.wants_bf16 and hidden.dtype != torch.bfloat16:
            raise RuntimeError("FlashAttention only supports fp16 and bf16")
        NOTED.append(precisions()[0])
        return x + self.down(hidden.tanh())


NOTED: list[str] = []
"""Precision of products, in every forward pass of a block."""


class Stacked(LightningModule):
    def __init__(self, *, wants_bf16: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(wants_bf16=wants_bf16) for _ in range(2))

    def on_train_start(self) -> None:
        NOTED.append("training")

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        x = batch
        for block in self.blocks:
            x = block(x)
        return (x.float() - 1).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.5)


def train(
    rank: int, world_size: int, precision: Any, wants_bf16: bool
) -> tuple[list[float], list[str], tuple[str, ...], list[str]]:
    seed_everything(1, verbose=False)
    torch.set_float32_matmul_precision("high")
    module, losses = Stacked(wants_bf16=wants_bf16), Losses()
    strategy: Any = TensorParallelStrategy(telemetry=False) if world_size > 1 else "auto"
    Trainer(
        accelerator="cpu", devices=world_size, strategy=strategy, max_steps=3, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        callbacks=[losses], precision=precision,
    ).fit(module, DataLoader(torch.randn(12, WIDTH), batch_size=4))  # type: ignore[arg-type]  # fmt: skip
    if world_size == 1:
        return losses.kept, [], (), NOTED
    return losses.kept, list(strategy.plan.sharded), strategy.plan.notes, NOTED


@pytest.mark.full
@pytest.mark.ranks
def test_a_plan_is_verified_without_tf32_and_trains_with_it() -> None:
    wanted = run_ranks(train, 1, "32-true", False)[0][0]
    for losses, sharded, notes, noted in run_ranks(train, 2, "32-true", False):
        assert losses == pytest.approx(wanted, rel=1e-5)
        assert "blocks.1.up.weight" in sharded
        assert notes == ()
        before, after = noted[: noted.index("training")], noted[noted.index("training") + 1 :]
        assert "ieee" in before
        assert {*after} == {"tf32"}


@pytest.mark.full
@pytest.mark.ranks
@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
def test_a_kernel_for_16_bits_is_verified_in_the_precision_of_the_run(precision: str) -> None:
    wanted = run_ranks(train, 1, precision, True)[0][0]
    for losses, sharded, notes, _ in run_ranks(train, 2, precision, True):
        assert losses == pytest.approx(wanted, rel=2e-2)
        assert "blocks.1.up.weight" in sharded
        assert len(notes) == 1
        assert "verified in the precision of the run" in notes[0]
        assert "FlashAttention only" in notes[0]


@pytest.mark.full
@pytest.mark.ranks
def test_a_batch_in_bf16_is_verified_in_fp32() -> None:
    wanted = run_ranks(train, 1, "bf16-true", False)[0][0]
    for losses, sharded, notes, _ in run_ranks(train, 2, "bf16-true", False):
        assert losses == pytest.approx(wanted, rel=2e-2)
        assert "blocks.1.up.weight" in sharded
        assert notes == ()
