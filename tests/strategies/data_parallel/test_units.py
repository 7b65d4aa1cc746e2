"""Which modules are gathered as one."""

from collections.abc import Callable

import pytest
import torch
from gpt import GPT
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from boltmesh.errors import ConfigError
from boltmesh.strategies.data_parallel.units import find_units


class Holder(nn.Module):
    """Holds what it is given as attributes, and can be called."""

    def __init__(self, **modules: nn.Module) -> None:
        super().__init__()
        for name, module in modules.items():
            setattr(self, name, module)

    def forward(self, x: Tensor) -> Tensor:
        for child in self.children():
            x = child(x)
        return x


class Block(Holder):
    def __init__(self, width: int = 4, **more: nn.Module) -> None:
        super().__init__(up=nn.Linear(width, 8), down=nn.Linear(8, width), **more)


class Stage(Holder):
    """A few blocks of a width of its own, as in hierarchical vision models."""

    def __init__(self, width: int, depth: int) -> None:
        blocks = nn.ModuleList(Block(width) for _ in range(depth))
        super().__init__(blocks=blocks, merge=nn.Linear(width, 2 * width))


class Residual(Holder):
    """A convolution block whose first of a stage has a projection that the others lack."""

    def __init__(self, into: int, out: int) -> None:
        super().__init__(conv=nn.Conv2d(into, out, 3), norm=nn.BatchNorm2d(out))
        if into != out:
            self.projection = nn.Conv2d(into, out, 1)


def resnet() -> nn.Module:
    return Holder(
        stem=nn.Conv2d(3, 4, 7),
        layer1=nn.Sequential(Residual(4, 4), Residual(4, 4)),
        layer2=nn.Sequential(Residual(4, 8), Residual(8, 8)),
        layer3=nn.Sequential(Residual(8, 16)),
        head=nn.Linear(16, 10),
    )


def experts() -> nn.Module:
    layers = (Block(experts=nn.ModuleList(Block() for _ in range(3))) for _ in range(2))
    return Holder(layers=nn.ModuleList(layers))


def grid() -> nn.Module:
    return Holder(rows=nn.ModuleList(nn.ModuleList(Block() for _ in range(2)) for _ in range(2)))


def repeated_layer() -> nn.Module:
    block = Block()
    return Holder(layers=nn.ModuleList([block] * 3), head=nn.Linear(4, 2))


def sequential_within() -> nn.Module:
    return Holder(
        layers=nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(2)),
        tail=nn.ModuleDict({"a": nn.Sequential(nn.Linear(4, 9)), "b": nn.LayerNorm(9)}),
    )


EXPECTED: list[tuple[Callable[[], nn.Module], list[str]]] = [
    (lambda: GPT(n_layer=3, n_embd=8, n_head=2), ["blocks.0", "blocks.1", "blocks.2"]),
    (lambda: GPT(n_layer=1, n_embd=8, n_head=2), []),
    (lambda: nn.Sequential(nn.Linear(6, 11), nn.Tanh(), nn.Linear(11, 1)), ["0", "2"]),
    (grid, ["rows.0.0", "rows.0.1", "rows.1.0", "rows.1.1"]),
    (resnet, ["layer1.0", "layer1.1", "layer2.0", "layer2.1", "layer3.0"]),
    (
        lambda: Holder(stages=nn.ModuleList([Stage(4, 2), Stage(8, 2)])),
        ["stages.0.blocks.0", "stages.0.blocks.1", "stages.1.blocks.0", "stages.1.blocks.1"],
    ),
    (experts, ["layers.0", "layers.1"]),
    (repeated_layer, ["layers.0"]),
    (sequential_within, ["layers.0", "layers.1", "tail.a.0"]),
    (lambda: Holder(first=Block(), second=Block(), head=nn.Linear(4, 1)), ["first", "second"]),
    (
        lambda: Holder(
            left=Holder(layers=nn.ModuleList([Block(), Block()])),
            right=Holder(layers=nn.ModuleList([Block(), Block()])),
        ),
        ["left.layers.0", "left.layers.1", "right.layers.0", "right.layers.1"],
    ),
    (lambda: Holder(words=nn.Embedding(9, 4), places=nn.Embedding(9, 4)), []),
    (lambda: nn.Sequential(nn.Linear(999, 99), nn.Linear(99, 2, bias=False)), ["0"]),
    (lambda: Holder(act=nn.ModuleList([nn.ReLU(), nn.ReLU()])), []),
    (
        lambda: nn.TransformerDecoder(nn.TransformerDecoderLayer(8, 2), 2),
        ["layers.0", "layers.1"],
    ),
]


