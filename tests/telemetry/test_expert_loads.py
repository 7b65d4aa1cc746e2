"""Rows by expert: counted in forward passes of training, written by the rank, read back."""

from typing import Any
from unittest.mock import patch

import pytest
import torch

from boltmesh.telemetry.reader.sidecar_files import ExpertLoads
from boltmesh.telemetry.snapshot import ExpertLoad
from boltmesh.telemetry.writer.communication import ExpertCounter
from tests.support.expert_models import tokens
from tests.support.expert_runs import train
from tests.support.ranks import run_ranks


def test_counts_are_sums_and_what_came_since(tmp_path: Any) -> None:
    path = tmp_path / "rank-0.telemetry"
    counter = ExpertCounter(path)
    counter.add("moe", torch.tensor([[0, 2], [2, 3]]), 4)
    counter.write()
    counter.add("moe", torch.tensor([1, 1], dtype=torch.int32), 4)
    counter.drop("moe", torch.tensor(2))
    counter.drop("moe", torch.tensor(1))
    counter.write()
    reader = ExpertLoads(path.with_suffix(".experts"))
    found = reader.read()
    assert found == (ExpertLoad("moe", (1, 2, 2, 1), (0, 2, 0, 0), 3),)
    assert reader.read() is found
    ExpertCounter(path, is_new=False)  # of a test after the fit
    assert ExpertLoads(path.with_suffix(".experts")).read() == found
    ExpertCounter(path)  # of another run
    assert ExpertLoads(path.with_suffix(".experts")).read() == ()


def test_what_cannot_be_true_is_not_believed(tmp_path: Any) -> None:
    path = tmp_path / "rank-0.experts"
    path.write_text('[{"module": "moe", "rows": [1, -1], "recent": [0, 0]}]')
    path.chmod(0o600)
    assert ExpertLoads(path).read() == ()
    path.write_text("[")
    assert ExpertLoads(path).read() == ()


def counted(rank: int, world_size: int) -> dict[str, list[int]]:
    """Train two steps with recomputed blocks; return the counts at the end."""
    found: dict[str, list[int]] = {}

    def keep(self: ExpertCounter) -> None:
        found.update({name: rows.tolist() for name, rows in self._rows.items()})

    options = {"stage": 3, "activation_checkpointing": "full", "telemetry": True}
    with patch.object(ExpertCounter, "write", keep):
        train(rank, world_size, "mixtral", steps=2, strategy=options)
    return found


@pytest.mark.ranks
def test_each_row_of_training_is_counted_once() -> None:
    outcomes = run_ranks(counted, 2)
    assert outcomes[0]
    for rank, found in enumerate(outcomes):
        num_tokens = sum(_num_tokens(number, rank) for number in range(2))
        for rows in found.values():
            assert sum(rows) == 2 * num_tokens  # two experts for each token
            assert min(rows) >= 0


def _num_tokens(number: int, rank: int) -> int:
    batch: Any = tokens(number, rank)
    return int(batch.numel())
