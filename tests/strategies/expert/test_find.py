"""Experts are found by what they are given, and what is not found has a reason."""

from typing import TYPE_CHECKING

import pytest
import torch
from torch import Tensor, nn
from typing_extensions import override

from boltmesh.strategies.expert.find import Findings, find_experts
from tests.support.expert_models import MoeModule, tokens

if TYPE_CHECKING:
    from torch.nn import Module


def found(module: MoeModule) -> Findings:
    return find_experts(module, lambda: module.training_step(tokens(0, 0), 0))


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        ("mixtral", ["net.model.layers.0.mlp.experts", "net.model.layers.1.mlp.experts"]),
        ("stacked", ["net.blocks.0.2.experts", "net.blocks.1.2.experts"]),
    ],
)
def test_stacked_experts_are_found(kind: str, names: list[str]) -> None:
    experts = found(MoeModule(kind)).experts
    assert [each.name for each in experts] == names
    for each in experts:
        assert (each.kind, each.num_experts) == ("routed", 8)
        assert each.counts == ((each.name, "num_experts"),)
        assert dict(each.slots) == {"rows": 0, "experts": 1, "weights": 2}


@pytest.mark.parametrize("kind", ["list", "masked", "repeated"])
def test_lists_of_experts_are_found_in_the_module_that_calls_them(kind: str) -> None:
    experts = found(MoeModule(kind)).experts
    assert [each.name for each in experts] == ["net.blocks.0.2", "net.blocks.1.2"]
    for each in experts:
        assert (each.kind, each.num_experts) == ("list", 8)
        assert each.members == tuple(f"{each.name}.experts.{n}" for n in range(8))
        assert all(name.startswith(f"{each.name}.experts.") for name in each.parameters)


def test_experts_in_one_product_are_found() -> None:
    experts = found(MoeModule("capacity")).experts
    assert [each.name for each in experts] == ["net.blocks.0.2.experts", "net.blocks.1.2.experts"]
    for each in experts:
        assert (each.kind, each.num_experts) == ("batched", 8)
        assert dict(each.slots) == {"rows": 0}


def test_experts_with_buffers_stay_whole() -> None:
    module = MoeModule("list")
    module.net.get_submodule("blocks.0.2.experts.3").register_buffer("scale", torch.ones(()))
    findings = found(module)
    assert [each.name for each in findings.experts] == ["net.blocks.1.2"]
    assert findings.whole == {
        "net.blocks.0.2.experts": (
            "its experts have buffers, such as 'net.blocks.0.2.experts.3.scale'"
        )
    }


def test_a_model_without_experts_has_none() -> None:
    findings = found(MoeModule("dense"))
    assert (findings.experts, findings.whole) == ([], {})


def test_experts_with_a_shared_norm_stay_whole() -> None:
    module = MoeModule("stacked")
    module.net.get_submodule("blocks.0.2.experts").norm = nn.LayerNorm(
        30
    )  # 8 experts do not share its rows
    findings = found(module)
    assert [each.name for each in findings.experts] == ["net.blocks.1.2.experts"]
    assert findings.whole["net.blocks.0.2.experts"] == (
        "its experts share 'net.blocks.0.2.experts.norm.weight'"
    )


class Sorted(nn.Module):
    """Rows in order, and how many each expert has, as JetMoe."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 6, 6))

    @override
    def forward(self, rows: Tensor, sizes: list[int]) -> Tensor:
        parts = rows.split(sizes)
        return torch.cat([part @ each for part, each in zip(parts, self.weight, strict=True)])


def test_rows_in_order_are_found() -> None:
    model = nn.ModuleDict({"experts": Sorted()})

    def step() -> object:
        experts: Module = model["experts"]
        return experts(torch.randn(9, 6), [2, 0, 4, 3])

    (experts,) = find_experts(model, step).experts
    assert (experts.kind, experts.num_experts) == ("sorted", 4)
    assert dict(experts.slots) == {"rows": 0, "sizes": 1}


def test_stacked_experts_with_adapters_are_found() -> None:
    seen = found(MoeModule("stacked, LoRA"))
    assert [each.name for each in seen.experts] == [f"net.blocks.{n}.2.experts" for n in range(2)]
    assert seen.whole == {}
    for each in seen.experts:
        assert (each.kind, each.num_experts) == ("routed", 8)
        assert len(each.parameters) == 5  # three stacks, two adapters
        assert [name.rpartition(".lora_")[2] for name in each.columns] == ["B.default.weight"] * 2
        owners = [name.removeprefix(each.name) for name, _ in each.counts]
        assert owners == ["", ".base_layer", ".base_layer.base_layer"]
