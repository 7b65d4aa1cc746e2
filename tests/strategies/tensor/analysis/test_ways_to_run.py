"""The plan is the same however a model is run, and knows what people put into models."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from boltmesh.strategies.blocks import find_blocks
from boltmesh.strategies.tensor.analysis.analyse import analyse
from boltmesh.strategies.tensor.planning import make_plan
from tests.support.planned import analysed, divisions, patterns
from tests.support.tensor_models import WIDTH, example

X = torch.zeros(2, 8, WIDTH)


def plan_of(module, step):
    return make_plan(analyse(module, step, blocks=find_blocks(module)), 2)


def expected(name):
    return divisions(make_plan(analysed(name), 2))


@pytest.mark.parametrize("name", ["bert", "gpt_fused", "gpt_torch_attention", "llama"])
def test_in_half_precision(name):
    made = example(name)

    def step(model):
        with torch.autocast("cpu", torch.bfloat16):
            return made.loss(model)

    assert divisions(plan_of(made.module, step)) == expected(name)


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_with_activation_checkpointing(name):
    made = example(name)
    module: Any = made.module
    usual = module.gradient_checkpointing_enable  # an alias of the other one where that is
    getattr(module, "activation_checkpointing_enable", usual)()

    assert divisions(plan_of(made.module, made.loss)) == expected(name)


class LowRank(nn.Module):
    """A frozen layer and a product of two narrow ones beside it."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.into = nn.Linear(base.in_features, 4, bias=False)
        self.out = nn.Linear(4, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + 2.0 * self.out(self.into(x))


def test_with_low_rank_updates_of_frozen_layers():
    made = example("llama")
    model: Any = made.module
    for layer in model.model.layers:
        attention = layer.self_attn
        for name in ("q_proj", "o_proj"):
            setattr(attention, name, LowRank(getattr(attention, name)))

    found = divisions(plan_of(made.module, made.loss))

    start = "model.layers.*.self_attn."
    assert found[f"{start}q_proj.base.weight"] == found[f"{start}q_proj.out.weight"]
    assert found[f"{start}o_proj.base.weight"] == found[f"{start}o_proj.into.weight"]
    assert f"{start}q_proj.into.weight" not in found
    assert f"{start}o_proj.out.weight" not in found


def test_of_torchs_own_layers_with_dropouts_of_heads_and_channels():
    layer = nn.TransformerEncoderLayer(WIDTH, 4, 128, dropout=0.1, batch_first=True)
    module = nn.TransformerEncoder(layer, 2)

    plan = plan_of(module, lambda model: model(X).square().mean())

    assert divisions(plan) == {
        "layers.*.self_attn.in_proj_weight": "column 0: 4x16 + 4x16 + 4x16",
        "layers.*.self_attn.in_proj_bias": "column 0: 4x16 + 4x16 + 4x16",
        "layers.*.self_attn.out_proj.weight": "row 1: 4x16",
        "layers.*.linear1.weight": "column 0: 128x1",
        "layers.*.linear1.bias": "column 0: 128x1",
        "layers.*.linear2.weight": "row 1: 128x1",
    }
    assert patterns(plan.local_dropouts) == {"layers.*.self_attn", "layers.*.dropout"}


def test_of_torchs_attention_to_something_else():
    module = nn.TransformerDecoder(nn.TransformerDecoderLayer(WIDTH, 4, 128, batch_first=True), 2)

    found = divisions(plan_of(module, lambda model: model(X, X + 1).square().mean()))

    for name in ("self_attn", "multihead_attn"):
        assert found[f"layers.*.{name}.in_proj_weight"] == "column 0: 4x16 + 4x16 + 4x16"
        assert found[f"layers.*.{name}.out_proj.weight"] == "row 1: 4x16"


class OtherWidths(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.inner = nn.MultiheadAttention(WIDTH, 4, kdim=32, vdim=48)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.inner(self.first(x), x[..., :32], x[..., :48])[0])


def test_of_torchs_attention_with_keys_of_another_width():
    found = divisions(plan_of(OtherWidths(), lambda model: model(X).square().mean()))

    assert found == {
        "inner.q_proj_weight": "column 0: 4x16",
        "inner.k_proj_weight": "column 0: 4x16",
        "inner.v_proj_weight": "column 0: 4x16",
        "inner.in_proj_bias": "column 0: 4x16 + 4x16 + 4x16",
        "inner.out_proj.weight": "row 1: 4x16",
    }


class Sinks(nn.Module):
    """Attention that may look at nothing: a learned score for each head beside those of keys."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.sinks = nn.Parameter(torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (each.unflatten(2, (4, 16)).transpose(1, 2) for each in self.qkv(x).chunk(3, 2))
        scores = q @ k.transpose(2, 3)
        nothing = self.sinks.view(1, 4, 1, 1).expand(x.shape[0], 4, x.shape[1], 1)
        weights = torch.cat([scores, nothing], 3).softmax(3)[..., :-1]
        return self.out((weights @ v).transpose(1, 2).flatten(2))


class Solving(Sinks):
    """Solves a system of equations for each head."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (each.unflatten(2, (4, 16)).transpose(1, 2) for each in self.qkv(x).chunk(3, 2))
        scores = q @ k.transpose(2, 3) * self.sinks.view(4, 1, 1)
        y = torch.linalg.solve_triangular(scores, v, upper=False)
        return self.out(y.transpose(1, 2).flatten(2))


@pytest.mark.parametrize("kind", [Sinks, Solving])
def test_a_number_for_each_head_goes_with_its_head(kind):
    module = nn.Sequential(nn.LayerNorm(WIDTH), kind(), nn.LayerNorm(WIDTH))

    plan = plan_of(module, lambda model: model(X).square().mean())

    assert not plan.unknown
    assert divisions(plan) == {
        "1.sinks": "along 0: 4x1",
        "1.qkv.weight": "column 0: 4x16 + 4x16 + 4x16",
        "1.qkv.bias": "column 0: 4x16 + 4x16 + 4x16",
        "1.out.weight": "row 1: 4x16",
    }
