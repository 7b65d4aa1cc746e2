"""Whatever run follows on whatever run, a pipeline tells the numbers of one process."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import Callback, EarlyStopping, GradientAccumulationScheduler
from lightning.pytorch.profilers import PyTorchProfiler
from lightning.pytorch.tuner.tuning import Tuner
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset
from typing_extensions import override

from boltmesh.errors import BoltMeshError
from boltmesh.strategies.registry import build_strategy
from tests.support.pipelines import pipeline, quiet_trainer
from tests.support.ranks import RankFailure, run_ranks
from tests.support.stack import LENGTH, VOCABULARY, Stack, token_data

pytestmark = pytest.mark.ranks


class Plain(Stack):
    """Steps with as few and as many arguments as Lightning allows."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.lr = 0.01
        self.losses: list[float] = []

    def training_step(self, batch: Any) -> Tensor:  # type: ignore[override]
        loss = self.loss(batch)
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int) -> None:  # type: ignore[override]
        self.log("val_loss", self.loss(batch) * (1 + dataloader_idx))

    def test_step(self, batch: Any) -> None:  # type: ignore[override]
        self.log("test_loss", self.loss(batch))

    def predict_step(self, batch: Any) -> Tensor:  # type: ignore[override]
        return self(batch[0])

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(outputs["loss"].item())

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=self.lr)


def numbers(trainer: Trainer) -> dict[str, float]:
    found = {key: float(value) for key, value in trainer.callback_metrics.items()}
    found.pop("boltmesh/bubble_ratio", None)  # one process has none
    return found


def pair(count: int) -> list[Any]:
    return [token_data(count, 8), token_data(count + 3, 8)]


class Wakes(Callback):
    """Sees that a run's own recorder is told, and that failures are looked for."""

    def __init__(self) -> None:
        self.recorders: list[Any] = []

    @override
    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        strategy: Any = trainer.strategy
        staged = strategy.pipeline_axis.staged
        assert staged.context.recorder is strategy.recorder
        if staged.context.recorder not in self.recorders:
            self.recorders.append(staged.context.recorder)
        thread = staged.executor._board._monitor._thread
        assert thread is not None
        assert thread.is_alive()


def one_after_the_other(rank: int, world_size: int) -> list[Any]:
    seed_everything(1, verbose=False)
    told: list[Any] = []
    strategy = pipeline(telemetry=True) if world_size > 1 else "auto"
    wakes = Wakes()
    callbacks = [wakes] if world_size > 1 else []
    module = Plain(depth=4, ties=True)
    trainer = quiet_trainer(world_size, strategy, callbacks=callbacks)
    trainer.fit(module, token_data(22, 8), pair(11))
    told.append(numbers(trainer))
    trainer.validate(module, pair(13), verbose=False)
    told.append(numbers(trainer))
    trainer.fit_loop.max_epochs = 2
    trainer.fit(module, token_data(22, 8), pair(11))
    told.append(numbers(trainer))
    trainer.test(module, token_data(9, 4), verbose=False)
    told.append(numbers(trainer))
    predicted: Any = trainer.predict(module, token_data(9, 4))
    told.append(torch.cat(predicted).tolist())
    trainer.fit_loop.max_epochs = 3
    trainer.fit(module, token_data(22, 8), pair(11))
    told.append(numbers(trainer))
    # Another Trainer, another strategy: the model is divided already.
    strategy = pipeline() if world_size > 1 else "auto"
    trainer = quiet_trainer(world_size, strategy)
    trainer.test(module, token_data(19, 16), verbose=False)
    told.append(numbers(trainer))
    trainer.fit(module, token_data(22, 8))
    told.append(numbers(trainer))
    # Another model, the strategy of before.
    seed_everything(1, verbose=False)
    trainer.validate(Plain(depth=3), pair(13), verbose=False)
    told.append(numbers(trainer))
    if world_size > 1:
        assert len(wakes.recorders) == 3
    return [*told, module.losses]


@pytest.mark.full
def test_runs_follow_each_other_in_any_order() -> None:
    reference = run_ranks(one_after_the_other, 1)[0]
    for told in run_ranks(one_after_the_other, 2):
        assert len(told) == len(reference) == 10
        for found, wanted in zip(told, reference, strict=True):
            torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


