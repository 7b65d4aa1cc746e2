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


class Inner(nn.Module):
    """Its last matrix is in a list of its own, as in attention of vit-pytorch."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.0))

    def forward(self) -> None:
        raise NotImplementedError


def test_blocks_of_a_list_of_lists_are_what_each_layer_has() -> None:
    layers = nn.ModuleList(
        nn.ModuleList([nn.LayerNorm(4), Inner(), Layer(has_bias=False)]) for _ in range(2)
    )
    for each in layers:
        each.append(None)  # type: ignore[operator]
    assert list(find_blocks(nn.ModuleDict({"layers": layers}))) == [
        "layers.0.1", "layers.0.2", "layers.1.1", "layers.1.2",
    ]  # fmt: skip