@pytest.mark.parametrize(("build", "expected"), EXPECTED)
def test_the_repeated_blocks_are_found(build: Callable[[], nn.Module], expected: list[str]) -> None:
    assert list(find_units(build())) == expected


def test_weights_tied_within_a_block_leave_it_a_unit() -> None:
    model = Holder(layers=nn.ModuleList(Block(same=nn.Linear(4, 8)) for _ in range(2)))
    for layer in model.layers:
        layer.same.weight = layer.up.weight
    assert list(find_units(model)) == ["layers.0", "layers.1"]


def test_weights_tied_across_blocks_leave_both_to_the_root() -> None:
    model = Holder(layers=nn.ModuleList(Block() for _ in range(3)))
    layers: nn.ModuleList = model.layers  # type: ignore[assignment]
    layers[2].up.weight = layers[0].up.weight
    assert list(find_units(model)) == ["layers.1"]


def test_a_module_that_two_blocks_hold_leaves_both_to_the_root() -> None:
    shared = nn.Linear(4, 4)
    layers = [Block(), Block(shared=shared), Block(shared=shared)]
    assert list(find_units(Holder(layers=nn.ModuleList(layers)))) == ["layers.0"]


def test_a_module_that_only_holds_others_is_no_unit() -> None:
    class Inner(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])

    found = find_units(Holder(parts=nn.ModuleList([Inner(), Inner()])))
    assert list(found) == [f"parts.{part}.layers.{layer}" for part in (0, 1) for layer in (0, 1)]


def test_shapes_are_enough_so_that_a_model_without_memory_can_be_planned() -> None:
    with torch.device("meta"):
        model = Holder(layers=nn.ModuleList(Block() for _ in range(2)))
    assert list(find_units(model)) == ["layers.0", "layers.1"]


def test_the_user_names_what_is_a_unit() -> None:
    model = GPT(n_layer=2, n_embd=8, n_head=2)
    assert list(find_units(model, ["head", "blocks.*"])) == ["blocks.0", "blocks.1", "head"]
    assert list(find_units(model, ["blocks.1", "blocks.?.attention"])) == [
        "blocks.0.attention",
        "blocks.1",
        "blocks.1.attention",
    ]


def test_a_pattern_takes_what_it_can_of_what_it_matches() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 1))
    assert list(find_units(model, ["*"])) == ["0", "2"]


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("layers.*", "blocks='layers.*' matches no module of GPT. Did you mean 'blocks.*'?"),
        ("blocks.*.*.*.*", "matches no module of GPT."),
        ("blocks", "a ModuleList without a forward of its own: it is never called"),
        ("blocks", "Name what it holds: 'blocks.*'."),
        ("blocks.0.dropout", "a Dropout without parameters"),
    ],
)  # fmt: skip
def test_a_pattern_that_names_no_unit_is_refused_by_name(pattern: str, message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        find_units(GPT(n_layer=2, n_embd=8, n_head=2), [pattern])
    assert message in str(refused.value)


def test_a_named_unit_that_shares_a_parameter_is_refused_by_both_names() -> None:
    model = GPT(n_layer=2, n_embd=8, n_head=2, tie_weights=True)
    with pytest.raises(ConfigError) as refused:
        find_units(model, ["blocks.*", "head"])
    assert "'head.weight' is also 'token_embedding.weight'" in str(refused.value)