def with_tools(rank: int, world_size: int) -> list[Any]:
    told: list[Any] = []

    def begin() -> tuple[Plain, Any]:
        seed_everything(1, verbose=False)
        return Plain(depth=4), pipeline() if world_size > 1 else "auto"

    module, strategy = begin()
    trainer = quiet_trainer(world_size, strategy, max_epochs=3)
    finder = Tuner(trainer).lr_find(module, token_data(22, 8), num_training=8, min_lr=1e-4)
    told.append((finder.results["lr"], finder.results["loss"], module.lr))
    trainer.fit(module, token_data(22, 8), pair(11))
    told.append((module.losses[8:], numbers(trainer)))

    module, strategy = begin()
    # A "patience" that the training loss of an epoch uses up, and groups that do not divide.
    stopping = EarlyStopping("train_loss_epoch", min_delta=0.3, patience=1)
    trainer = quiet_trainer(
        world_size, strategy, max_epochs=30, callbacks=[stopping], accumulate_grad_batches=2
    )
    trainer.fit(module, token_data(22, 8))
    told.append((trainer.current_epoch, stopping.stopped_epoch, module.losses))

    module, strategy = begin()
    scheduler = GradientAccumulationScheduler({0: 2, 1: 3})
    trainer = quiet_trainer(world_size, strategy, max_epochs=2, callbacks=[scheduler])
    trainer.fit(module, token_data(36, 8))  # 5 batches: the last group is short in both epochs
    told.append((trainer.global_step, module.losses))
    return told


@pytest.mark.full
def test_lightnings_tools_find_what_they_find_in_one_process() -> None:
    reference = run_ranks(with_tools, 1)[0]
    assert 1 <= reference[2][0] < 30
    assert reference[3][0] == 3 + 2
    for told in run_ranks(with_tools, 2):
        for found, wanted in zip(told, reference, strict=True):
            torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-4)


def looked_at(rank: int, world_size: int, name: str, folder: Path) -> list[float]:
    """Train with a summary that has the sizes of all layers, and with torch's profiler."""
    seed_everything(1, verbose=False)
    module = Plain(depth=4)
    module.example_input_array = torch.zeros(2, LENGTH, dtype=torch.long)
    strategy = build_strategy(name, telemetry=False) if world_size > 1 else "auto"
    profiler = PyTorchProfiler(folder / name, str(world_size))
    trainer = quiet_trainer(world_size, strategy, enable_model_summary=True, profiler=profiler)
    trainer.fit(module, token_data(48, 8))
    return module.losses


@pytest.mark.full
@pytest.mark.parametrize("name", ["bolt_pipeline", "bolt_tensor", "bolt_zero1", "bolt_zero3_cpu"])
def test_a_summary_of_an_example_and_a_profiler_change_nothing(tmp_path: Path, name: str) -> None:
    reference = run_ranks(looked_at, 1, name, tmp_path)[0]
    for losses in run_ranks(looked_at, 2, name, tmp_path):
        torch.testing.assert_close(losses, reference, rtol=1e-4, atol=1e-5)


class Expected(Callback):
    """Keeps the traffic that is expected of a step, which is empty once telemetry is closed."""

    def __init__(self) -> None:
        self.traffic: list[tuple[str, float, float | None]] = []

    def on_train_end(self, trainer: Any, pl_module: LightningModule) -> None:
        expected = trainer.strategy.expected_traffic()
        self.traffic = [(each.operator, each.payload_bytes, each.calls) for each in expected]


def expect(rank: int, world_size: int) -> list[tuple[str, float, float | None]]:
    expected = Expected()
    options = {"accumulate_grad_batches": 2, "callbacks": [expected]}
    trainer = quiet_trainer(world_size, pipeline(telemetry=True), **options)
    module = Plain(depth=4)
    trainer.validate(module, pair(13), verbose=False)
    trainer.fit(module, token_data(32, 8))
    return expected.traffic


@pytest.mark.full
def test_what_training_moves_is_expected_after_another_run_too() -> None:
    for told in run_ranks(expect, 2):
        # Two batches of four microbatches, each of 2 texts of 5 tokens and 7 numbers in fp32, and
        # as much of their gradients on the way back.
        boundaries = [(operator, 2 * 4 * 2 * 5 * 7 * 4.0, 8.0) for operator in ("send", "recv")]
        assert told[:2] == boundaries
        # What the last stage tells rides on the agreements.
        assert {operator for operator, _, _ in told[2:]} == {"send", "recv"}


# What a batch may be.


@dataclasses.dataclass
class Texts:
    """A batch with things of many kinds."""

    tokens: dict[str, Tensor]
    names: list[str]
    pieces: list[Tensor]
    """One for each text."""
    weight: float
    nothing: None = None


