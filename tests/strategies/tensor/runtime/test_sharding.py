"""Shards of parameters: cut, joined, and put in place."""

from itertools import product

import pytest
import torch
from torch import nn

from boltmesh.errors import LayoutError
from boltmesh.strategies.tensor.plan import Section, ShardedParameter
from boltmesh.strategies.tensor.runtime.param_swap import join_shards, shard_of, shard_parameters


def _entry(name: str, shape: tuple[int, ...], dim: int, *sections: Section) -> ShardedParameter:
    return ShardedParameter(name, (name,), shape, dim, sections, "column", 0)


CASES = [
    (Section(1, 12, 1),),
    (Section(1, 4, 3),),
    (Section(3, 4, 2),),
    (Section(1, 4, 3), Section(1, 4, 1), Section(2, 4, 1)),
    (Section(1, 7, 1),),  # a vocabulary that does not divide
    (Section(1, 3, 1),),  # and one of which the last rank has nothing
]


@pytest.mark.parametrize(("sections", "dim", "size"), list(product(CASES, [0, 1], [1, 2, 4])))
def test_shards_are_contiguous_and_join_to_the_whole(
    sections: tuple[Section, ...], dim: int, size: int
) -> None:
    length = sum(each.length for each in sections)
    shape = (length, 5) if dim == 0 else (5, length)
    whole = torch.randn(shape)
    entry = _entry("w", shape, dim, *sections)
    shards = [shard_of(whole, entry, size=size, rank=rank) for rank in range(size)]
    assert all(each.is_contiguous() for each in shards)
    assert [tuple(each.shape) for each in shards] == [
        entry.local_shape(size, rank) for rank in range(size)
    ]
    assert torch.equal(join_shards(shards, entry), whole)
    assert not any(each.data_ptr() == whole.data_ptr() for each in shards)


def test_heads_of_a_fused_projection_stay_together() -> None:
    whole = torch.arange(12)[:, None]
    entry = _entry("w", (12, 1), 0, *(Section(1, 2, 2),) * 3)
    assert shard_of(whole, entry, size=2, rank=1)[:, 0].tolist() == [2, 3, 6, 7, 10, 11]


def test_parameters_stay_the_objects_they_are_and_ties_stay_ties() -> None:
    table, head = nn.Embedding(6, 4), nn.Linear(4, 6, bias=False)
    head.weight = listed = table.weight
    model = nn.Sequential(table, head)
    entry = _entry("0.weight", (6, 4), 0, Section(1, 6, 1))
    before = table.weight.detach().clone()
    shard_parameters(model, [entry], size=2, rank=1)
    assert listed is table.weight is head.weight
    assert torch.equal(head.weight, before[3:])
    shard_parameters(model, [entry], size=2, rank=1)
    assert torch.equal(head.weight, before[3:]), "a shard is left alone"


def test_parameters_of_another_model_are_refused_by_name() -> None:
    model = nn.Linear(4, 6)
    with pytest.raises(LayoutError, match=r"'other', and the model has no such parameter"):
        shard_parameters(model, [_entry("other", (6, 4), 0, Section(1, 6, 1))], size=2, rank=0)
    with pytest.raises(LayoutError, match=r"shape \(8, 4\), and the model has one of \(6, 4\)"):
        shard_parameters(model, [_entry("weight", (8, 4), 0, Section(1, 8, 1))], size=2, rank=0)
