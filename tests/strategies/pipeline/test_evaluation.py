"""Validation, testing and prediction on every rank of a pipeline give what one process gives."""

import math
import warnings
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from torch import Tensor
from typing_extensions import override

from boltmesh.strategies.pipeline_parallel import PipelineParallelStrategy
from tests.support.judged import MODELS, Judged, Noisy, NoisyByOwn, points
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.ranks

PIPELINES: tuple[dict[str, Any], ...] = (
    {"schedule": "1f1b", "microbatches": 3},
    {"schedule": "interleaved_1f1b", "microbatches": 4, "stages_per_rank": 2},
    {"schedule": "zbv", "microbatches": 4},
)


class Outputs(Callback):
    """Keeps what the steps return."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    @override
    def on_validation_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, *args: Any
    ) -> None:
        self.seen.append(outputs)

    @override
    def on_test_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, *args: Any
    ) -> None:
        self.seen.append(outputs)


def trainer_of(strategy: Any, devices: int, callbacks: list[Callback], **options: Any) -> Trainer:
    warnings.filterwarnings("ignore", module="lightning")
    return Trainer(
        **{
            "accelerator": "cpu",
            "strategy": strategy,
            "devices": devices,
            "logger": False,
            "enable_checkpointing": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "callbacks": callbacks,
            **options,
        }
    )


def evaluate(name: str, strategy: Any, devices: int) -> dict[str, Any]:
    """Two validations of two loaders, a test, and predictions, all with a smaller last batch."""
    seed_everything(3, verbose=False)
    module = MODELS[name]()
    outputs = Outputs()
    trainer = trainer_of(strategy, devices, [outputs])
    found: dict[str, Any] = {}
    for time in range(2):
        trainer.validate(module, [points(19, 8, 1), points(9, 7, 2)], verbose=False)
        found |= {f"{time} {key}": value for key, value in trainer.callback_metrics.items()}
    trainer.test(module, points(10, 8, 3), verbose=False)
    found |= {f"test {key}": value for key, value in trainer.callback_metrics.items()}
    found["predictions"] = trainer.predict(module, points(11, 8, 4))
    found["outputs"] = outputs.seen
    return found


def one_process(rank: int, world_size: int) -> dict[str, Any]:
    return {name: evaluate(name, "auto", 1) for name in MODELS}


def pipelines(
    rank: int, world_size: int, options: dict[str, Any], names: list[str]
) -> dict[str, Any]:
    return {
        name: evaluate(
            name, PipelineParallelStrategy(telemetry=False, **options), devices=world_size
        )
        for name in names
    }


def assert_same(got: Any, wanted: Any, where: str) -> None:
    """Equal in structure and kind, and numbers within 1e-6."""
    if isinstance(wanted, Tensor):
        torch.testing.assert_close(got, wanted, rtol=1e-6, atol=1e-6, msg=lambda m: f"{where}: {m}")
    elif isinstance(wanted, dict):
        assert list(got) == list(wanted), where
        for key, each in wanted.items():
            assert_same(got[key], each, f"{where} {key}")
    elif isinstance(wanted, list | tuple):
        assert len(got) == len(wanted), where
        for number, (one, other) in enumerate(zip(got, wanted, strict=True)):
            assert_same(one, other, f"{where} {number}")
    else:
        assert got == wanted, where


@pytest.fixture(scope="module")
def reference() -> dict[str, Any]:
    found: dict[str, Any] = run_ranks(one_process, 1)[0]
    return found


SOME_FULL = [
    each if each["schedule"] == "zbv" else pytest.param(each, marks=pytest.mark.full)
    for each in PIPELINES
]
"""Of a stage that is first and last at once, and whose devices hold two."""


SOME_MODELS = ["Judged", "FlatByTime", "Contrastive"]


@pytest.mark.full
@pytest.mark.slow(15)
@pytest.mark.parametrize(
    "names",
    [
        pytest.param(SOME_MODELS, id="some"),
        pytest.param(
            [name for name in MODELS if name not in SOME_MODELS],
            id="others",
            marks=pytest.mark.full,
        ),
    ],
)
@pytest.mark.parametrize("options", SOME_FULL, ids=lambda each: each["schedule"])
def test_every_rank_finds_what_one_process_finds(
    reference: dict[str, Any], options: dict[str, Any], names: list[str]
) -> None:
    for rank, found in enumerate(run_ranks(pipelines, 2, options, names)):
        for name in names:
            wanted = reference[name]
            assert len(wanted["outputs"]) == 2 * 5 + 2
            assert not math.isnan(wanted["1 spread/dataloader_idx_0"])
            assert_same(found[name], wanted, f"rank {rank} {name}")


class Writer(Callback):
    """Reads predictions that nobody returns."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    @override
    def on_predict_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, *args: Any
    ) -> None:
        self.seen.append(outputs)


def predict(rank: int, world_size: int) -> list[Any]:
    seed_everything(3, verbose=False)
    writer = Writer()
    strategy = (
        PipelineParallelStrategy(telemetry=False, microbatches=3) if world_size > 1 else "auto"
    )
    trainer = trainer_of(strategy, world_size, [writer])
    assert trainer.predict(Judged(), points(11, 8), return_predictions=False) is None
    return writer.seen


def test_callbacks_read_predictions_on_every_rank() -> None:
    wanted = run_ranks(predict, 1)[0]
    assert len(wanted) == 2
    for rank, found in enumerate(run_ranks(predict, 2)):
        assert_same(found, wanted, f"rank {rank}")


def denoise(rank: int, world_size: int) -> list[dict[str, Any]]:
    found = []
    for options in PIPELINES:
        seed_everything(3, verbose=False)
        strategy = PipelineParallelStrategy(telemetry=False, **options)
        trainer = trainer_of(strategy, world_size, [])
        trainer.validate(Noisy(), points(16, 8), verbose=False)
        found.append(dict(trainer.callback_metrics))
    return found


@pytest.mark.full
def test_noise_behind_the_layers_is_the_one_before_them() -> None:
    ranks = run_ranks(denoise, 2)
    for found in ranks:
        assert [each["left"].item() for each in found] == [0.0] * len(PIPELINES)
        assert all(each["noise"] > 0.5 for each in found)
    assert ranks[0] == ranks[1]


def denoise_by_own(rank: int, world_size: int) -> list[Any]:
    found = []
    for options in PIPELINES[:2] if world_size > 1 else [None]:
        seed_everything(3, verbose=False)
        strategy = (
            "auto" if options is None else PipelineParallelStrategy(telemetry=False, **options)
        )
        module = NoisyByOwn()
        trainer = trainer_of(strategy, world_size, [])
        trainer.validate(module, points(16, 8), verbose=False)
        seen = {key: float(each) for key, each in trainer.callback_metrics.items()}
        found.append((seen, [torch.rand((), generator=module.generator).item()]))
    return found


def test_a_generator_of_the_module_draws_once_for_a_batch() -> None:
    """Two batches; the interleaved schedule begins the step twice on each rank."""
    wanted = run_ranks(denoise_by_own, 1)[0]
    assert wanted[0][0]["left"] == 0.0
    assert wanted[0][0]["noise"] > 0.5
    for found in run_ranks(denoise_by_own, 2):
        assert found == wanted * 2
