"""What a LightningModule may do around its steps, with ranks that share its layers."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torchmetrics
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import BatchSizeFinder, ModelPruning, OnExceptionCheckpoint
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from boltmesh.errors import CheckpointError, ConfigError, LayoutError
from boltmesh.strategies import TensorParallelStrategy, gathered_parameters
from tests.support.gpts import LENGTH, VOCABULARY, TinyGPT, text_data
from tests.support.ranks import RankFailure, run_ranks

pytestmark = pytest.mark.ranks

QKV = "blocks.0.attention.qkv.weight"


def trainer_of(world_size: int, **options: Any) -> Trainer:
    strategy = options.pop("strategy", None)
    if strategy is None:
        size = options.pop("size", None)
        strategy = TensorParallelStrategy(telemetry=False, size=size) if world_size > 1 else "auto"
    settings: dict[str, Any] = {
        "accelerator": "cpu", "devices": world_size, "max_steps": 3, "logger": False,
        "enable_checkpointing": False, "enable_progress_bar": False,
        "enable_model_summary": False, "strategy": strategy, "num_sanity_val_steps": 0,
    }  # fmt: skip
    return Trainer(**{**settings, **options})


def built(**model: Any) -> TinyGPT:
    seed_everything(1, verbose=False)
    return TinyGPT(**{"optimizer": "sgd", **model})


# Evaluation, before and after training.


def evaluate_then_fit(rank: int, world_size: int) -> dict[str, Any]:
    module = built()
    trainer = trainer_of(world_size)
    before = trainer.validate(module, text_data(9, 4), verbose=False)
    predicted = trainer.predict(module, text_data(9, 4))
    shapes = {name: tuple(each.shape) for name, each in module.named_parameters()}
    trainer.fit(module, text_data(12, 4), text_data(9, 4))
    after = trainer.test(module, text_data(9, 4), verbose=False)
    trainer.fit_loop.epoch_loop.max_steps = 5
    trainer.fit(module, text_data(12, 4))
    last = trainer.validate(module, text_data(9, 4), verbose=False)
    return {
        "before": before, "predicted": predicted, "after": after, "last": last,
        "shape": shapes[QKV], "step": trainer.global_step,
    }  # fmt: skip


@pytest.mark.full
def test_evaluations_run_by_the_plan_before_and_after_training() -> None:
    (whole,) = run_ranks(evaluate_then_fit, 1)
    assert whole["shape"] == (48, 16)
    for rank in run_ranks(evaluate_then_fit, 2):
        assert rank["shape"] == (24, 16)
        assert rank["step"] == whole["step"]
        for when in ("before", "after", "last"):
            (one,), (other,) = whole[when], rank[when]
            assert other == pytest.approx(one, rel=1e-5)
        for one, other in zip(whole["predicted"], rank["predicted"], strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


# Whole parameters.


class Looking(Callback):
    """Reads and writes whole parameters, and asks for what a rank does not have."""

    def __init__(self) -> None:
        self.found: dict[str, Any] = {}

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        with gathered_parameters(pl_module, [QKV]) as whole:
            self.found["whole"] = whole[QKV].detach().clone()
        with gathered_parameters(pl_module, ["blocks.0.up.*"], writes=True) as whole:
            torch.nn.init.ones_(whole["blocks.0.up.weight"])
        self.found["written"] = pl_module.get_parameter("blocks.0.up.weight").detach().clone()
        try:
            pl_module.state_dict()
        except CheckpointError as error:
            self.found["refused"] = str(error)


def look(rank: int, world_size: int) -> dict[str, Any]:
    looking = Looking()
    trainer_of(world_size, callbacks=[looking]).fit(built(), text_data(12, 4))
    return looking.found


@pytest.mark.full
def test_whole_parameters_are_read_and_written() -> None:
    for found in run_ranks(look, 2):
        assert torch.equal(found["whole"], built().get_parameter(QKV).detach())
        assert found["written"].shape == (32, 16)
        assert bool((found["written"] == 1).all())
        assert "this rank's part of" in found["refused"]


# Norms and clipping by hooks.


class Clipping(TinyGPT):
    """Clips by torch's own function."""

    def configure_gradient_clipping(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        norm = torch.nn.utils.clip_grad_norm_(self.parameters(), 0.1)
        assert self.trainer is not None
        self.log("norm", norm)
        largest = torch.nn.utils.clip_grad_norm_(self.parameters(), 1e9, norm_type=float("inf"))
        self.log("largest", largest)


class Norms(Callback):
    reads_gradients = False

    def __init__(self) -> None:
        self.norms: list[float] = []

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        if hasattr(trainer.strategy, "gradient_norm"):
            self.norms.append(trainer.strategy.gradient_norm(optimizer))
        else:
            squares = [each.grad.square().sum() for each in pl_module.parameters()]
            self.norms.append(float(sum(squares).sqrt()))


def clip(rank: int, world_size: int) -> tuple[list[float], dict[str, float]]:
    seed_everything(1, verbose=False)
    norms = Norms()
    trainer = trainer_of(world_size, callbacks=[norms])
    trainer.fit(Clipping(optimizer="sgd", ties=True), text_data(12, 4))
    return norms.norms, {name: float(each) for name, each in trainer.callback_metrics.items()}


@pytest.mark.full
def test_norms_are_those_of_the_whole_model() -> None:
    (norms, metrics) = run_ranks(clip, 1)[0]
    ranks = run_ranks(clip, 2)
    for found, logged in ranks:
        assert found == pytest.approx(norms, rel=1e-5)
        assert logged == pytest.approx(metrics, rel=1e-5)
        assert found == ranks[0][0]


# Data.


class Drawn(TinyGPT):
    """Measures with metrics that gather over ranks."""

    def __init__(self) -> None:
        super().__init__(optimizer="sgd")
        self.seen = torchmetrics.SumMetric()
        self.mean = torchmetrics.MeanMetric()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.seen.update(len(batch[0]))
        self.mean.update(self.loss(batch), len(batch[0]))
        self.log("seen", self.seen)
        self.log("mean", self.mean)
        gathered = self.all_gather(torch.tensor(float(batch[0][0, 0])))
        self.log("gathered", float(gathered.numel()))


def measure(rank: int, world_size: int, size: int | None) -> dict[str, float]:
    seed_everything(1, verbose=False)
    trainer = trainer_of(world_size, size=size)
    trainer.validate(Drawn(), text_data(24, 4), verbose=False)
    return {name: float(each) for name, each in trainer.callback_metrics.items()}


@pytest.mark.sample("4-2")
@pytest.mark.parametrize(("ranks", "size"), [(2, 2), (4, 2)])
def test_metrics_count_every_batch_once(ranks: int, size: int) -> None:
    (whole,) = run_ranks(measure, 1, None)
    for found in run_ranks(measure, ranks, size):
        assert found["gathered"] == ranks // size
        assert found["seen"] == whole["seen"] == 24
        assert found["mean"] == pytest.approx(whole["mean"], rel=1e-5)


class OfRank(IterableDataset[Any]):
    """Gives each rank other texts, or fewer."""

    def __init__(self, rank: int, fault: str) -> None:
        self.rank, self.fault = rank, fault

    def __iter__(self) -> Any:
        generator = torch.Generator().manual_seed(self.rank if self.fault == "others" else 0)
        for _ in range(8 - 2 * (self.fault == "fewer") * self.rank):
            text = torch.randint(VOCABULARY, (LENGTH + 1,), generator=generator)
            yield text[:-1], text[1:]


def train_on_others(rank: int, world_size: int, fault: str) -> int:
    trainer = trainer_of(world_size, max_steps=-1, max_epochs=1)
    trainer.fit(built(), DataLoader(OfRank(rank, fault), batch_size=2))
    return trainer.global_step


@pytest.mark.full
def test_batches_that_differ_between_ranks_do_not_train() -> None:
    assert run_ranks(train_on_others, 2, "none") == [4, 4]
    with pytest.raises(RankFailure, match="All ranks of a tensor group have to get the same batch"):
        run_ranks(train_on_others, 2, "others")
    with pytest.raises(RankFailure, match="same number of batches"):
        run_ranks(train_on_others, 2, "fewer")


# Random numbers.


def draw(rank: int, world_size: int, seed: int, activation_checkpointing: Any) -> list[float]:
    seed_everything(seed, verbose=False)
    losses: list[float] = []
    module = TinyGPT(optimizer="sgd", dropout=0.3)
    step = module.training_step

    def noted(batch: Any, batch_idx: int) -> Tensor:
        loss = step(batch, batch_idx)
        losses.append(loss.item())
        return loss

    strategy = TensorParallelStrategy(
        telemetry=False, activation_checkpointing=activation_checkpointing
    )
    module.training_step = noted
    trainer_of(world_size, strategy=strategy, max_steps=6).fit(module, text_data(24, 4))
    return losses[-6:]


@pytest.mark.full
def test_dropout_is_alike_on_all_ranks_and_repeats_by_its_seed() -> None:
    first = run_ranks(draw, 2, 1, None)
    assert first[0] == first[1]
    assert run_ranks(draw, 2, 1, None) == first
    assert run_ranks(draw, 2, 1, "full")[0] == pytest.approx(first[0], rel=1e-5)
    assert run_ranks(draw, 2, 2, None)[0] != first[0]


# Models that are larger than a rank.


class Deferred(LightningModule):
    """Builds its model when the strategy says so."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.depth = depth
        self.largest = 0

    def configure_model(self) -> None:
        if hasattr(self, "gpt"):
            return
        self.gpt = TinyGPT(width=128, heads=4, depth=self.depth)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.gpt.loss(batch)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Held(Callback):
    """Looks at what stands in memory when training begins."""

    def __init__(self) -> None:
        self.values: dict[str, Tensor] = {}
        self.shapes: dict[str, torch.Size] = {}

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.shapes = {name: each.shape for name, each in pl_module.named_parameters()}
        with gathered_parameters(pl_module) as whole:
            self.values = {name: each.detach().clone() for name, each in whole.items()}


def build_late(rank: int, world_size: int) -> tuple[dict[str, Tensor], dict[str, torch.Size]]:
    seed_everything(1, verbose=False)
    held = Held()
    trainer_of(world_size, callbacks=[held]).fit(Deferred(3), text_data(12, 4))
    return held.values, held.shapes


@pytest.mark.full
def test_a_deferred_model_has_the_weights_of_its_seed_and_each_rank_its_shards() -> None:
    seed_everything(1, verbose=False)
    expected = Deferred(3)
    expected.configure_model()
    for values, shapes in run_ranks(build_late, 2):
        assert shapes["gpt.blocks.2.up.weight"] == (256, 128)
        for name, each in expected.named_parameters():
            assert torch.equal(values[name], each.detach()), name


# Memory.


def hold(rank: int, world_size: int) -> tuple[dict[str, int], dict[str, int]]:
    trainer = trainer_of(world_size)
    trainer.fit(TinyGPT(ties=True, width=32), text_data(12, 4))
    strategy: Any = trainer.strategy
    expected = {each.kind: each.predicted_bytes for each in strategy.expected_memory()}
    module = trainer.lightning_module
    held = {"parameters": 0, "optimizer": 0}
    for each in module.parameters():
        assert each.untyped_storage().nbytes() == each.nbytes
        held["parameters"] += each.nbytes
    for state in trainer.optimizers[0].state.values():
        held["optimizer"] += sum(each.nbytes for each in state.values())
    held["gradients"] = held["parameters"]
    return expected, held


@pytest.mark.full
def test_a_rank_holds_its_shards_and_no_more() -> None:
    whole = sum(each.nbytes for each in TinyGPT(ties=True, width=32).parameters())
    for expected, held in run_ranks(hold, 2):
        assert expected == held
        assert held["parameters"] < 0.56 * whole


# Going on in the midst of an epoch.


def stop_and_go_on(rank: int, world_size: int, folder: Path) -> list[bool]:
    def run(steps: int, seed: int, source: Path | None) -> dict[str, Tensor]:
        seed_everything(seed, verbose=False)
        module = TinyGPT(dropout=0.3, groups=True)
        trainer = trainer_of(world_size, max_steps=steps, callbacks=[], max_epochs=-1)
        trainer.fit(module, text_data(24, 4, shuffle=True), ckpt_path=source)
        trainer.save_checkpoint(folder / f"{steps}-{seed}")
        return {name: each.detach().clone() for name, each in module.named_parameters()}

    run(4, 1, None)
    again = run(9, 77, folder / "4-1")
    straight = run(9, 1, None)
    return [torch.equal(each, again[name]) for name, each in straight.items()]


@pytest.mark.full
def test_a_run_goes_on_to_the_bit_with_dropout_and_shuffled_data(tmp_path: Path) -> None:
    for same in run_ranks(stop_and_go_on, 2, tmp_path):
        assert all(same)


# What is refused.


class OwnData(TinyGPT):
    batch_size = 4

    def train_dataloader(self) -> Any:
        return text_data(12, self.batch_size)


class FromIterator(TinyGPT):
    def training_step(self, dataloader_iter: Any) -> Tensor:  # type: ignore[override]
        batch, _, _ = next(dataloader_iter)
        return self.loss(batch)


class GradNorm(TinyGPT):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        from lightning.pytorch.utilities import grad_norm

        self.log_dict(grad_norm(self, 2))


def refuse(rank: int, world_size: int, folder: Path) -> dict[str, str]:
    cases: dict[str, tuple[Any, dict[str, Any]]] = {
        "ModelPruning": (built(), {"callbacks": [ModelPruning("l1_unstructured")]}),
        "OnExceptionCheckpoint": (
            built(),
            {"callbacks": [OnExceptionCheckpoint(folder)], "enable_checkpointing": True},
        ),
        "batch size finder": (OwnData(), {"callbacks": [BatchSizeFinder()]}),
        "sync_batchnorm": (built(), {"sync_batchnorm": True}),
        "dataloader_iter": (FromIterator(), {}),
        "grad_norm": (GradNorm(), {}),
    }  # fmt: skip
    return {name: _refusal(world_size, *each) for name, each in cases.items()}


def _refusal(world_size: int, module: Any, options: dict[str, Any]) -> str:
    try:
        data = None if isinstance(module, OwnData) else text_data(12, 4)
        trainer_of(world_size, **options).fit(module, data)
    except ConfigError as error:
        return str(error)
    return "trained"


@pytest.mark.full
def test_what_cannot_be_is_refused_by_name(tmp_path: Path) -> None:
    for found in run_ranks(refuse, 2, tmp_path):
        assert [name for name, text in found.items() if name not in text] == []


@pytest.mark.full
def test_a_group_stays_on_one_host() -> None:
    strategy = TensorParallelStrategy(size=3, accelerator=None)
    strategy.parallel_devices = [torch.device("cpu")] * 4
    with pytest.raises(LayoutError, match=r"size=3 was asked of hosts with 4 ranks.*Set size=2"):
        strategy.layout_of(8)
    strategy = TensorParallelStrategy(size=8)
    strategy.parallel_devices = [torch.device("cpu")] * 4
    with pytest.raises(LayoutError, match="have to be on one host"):
        strategy.layout_of(8)
    strategy = TensorParallelStrategy()
    strategy.parallel_devices = [torch.device("cpu")] * 4
    assert strategy.layout_of(8).sizes == {"pipeline": 1, "data": 2, "tensor": 4}
