"""Attributes are replaced for a while, and are afterwards what they were."""

import pytest
import torch
from torch import nn

from boltmesh.strategies.patch import Changes, members_replaced, patched


def test_attributes_are_afterwards_those_of_before_or_none() -> None:
    layer = nn.Linear(2, 2)
    layer.note = "own"  # type: ignore[assignment]
    with patched(layer, note="other", forward=len):
        assert layer.note == "other"
        assert layer([1, 2, 3]) == 3
    assert layer.note == "own"
    assert "forward" not in vars(layer)
    with pytest.raises(TypeError), patched(layer, forward=len):
        layer(3)
    assert "forward" not in vars(layer)


def test_a_tensor_stands_for_a_parameter_without_being_one() -> None:
    layer = nn.Linear(2, 2, bias=False)
    weight = layer.weight
    with patched(layer, weight=torch.zeros(2, 2)):
        assert not layer(torch.ones(1, 2)).any()
        assert dict(layer.named_parameters()) == {"weight": weight}
    assert layer.weight is weight


def test_changes_are_undone_in_the_reverse_order() -> None:
    layer, changes = nn.Identity(), Changes()
    for factor in (2, 3):
        changes.wrap(layer, lambda forward, value, factor=factor: forward(value) * factor)
    assert layer(1) == 6
    assert changes.modules() == {layer}
    assert changes.originals_of(layer)[0][:2] == (layer, "forward")
    changes.undo()
    assert layer(1) == 1
    assert "forward" not in vars(layer)
    assert not changes.modules()


def test_other_members_are_registered() -> None:
    layer, other = nn.Linear(2, 2), nn.Parameter(torch.zeros(2))
    bias = layer.bias
    with members_replaced([(layer, "bias", other)]):
        assert dict(layer.named_parameters())["bias"] is other
    assert layer.bias is bias
