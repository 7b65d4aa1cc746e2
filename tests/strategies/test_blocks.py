"""Which modules are the repeated blocks of a model."""

from torch import nn

from boltmesh.strategies.blocks import find_blocks


class Layer(nn.Module):
    def __init__(self, *, has_bias: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        if has_bias:
            self.position_bias = nn.Embedding(3, 4)

    def forward(self) -> None:
        raise NotImplementedError


class Stack(nn.Module):
    def __init__(self, *biases: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(has_bias=each) for each in biases)

    def forward(self) -> None:
        raise NotImplementedError


def test_two_blocks_are_repeated_where_the_first_has_one_parameter_more() -> None:
    assert list(find_blocks(Stack(True, False))) == ["layers.0", "layers.1"]
    assert list(find_blocks(Stack(True, False, False))) == ["layers.0", "layers.1", "layers.2"]
    assert find_blocks(Stack(True)) == {}