class Nested(Plain):
    """Reads all of a nested batch, whose texts have another length in each batch."""

    def loss(self, batch: Any) -> Tensor:
        tokens, targets = batch.tokens["inputs"], batch.tokens["targets"]
        assert len(batch.names) == len(batch.pieces) == len(tokens)
        assert batch.nothing is None
        firsts = torch.stack([each[0] for each in batch.pieces])
        assert torch.equal(firsts, tokens[:, 0])
        assert [int(name) for name in batch.names] == firsts.tolist()
        logits = self(tokens).flatten(0, 1)
        return functional.cross_entropy(logits, targets.flatten()) * batch.weight

    def predict_step(self, batch: Any) -> Tensor:  # type: ignore[override]
        return self(batch.tokens["inputs"])


def nested(samples: list[Any]) -> Texts:
    length = 2 + int(samples[0][0][0]) % 4
    inputs, targets = (torch.stack([each[i][:length] for each in samples]) for i in (0, 1))
    return Texts(
        {"inputs": inputs, "targets": targets},
        [str(int(each[0])) for each in inputs],
        [each[0] for each in samples],
        weight=0.5,
    )


def fit_nested(rank: int, world_size: int) -> list[float]:
    seed_everything(1, verbose=False)
    module = Nested(depth=4)
    trainer = quiet_trainer(
        world_size,
        pipeline() if world_size > 1 else "auto",
        max_epochs=2,
        accumulate_grad_batches=2,
    )
    loader = DataLoader(token_data(35, 8).dataset, batch_size=8, collate_fn=nested)
    trainer.fit(module, loader)
    return module.losses


@pytest.mark.full
def test_nested_batches_of_changing_lengths_train_as_in_one_process() -> None:
    reference = run_ranks(fit_nested, 1)[0]
    assert len(reference) == 10
    for losses in run_ranks(fit_nested, 2):
        assert losses == pytest.approx(reference, rel=1e-4)


# What is refused.


class Drawing(Plain):
    def training_step(self, dataloader_iter: Any) -> Tensor:  # type: ignore[override]
        return self.loss(next(dataloader_iter)[0])


class Late(Plain):
    """Uses a parameter on the first stage in validation alone."""

    def __init__(self) -> None:
        super().__init__(depth=4)
        self.shift = nn.Parameter(torch.zeros(VOCABULARY))

    def validation_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        x = self.embedding(batch[0]) + self.shift.sum()
        for block in self.blocks:
            x = block(x)
        self.log("val_loss", self.head(self.norm(x)).mean())


class Differing(LightningModule):
    """Has another layer on each rank."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(2, 2) for _ in range(4)))
        self.add_module(f"extra{rank}", nn.Linear(2, 2))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.layers(batch[0]).mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Sized(Plain):
    batch_size = 8

    def train_dataloader(self) -> DataLoader[Any]:
        return token_data(16, self.batch_size)


def refused(rank: int, world_size: int) -> dict[str, str]:
    def attempt(name: str, run: Any) -> None:
        try:
            run()
        except (BoltMeshError, ValueError) as error:
            told[name] = str(error)

    told: dict[str, str] = {}
    data = token_data(16, 8)
    attempt("iterator", lambda: quiet_trainer(2, pipeline()).fit(Drawing(depth=4), data))
    trainer = quiet_trainer(2, pipeline())
    attempt("batch size", lambda: Tuner(trainer).scale_batch_size(Sized(depth=4)))
    attempt("late", lambda: quiet_trainer(2, pipeline()).fit(Late(), data, data))
    module = Plain(depth=4)
    quiet_trainer(2, pipeline()).fit(module, data)
    zbv = pipeline(schedule="zbv")
    attempt("other stages", lambda: quiet_trainer(2, zbv).test(module, data, verbose=False))
    copy = Plain(depth=4)
    for name, each in module.named_parameters():
        copy.get_parameter(name).data = each.data
    attempt("a copy", lambda: quiet_trainer(2, pipeline()).fit(copy, data))
    return told


SAID = {
    "iterator": "Drawing.training_step takes a dataloader_iter",
    "batch size": "The batch size finder tries sizes until memory runs out",
    "late": "stage 0 uses 'shift' in this step",
    "other stages": "Plain was divided into 2 stages on 2 ranks by an earlier run, and this one "
    "has 4 stages on 2",
    "a copy": "Plain was part of a pipeline before, and",
}


@pytest.mark.full
def test_what_a_pipeline_cannot_run_is_refused_by_name() -> None:
    ranks = run_ranks(refused, 2)
    for name, text in SAID.items():
        assert any(text in told.get(name, "") for told in ranks), (name, ranks)
    with pytest.raises(RankFailure, match=r"has other parameters on rank 1 .*extra0.*on one of"):
        run_ranks(differ, 2)


def differ(rank: int, world_size: int) -> None:
    data = TensorDataset(torch.zeros(8, 2))
    quiet_trainer(2, pipeline()).fit(Differing(rank), DataLoader(data, batch_size=8))
