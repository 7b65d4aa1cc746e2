"""Torch's attention on a rank's heads, argument by argument, against itself whole."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from boltmesh.strategies.tensor.plan import PlannedDim, Section, ShardedParameter, Style, TensorPlan
from boltmesh.strategies.tensor.runtime.apply import apply_plan
from tests.support.ranks import run_ranks
from tests.support.tensor_runs import world

pytestmark = pytest.mark.ranks

WIDTH, HEADS, ROWS, QUERIES, KEYS = 24, 4, 2, 5, 3

BUILT: dict[str, dict[str, Any]] = {
    "plain": {},
    "batch_first": {"batch_first": True},
    "no_bias": {"bias": False},
    "other_widths": {"kdim": 10, "vdim": 7, "batch_first": True},
    "bias_rows": {"add_bias_kv": True},
    "zero_row": {"add_zero_attn": True, "batch_first": True},
    "both_rows": {"add_bias_kv": True, "add_zero_attn": True},
}
CALLED: dict[str, dict[str, Any]] = {
    "plain": {},
    "no_weights": {"need_weights": False},
    "every_head": {"average_attn_weights": False},
    "float_mask": {"attn_mask": "float"},
    "bool_mask": {"attn_mask": "bool", "need_weights": False},
    "mask_by_head": {"attn_mask": "heads"},
    "padding": {"key_padding_mask": "padding", "need_weights": False},
    "both_masks": {"attn_mask": "float", "key_padding_mask": "padding"},
    "causal": {"attn_mask": "causal", "is_causal": True, "need_weights": False},
    "causal_padding": {"attn_mask": "causal", "is_causal": True, "key_padding_mask": "padding"},
}


def _plan(module: nn.MultiheadAttention, size: int) -> TensorPlan:
    channels = WIDTH // HEADS
    sharded = {}
    for name, parameter in module.named_parameters():
        style: Style = "row" if name == "out_proj.weight" else "column"
        if name == "out_proj.bias":
            continue
        dim = {"bias_k": 2, "bias_v": 2, "out_proj.weight": 1}.get(name, 0)
        count = 3 if name.startswith("in_proj") else 1
        sections = (Section(1, HEADS, channels),) * count
        sharded[name] = ShardedParameter(
            name, (name,), tuple(parameter.shape), dim, sections, style, 0
        )
    return TensorPlan(size, (PlannedDim(HEADS, tuple(sharded), ()),), sharded)


def _arguments(built: dict[str, Any], called: dict[str, Any], *, is_self: bool) -> dict[str, Any]:
    torch.manual_seed(3)
    kdim, vdim = built.get("kdim", WIDTH), built.get("vdim", WIDTH)
    keys = QUERIES if is_self or "is_causal" in called else KEYS

    def rows(length: int, width: int) -> Tensor:
        made = torch.randn(ROWS, length, width, dtype=torch.float64)
        if not built.get("batch_first"):
            made = made.transpose(0, 1).contiguous()
        return made.requires_grad_()

    query = rows(QUERIES, WIDTH)
    key, value = (query, query) if is_self else (rows(keys, kdim), rows(keys, vdim))
    shape = (QUERIES, keys)
    masks = {
        "float": torch.randn(shape, dtype=torch.float64).requires_grad_(),
        "bool": torch.rand(shape) < 0.3,
        "heads": torch.randn(ROWS * HEADS, *shape, dtype=torch.float64).requires_grad_(),
        "causal": torch.full(shape, -torch.inf, dtype=torch.float64).triu(1),
        "padding": torch.tensor([[False] * keys, [False] * (keys - 1) + [True]]),
    }
    masks["bool"][:, 0] = False
    other = {name: masks.get(each, each) for name, each in called.items()}
    return {"query": query, "key": key, "value": value, **other}


def _run(module: nn.Module, arguments: dict[str, Any]) -> dict[str, Tensor]:
    out, weights = module(**arguments)
    loss = (out * torch.linspace(-1, 1, out.numel(), dtype=torch.float64).view_as(out)).sum()
    found = {"out": out.detach()}
    if weights is not None:
        loss = loss + (weights * torch.arange(weights.shape[-1])).sum()
        found["weights"] = weights.detach()
    loss.backward()
    for name, each in arguments.items():
        if isinstance(each, Tensor) and each.requires_grad:
            assert each.grad is not None
            found[f"gradient of {name}"] = each.grad
    return found


def _largest(mine: dict[str, Tensor], whole: dict[str, Tensor]) -> dict[str, float]:
    assert mine.keys() == whole.keys()
    return {name: (mine[name] - whole[name]).abs().max().item() for name in whole}


def _every_call(rank: int, world_size: int) -> dict[Any, dict[str, float]]:
    group = world()
    found = {}
    for built_as, built in BUILT.items():
        for called_as, called in CALLED.items():
            for is_self in (True, False) if "kdim" not in built else (False,):
                torch.manual_seed(0)
                whole = nn.MultiheadAttention(WIDTH, HEADS, **built, dtype=torch.float64)
                if built.get("bias", True):
                    nn.init.normal_(whole.out_proj.bias)
                module = copy.deepcopy(whole)
                plan = apply_plan(module, _plan(module, world_size), group)
                expected = _run(whole, _arguments(built, called, is_self=is_self))
                mine = _run(module, _arguments(built, called, is_self=is_self))
                for name, parameter in whole.named_parameters():
                    part = module.get_parameter(name).grad
                    assert part is not None
                    assert parameter.grad is not None
                    mine[name] = plan.join(name, part) if name in plan.plan.sharded else part
                    expected[name] = parameter.grad
                found[built_as, called_as, is_self] = _largest(mine, expected)
    return found


@pytest.mark.full
def test_every_way_to_build_and_to_call_it_gives_what_torch_gives() -> None:
    for found in run_ranks(_every_call, 2):
        assert len(found) == 2 * 6 * 10 + 10
        for way, errors in found.items():
            assert max(errors.values()) < 1e-12, (way, errors)


def _unbatched(rank: int, world_size: int) -> float:
    torch.manual_seed(0)
    whole = nn.MultiheadAttention(WIDTH, HEADS, dtype=torch.float64)
    module = copy.deepcopy(whole)
    group = world()
    apply_plan(module, _plan(module, world_size), group)
    x = torch.randn(QUERIES, WIDTH, dtype=torch.float64)
    padding = torch.tensor([False] * (QUERIES - 1) + [True])
    mine, expected = (each(x, x, x, key_padding_mask=padding) for each in (module, whole))
    return max((a - b).abs().max().item() for a, b in zip(mine, expected, strict=True))


@pytest.mark.full
def test_one_sequence_needs_no_batch() -> None:
    assert max(run_ranks(_unbatched, 2)) < 1e-12


def _without_a_mask(rank: int, world_size: int) -> str:
    module = nn.MultiheadAttention(WIDTH, HEADS)
    group = world()
    apply_plan(module, _plan(module, world_size), group)
    x = torch.randn(QUERIES, ROWS, WIDTH)
    with pytest.raises(RuntimeError, match="Need attn_mask"):
        module(x, x, x, is_causal=True)
    return "refused"


@pytest.mark.full
def test_a_hint_without_its_mask_is_refused_as_by_torch() -> None:
    assert run_ranks(_without_a_mask, 2) == ["refused"] * 2
