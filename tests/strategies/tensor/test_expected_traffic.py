"""What a step is expected to move is the same, however it was counted."""

from typing import Any

import pytest
from lightning.pytorch import Trainer, seed_everything

from boltmesh.strategies.pipeline.expected_traffic import StageRehearsal
from boltmesh.strategies.registry import build_strategy
from boltmesh.strategies.tensor.axis import TensorAxis
from tests.support.gpts import TinyGPT, text_data
from tests.support.ranks import run_ranks


def _counted(rank: int, world_size: int, name: str, arguments: dict[str, Any]) -> list[Any]:
    """Return what a batch moves as it was counted, and as counted on fake tensors throughout."""
    seen: list[int] = []
    found: list[Any] = []
    distinct, count = StageRehearsal.distinct, TensorAxis._count

    def noted(*args: Any) -> None:
        seen.append(1)
        count(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TensorAxis, "_count", noted)
        for is_short in (True, False):
            if not is_short:
                patch.setattr(StageRehearsal, "distinct", lambda self: [(self, 1)])
                patch.setattr(TensorAxis, "_was_counted", False)
            else:
                patch.setattr(StageRehearsal, "distinct", distinct)
            seed_everything(1)
            strategy = build_strategy(name, **{"telemetry": True, **arguments})
            trainer = Trainer(
                strategy=strategy,
                accelerator="cpu",
                devices=world_size,
                max_steps=1,
                logger=False,
                enable_progress_bar=False,
                enable_model_summary=False,
                enable_checkpointing=False,
            )
            trainer.fit(TinyGPT(dropout=0.1), text_data(8, 8))
            axis = next(each for each in strategy.axes if isinstance(each, TensorAxis))
            found.append(dict(axis._counted or {}))
    return [*found, len(seen)]


@pytest.mark.sample("arguments1")
@pytest.mark.parametrize("arguments", [{}, {"sequence_parallel": True}])
def test_a_proof_counts_what_a_step_moves(arguments: dict[str, Any]) -> None:
    for short, whole, counts in run_ranks(_counted, 2, "bolt_tensor", {"size": 2, **arguments}):
        assert short == whole
        assert sum(each.calls for each in short.values()) > 8
        assert counts == 1  # the second time


def test_a_run_without_telemetry_counts_nothing() -> None:
    arguments = {"size": 2, "telemetry": False}
    assert run_ranks(_counted, 2, "bolt_tensor", arguments) == [[{}, {}, 0]] * 2


@pytest.mark.full
def test_microbatches_that_run_alike_are_counted_once() -> None:
    arguments = {"pipeline": 2, "tensor": 2, "microbatches": 4}
    for short, whole, _ in run_ranks(_counted, 4, "bolt_3d", arguments):
        assert short == whole
        assert short


@pytest.mark.full
def test_microbatches_of_one_row_are_counted_as_those_of_two() -> None:
    def bytes_of(microbatches: int) -> dict[str, int]:
        arguments = {"pipeline": 2, "tensor": 2, "microbatches": microbatches}
        counted = run_ranks(_counted, 4, "bolt_3d", arguments)[0][0]
        return {key: each.num_bytes for key, each in counted.items()}

    assert bytes_of(8) == bytes_of(4) != {}
