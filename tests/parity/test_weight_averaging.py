"""Averages of weights equal those of one process: in validation, at the end, and after a resume."""

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import (
    EMAWeightAveraging,
    ModelCheckpoint,
    StochasticWeightAveraging,
    WeightAveraging,
)
from torch import Tensor, nn
from torch.nn import functional
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from typing_extensions import override

from boltmesh.errors import UnsupportedError
from boltmesh.strategies import ZeROStrategy
from boltmesh.strategies.checkpoint.directory import CURRENT, load_directory
from tests.support.adapters import STRATEGIES, fit, fit_under, largest_difference, whole
from tests.support.ranks import RankFailure, run_ranks
from tests.support.stack import Block

pytestmark = pytest.mark.ranks


class Words(LightningModule):
    """Blocks between an embedding and a head that is tied to it, and a counter."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.embedding, self.head = nn.Embedding(64, 14), nn.Linear(14, 64, bias=False)
        self.head.weight = self.embedding.weight
        self.blocks = nn.ModuleList(Block(14, 22) for _ in range(2))
        self.validated: list[float] = []

    def embed(self, batch: Tensor) -> Tensor:
        x: Tensor = self.embedding(batch)
        return x

    def loss(self, batch: Tensor) -> Tensor:
        x = self.embed(batch)
        for block in self.blocks:
            x = block(x)
        return functional.cross_entropy(self.head(x).flatten(0, 1), batch.roll(1, 1).flatten())

    @override
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.loss(batch)

    @override
    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch), sync_dist=True)

    @override
    def on_validation_epoch_end(self) -> None:
        self.validated.append(float(self.trainer.callback_metrics["val_loss"]))

    @override
    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2, eps=1e-3)


class FromSecondStep(WeightAveraging):
    """Equally weighted, from the second step on, so that the first validation sees another."""

    @override
    def should_update(self, step_idx: int | None = None, epoch_idx: int | None = None) -> bool:
        return step_idx is not None and step_idx >= 2


def averaging(kind: str) -> WeightAveraging:
    if kind == "ema":
        return EMAWeightAveraging(decay=0.6)
    if kind == "multi":
        return WeightAveraging(multi_avg_fn=get_ema_multi_avg_fn(0.6))
    return FromSecondStep()


CHOSEN = [("zero3", "ema"), ("zero3_cpu", "swa"), ("pipeline", "multi"), ("tensor", "swa")]
Found = tuple[dict[str, Tensor], list[float]]


def one_process(rank: int, world_size: int, kind: str) -> Found:
    module = Words()
    fit(module, "auto", callbacks=[averaging(kind)])
    return whole(module), module.validated


def train_and_resume(
    rank: int, world_size: int, name: str, kind: str, folder: str
) -> tuple[Found, Found]:
    runs = []
    for path in (None, f"{folder}/step=2.ckpt"):
        module = Words()
        saves = ModelCheckpoint(folder, "{step}", every_n_train_steps=2, save_top_k=-1)
        fit_under(
            name, module, rank, world_size, ckpt_path=path,
            callbacks=[averaging(kind), saves], enable_checkpointing=True,
        )  # fmt: skip
        runs.append((whole(module), module.validated))
    return runs[0], runs[1]


@pytest.mark.full
@pytest.mark.slow(30)
@pytest.mark.parametrize(
    ("name", "kind"),
    [
        *CHOSEN,
        *(
            pytest.param(name, kind, marks=pytest.mark.full)
            for name in STRATEGIES
            for kind in ("ema", "swa")
            if (name, kind) not in CHOSEN
        ),
    ],
)
def test_averaged_weights_equal_those_of_one_process(name: str, kind: str, tmp_path: Path) -> None:
    ((expected, losses),) = run_ranks(one_process, 1, kind)
    found = run_ranks(train_and_resume, STRATEGIES[name][1], name, kind, str(tmp_path))
    (through, validated), (resumed, validated_again) = found[0]
    assert largest_difference(through, expected) < 1e-6
    assert validated == pytest.approx(losses, abs=1e-5)
    assert len(validated) == 2
    assert largest_difference(resumed, through) == 0
    assert validated_again == validated[-1:]
    if name not in {"ddp", "context"}:
        assert CURRENT in load_directory(tmp_path / "step=2.ckpt")


def save_and_resume_elsewhere(
    rank: int, world_size: int, saved_by: str, loaded_by: str, folder: str
) -> Found:
    saves = ModelCheckpoint(folder, "{step}", every_n_train_steps=2, save_top_k=-1)
    callbacks = [averaging("ema"), saves]
    fit_under(
        saved_by, Words(), rank, world_size, callbacks=callbacks, enable_checkpointing=True,
        keywords={"save_trainable_only": True, "async_save": True},
    )  # fmt: skip
    module = Words()
    path = f"{folder}/step=2.ckpt"
    fit_under(loaded_by, module, rank, world_size, ckpt_path=path, callbacks=[averaging("ema")])
    return whole(module), module.validated


@pytest.mark.full
@pytest.mark.slow(20)
@pytest.mark.parametrize(
    ("saved_by", "loaded_by"),
    [
        ("zero3", "ddp"),
        pytest.param("ddp", "zero3_cpu", marks=pytest.mark.full),
        pytest.param("pipeline", "tensor", marks=pytest.mark.full),
    ],
)
def test_a_run_with_averages_resumes_in_another_layout(
    saved_by: str, loaded_by: str, tmp_path: Path
) -> None:
    ((expected, losses),) = run_ranks(one_process, 1, "ema")
    found = run_ranks(save_and_resume_elsewhere, 2, saved_by, loaded_by, str(tmp_path))
    assert largest_difference(found[0][0], expected) < 1e-6
    assert found[0][1] == pytest.approx(losses[-1:], abs=1e-5)


EPOCHS: dict[str, Any] = {"max_steps": -1, "max_epochs": 5, "limit_train_batches": 2}


def by_epochs() -> StochasticWeightAveraging:
    return StochasticWeightAveraging(5e-3, swa_epoch_start=2, annealing_epochs=2)


def epochs_of_one_process(rank: int, world_size: int, folder: str) -> Found:
    module = Words()
    saves = ModelCheckpoint(folder, "{epoch}", save_top_k=-1)
    fit(module, "auto", callbacks=[by_epochs(), saves], enable_checkpointing=True, **EPOCHS)
    return whole(module), module.validated


def epochs_and_resume(
    rank: int, world_size: int, name: str, folder: str, other: str
) -> list[Found]:
    runs = []
    for path in (None, f"{folder}/epoch=2.ckpt", f"{folder}/epoch=0.ckpt", other):
        module = Words()
        saves = ModelCheckpoint(folder, "{epoch}", save_top_k=-1)
        fit_under(
            name, module, rank, world_size, ckpt_path=path,
            callbacks=[by_epochs(), saves], enable_checkpointing=True, **EPOCHS,
        )  # fmt: skip
        runs.append((whole(module), module.validated))
    return runs


@pytest.mark.slow(30)
@pytest.mark.sample("zero3_cpu")
@pytest.mark.parametrize("name", STRATEGIES)
def test_averages_of_epochs_equal_those_of_one_process(name: str, tmp_path: Path) -> None:
    ((expected, losses),) = run_ranks(epochs_of_one_process, 1, str(tmp_path / "one"))
    other = str(tmp_path / "one" / "epoch=2.ckpt")
    runs = run_ranks(epochs_and_resume, STRATEGIES[name][1], name, str(tmp_path), other)[0]
    for found, validated in runs:
        assert largest_difference(found, expected) < 1e-6
        assert validated == pytest.approx(losses[-len(validated) :], abs=1e-5)
    assert [len(validated) for _, validated in runs] == [5, 2, 4, 2]
    assert largest_difference(runs[1][0], runs[0][0]) == 0


def epochs_of_replicas(rank: int, world_size: int, path: str) -> dict[str, Tensor]:
    module = Words()
    fit_under("ddp", module, rank, world_size, ckpt_path=path, callbacks=[by_epochs()], **EPOCHS)
    return whole(module)


@pytest.mark.full
def test_averages_of_epochs_resume_under_ddp(tmp_path: Path) -> None:
    ((expected, _),) = run_ranks(epochs_of_one_process, 1, str(tmp_path / "one"))
    run_ranks(epochs_and_resume, 2, "zero3", str(tmp_path), str(tmp_path / "one" / "epoch=2.ckpt"))
    for epoch in (0, 2):
        for found in run_ranks(epochs_of_replicas, 2, str(tmp_path / f"epoch={epoch}.ckpt")):
            assert largest_difference(found, expected) < 1e-6


def epochs_from_the_middle(rank: int, world_size: int, name: str, folder: str) -> list[Any]:
    runs = []
    for path in (None, f"{folder}/step=3.ckpt"):
        module = Words()
        saves = ModelCheckpoint(folder, "{step}", every_n_train_steps=3, save_top_k=-1)
        fit_under(
            name, module, rank, world_size, ckpt_path=path,
            callbacks=[by_epochs(), saves], enable_checkpointing=True, **EPOCHS,
        )  # fmt: skip
        runs.append(whole(module))
    return runs


@pytest.mark.full
@pytest.mark.parametrize("name", ["zero3", "pipeline"])
def test_averages_of_epochs_resume_in_the_middle_of_one(name: str, tmp_path: Path) -> None:
    through, resumed = run_ranks(epochs_from_the_middle, 2, name, str(tmp_path))[0]
    assert largest_difference(resumed, through) == 0


def test_two_callbacks_that_average_shards_are_refused() -> None:
    callbacks = [by_epochs(), EMAWeightAveraging()]
    with pytest.raises(UnsupportedError, match="StochasticWeightAveraging and EMAWeightAveraging"):
        fit(Words(), ZeROStrategy(telemetry=False), callbacks=callbacks)


class Normed(Words):
    """Has a batch norm, whose statistics are computed again in an epoch of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(12)

    @override
    def embed(self, batch: Tensor) -> Tensor:
        x: Tensor = self.norm(super().embed(batch))
        return x


