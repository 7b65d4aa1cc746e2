"""Metrics that a step counts with while it trains give one process's values, on every rank."""

from typing import Any

import pytest
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from typing_extensions import override

from boltmesh.strategies.pipeline.axis import BUBBLE
from boltmesh.strategies.pipeline_parallel import PipelineParallelStrategy
from tests.strategies.pipeline.test_evaluation import assert_same, trainer_of
from tests.support.judged import Counting, points
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.ranks

PIPELINES: tuple[dict[str, Any], ...] = (
    {"schedule": "1f1b", "microbatches": 3},
    {"schedule": "zbv", "microbatches": 4},
    {"schedule": "gpipe", "microbatches": 1},
)


def logged(trainer: Trainer) -> dict[str, Any]:
    """What the module logged, without what the strategy does."""
    return {name: each for name, each in trainer.callback_metrics.items() if name != BUBBLE}


class Steps(Callback):
    """Keeps what is known after every batch."""

    def __init__(self) -> None:
        self.seen: list[dict[str, Any]] = []

    @override
    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        self.seen.append(logged(trainer))


def train(strategy: Any, devices: int) -> dict[str, Any]:
    """Two epochs of a batch that divides, one that does not, and one of two rows."""
    seed_everything(3, verbose=False)
    module, steps = Counting(), Steps()
    trainer = trainer_of(
        strategy, devices, [steps], max_epochs=2, limit_val_batches=0, log_every_n_steps=1
    )
    trainer.fit(module, points(26, 12, 1))
    return {
        "steps": steps.seen,
        "epochs": module.by_epoch,
        "end": logged(trainer),
        "state": module.accuracy.metric_state,
    }


def one_process(rank: int, world_size: int) -> dict[str, Any]:
    return train("auto", 1)


def pipelines(rank: int, world_size: int) -> list[dict[str, Any]]:
    return [
        train(PipelineParallelStrategy(telemetry=False, **options), world_size)
        for options in PIPELINES
    ]


@pytest.mark.full
def test_every_rank_counts_what_one_process_counts() -> None:
    wanted = run_ranks(one_process, 1)[0]
    assert len(wanted["steps"]) == 6
    assert wanted["epochs"][1]["rows"] == 26
    for rank, traces in enumerate(run_ranks(pipelines, 2)):
        for options, found in zip(PIPELINES, traces, strict=True):
            assert_same(found, wanted, f"rank {rank} {options['schedule']}")
