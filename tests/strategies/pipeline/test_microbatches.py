"""Batches of any nesting are cut along their rows."""

import dataclasses
from collections import namedtuple
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from boltmesh.errors import ConfigError
from boltmesh.strategies.pipeline.microbatches import cut, even_sizes, num_rows

Pair = namedtuple("Pair", ["inputs", "targets"])


@dataclasses.dataclass
class Sample:
    image: Tensor
    names: list[str]
    scale: float = 1.0


def test_nested_batches_are_cut_along_their_rows() -> None:
    batch = {
        "pair": Pair(torch.arange(10).view(5, 2), torch.arange(5)),
        "names": ["a", "b", "c", "d", "e"],
        "parts": [torch.arange(5), None, 3],
        "sample": Sample(torch.arange(5.0), ["v", "w", "x", "y", "z"], scale=2.0),
        "temperature": torch.tensor(0.5),
        "array": np.arange(5),
        "title": "one for all",
    }
    assert num_rows(batch) == 5
    first, second = cut(batch, [3, 2])
    assert first["pair"].inputs.tolist() == [[0, 1], [2, 3], [4, 5]]
    assert isinstance(second["pair"], Pair)
    assert second["pair"].targets.tolist() == [3, 4]
    assert second["names"] == ["d", "e"]
    assert second["parts"][0].tolist() == [3, 4]
    assert second["parts"][1:] == [None, 3]
    assert (second["sample"].names, second["sample"].scale) == (["y", "z"], 2.0)
    assert second["temperature"].item() == 0.5
    assert second["array"].tolist() == [3, 4]
    assert second["title"] == "one for all"


def test_microbatches_are_views() -> None:
    batch = [torch.zeros(4, 2), torch.zeros(4)]
    _, second = cut(batch, [2, 2])
    batch[0][3, 1] = 7
    assert second[0][1, 1] == 7


def test_a_pair_of_tensors_in_a_batch_of_two_is_no_list_of_samples() -> None:
    first, second = cut((torch.arange(2), torch.arange(2)), [1, 1])
    assert [each.tolist() for each in (*first, *second)] == [[0], [0], [1], [1]]


def test_strings_alone_have_rows() -> None:
    assert num_rows({"text": ["a", "b", "c"]}) == 3


@pytest.mark.parametrize(
    ("rows", "wanted", "sizes"),
    [(8, 4, [2, 2, 2, 2]), (10, 4, [3, 3, 2, 2]), (3, 4, [1, 1, 1]), (1, 1, [1])],
)
def test_sizes_differ_by_at_most_one(rows: int, wanted: int, sizes: list[int]) -> None:
    assert even_sizes(rows, wanted) == sizes


@pytest.mark.parametrize(("rows", "sizes"), [(8, [2, 2, 2, 2]), (5, [3, 2]), (3, [3]), (1, [1])])
def test_a_microbatch_has_enough_rows_where_the_batch_has(rows: int, sizes: list[int]) -> None:
    assert even_sizes(rows, 4, fewest_rows=2) == sizes


@pytest.mark.parametrize(
    ("batch", "said"),
    [
        ([torch.zeros(4), torch.zeros(3)], r"batch\[0\] has 4 rows and batch\[1\] has 3"),
        ({"x": torch.tensor(1.0)}, "cannot be cut into microbatches: it holds no tensor"),
        (object(), "A batch of object cannot be cut"),
    ],
)
def test_what_cannot_be_cut_is_refused(batch: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        num_rows(batch)