def normed(rank: int, world_size: int, name: str) -> tuple[dict[str, Tensor], list[Tensor]]:
    module = Normed()
    fit_under(name, module, rank, world_size, callbacks=[by_epochs()], **EPOCHS)
    return whole(module), [each.clone() for each in module.buffers()]


@pytest.mark.full
def test_batch_norms_of_averaged_weights_are_those_of_ddp() -> None:
    ((expected, statistics), _) = run_ranks(normed, 2, "ddp")
    for name in ("zero2", "zero3", "zero3_cpu"):
        ((found, others), _) = run_ranks(normed, 2, name)
        assert largest_difference(found, expected) < 1e-6
        assert len(others) == len(statistics) == 3
        for mine, other in zip(others, statistics, strict=True):
            assert torch.allclose(mine, other, rtol=1e-5)
    with pytest.raises(RankFailure, match=r"WeightAveraging\(use_buffers=True\)"):
        run_ranks(normed, 2, "pipeline")


def largest_of(average: Tensor, current: Tensor, _: Any) -> Tensor:
    return average * (current.norm() / average.norm())


@pytest.mark.full
def test_an_average_that_mixes_elements_is_refused() -> None:
    callback = WeightAveraging(avg_fn=largest_of)
    with pytest.raises(UnsupportedError, match="avg_fn of WeightAveraging gives another average"):
        fit(Words(), ZeROStrategy(telemetry=False), callbacks=[callback])


class InModule(Words):
    """Averages its blocks itself, after each step."""

    def __init__(self) -> None:
        super().__init__()
        self.average = AveragedModel(self.blocks, multi_avg_fn=get_ema_multi_avg_fn(0.6))
        self.average.requires_grad_(False)

    @override
    def on_train_batch_end(self, *_: Any) -> None:
        self.average.update_parameters(self.blocks)


def average_within(rank: int, world_size: int, name: str) -> dict[str, Tensor]:
    module = InModule()
    if name == "auto":
        fit(module, name)
    else:
        fit_under(name, module, rank, world_size)
    return whole(module)


@pytest.mark.full
@pytest.mark.parametrize("name", STRATEGIES)
def test_an_average_that_a_module_keeps_equals_that_of_one_process(name: str) -> None:
    (expected,) = run_ranks(average_within, 1, "auto")
    for found in run_ranks(average_within, STRATEGIES[name][1], name):
        assert largest_difference(found, expected) < 1e-6
