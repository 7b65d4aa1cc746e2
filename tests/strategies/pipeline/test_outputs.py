"""What a step returns for microbatches is put together to what it returns for the batch."""

from typing import Any

import torch

from boltmesh.strategies.pipeline.merge import merge


def test_rows_are_joined_and_scalars_are_averaged() -> None:
    parts: list[Any] = [
        {"logits": torch.zeros(3, 2), "loss": torch.tensor(1.0), "names": ["a", "b", "c"], "n": 2},
        {"logits": torch.ones(1, 2), "loss": torch.tensor(5.0), "names": ["d"], "n": 6},
    ]
    merged = merge(parts, [3, 1], [3.0, 1.0])
    assert merged["logits"].shape == (4, 2)
    assert merged["logits"][3].tolist() == [1.0, 1.0]
    assert merged["loss"].item() == 2.0
    assert merged["names"] == ["a", "b", "c", "d"]
    assert merged["n"] == 8


def test_what_counts_nothing_is_left_out() -> None:
    parts = [torch.tensor(3.0), torch.tensor(float("nan"))]
    assert merge(parts, [2, 2], [4.0, 0.0]).item() == 3.0


def test_counts_add_up_and_nested_tuples_keep_their_form() -> None:
    parts = [(torch.tensor(2), None, (torch.zeros(2),)), (torch.tensor(3), None, (torch.ones(2),))]
    count, nothing, (rows,) = merge(parts, [2, 2], [1.0, 1.0])
    assert (count.item(), nothing, rows.tolist()) == (5, None, [0.0, 0.0, 1.0, 1.0])


def test_other_tensors_stay_a_list() -> None:
    parts = [torch.zeros(7), torch.zeros(5)]
    assert [len(each) for each in merge(parts, [2, 2], [1.0, 1.0])] == [7, 5]
