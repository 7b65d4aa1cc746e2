"""Draws for what is divided differ by rank, draws for what is whole do not."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from boltmesh.strategies.blocks import find_blocks
from boltmesh.strategies.patch import Changes
from boltmesh.strategies.tensor.analysis.analyse import analyse
from boltmesh.strategies.tensor.planning import make_plan
from boltmesh.strategies.tensor.runtime.apply import apply_plan
from boltmesh.strategies.tensor.runtime.collectives import TensorGroup
from boltmesh.strategies.tensor.runtime.dropout import Draws, divide_draws
from tests.support.ranks import run_ranks
from tests.support.tensor_runs import applied, world

pytestmark = pytest.mark.ranks

LONG = 256


class _Drawing(nn.Module):
    """Draws itself, by a child that is listed, by one that is not, and then itself again."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = p
        self.listed, self.other = nn.Dropout(p), nn.Dropout(p)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        first = F.dropout(x, self.p, self.training)
        return first, self.listed(x), self.other(x), F.dropout(x, self.p, self.training)


def _group() -> TensorGroup:
    return world()


def _drawing(p: float = 0.5) -> nn.Module:
    module, changes, draws = _Drawing(p), Changes(), Draws(_group())
    listed = {module, module.listed}
    divide_draws(module, listed, draws, changes)
    divide_draws(module.listed, listed, draws, changes)
    return module


def _masks(rank: int, world_size: int) -> Any:
    module = _drawing()
    runs = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        masks = [each == 0 for each in module(torch.ones(LONG))]
        runs.append((masks, torch.rand(3)))
    torch.manual_seed(1)
    x = torch.ones(LONG, requires_grad=True)
    # Runs again in the backward pass: the gradient is of the masks of the second time.
    out = checkpoint(lambda each: torch.stack(module(each)), x, use_reentrant=False)
    (slope,) = torch.autograd.grad((out * torch.arange(1, 5)[:, None]).sum(), x)
    same = torch.equal(slope, (out.detach() * torch.arange(1, 5)[:, None]).sum(0))
    return runs, same, torch.rand(3)


def test_only_listed_modules_draw_by_rank_and_all_repeat_per_seed() -> None:
    results = run_ranks(_masks, 2)
    (first, repeats, _), (other, other_repeats, _) = results
    assert repeats
    assert other_repeats
    for (masks, after), (other_masks, other_after) in zip(first, other, strict=True):
        differ = [not torch.equal(a, b) for a, b in zip(masks, other_masks, strict=True)]
        assert differ == [True, True, False, True]
        assert torch.equal(after, other_after), "generators stand alike afterwards"
    for runs, _, _ in results:
        (one, _), (again, _), (seeded, _) = runs
        assert all(torch.equal(a, b) for a, b in zip(one, again, strict=True))
        assert not any(torch.equal(a, b) for a, b in zip(one, seeded, strict=True))
    assert torch.equal(results[0][2], results[1][2])


class _Functions(TorchFunctionMode):
    """Records the functions that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.__name__)
        return func(*args, **(kwargs or {}))


def _watched(rank: int, world_size: int) -> list[str]:
    draws = Draws(_group())
    with _Functions() as watch, draws.own(), draws.alike():
        torch.rand(1)
    return watch.names


def test_a_change_of_the_generator_is_no_function_of_the_layer() -> None:
    """A pipeline would take it for a read of data, and trace the step for each microbatch."""
    for names in run_ranks(_watched, 2):
        assert names == ["rand"]


@pytest.mark.full
def test_masks_of_two_ranks_are_independent() -> None:
    results = run_ranks(_masks, 2)
    both = (results[0][0][0][0][0] & results[1][0][0][0][0]).float().mean().item()
    # Of 256 places a quarter, with a standard deviation of 0.027.
    assert abs(both - 0.25) < 5 * 0.027


def _nothing_drawn(rank: int, world_size: int) -> list[bool]:
    found = []
    for module in (_drawing(0.0), _drawing().eval()):
        torch.manual_seed(5)
        module(torch.ones(LONG))
        after = torch.rand(3)
        torch.manual_seed(5)
        found.append(torch.equal(after, torch.rand(3)))
    return found


@pytest.mark.full
def test_where_nothing_is_drawn_later_draws_are_those_of_one_rank() -> None:
    for found in run_ranks(_nothing_drawn, 2):
        assert found == [True, True]


def _in_models(rank: int, world_size: int) -> dict[tuple[str, str], list[Tensor]]:
    """Whole values in a block, and this rank's part of something in between."""
    found = {}
    for name, backend in (("gpt_drawing", "local"), ("gpt_drawing", "region"),
                          ("gpt_dropout", "region")):  # fmt: skip
        _, model, loss = applied(name, backend)
        kept: list[Tensor] = []
        attention = model.blocks[0].attention
        last = attention.o if name == "gpt_drawing" else attention.out
        last.register_forward_pre_hook(lambda _, args, kept=kept: kept.append(args[0]))
        attention.register_forward_hook(lambda *each, kept=kept: kept.append(each[-1]))
        torch.manual_seed(3)
        loss(model).backward()
        whole = [each.grad for each in model.parameters() if each.grad is not None]
        kept = [each.to_local() if hasattr(each, "to_local") else each for each in kept]
        found[name, backend] = [*(each.detach() for each in kept), whole[-2], torch.rand(2)]
    return found


@pytest.mark.full
def test_models_with_dropout_keep_alike_what_is_whole() -> None:
    first, other = run_ranks(_in_models, 2)
    for way, mine in first.items():
        theirs = other[way]
        assert not torch.equal(mine[0], theirs[0]), "heads have parts of their own"
        for a, b in zip(mine[1:], theirs[1:], strict=True):
            assert torch.equal(a, b), way


class _Twice(nn.Module):
    """Draws for divided channels and for its whole result, as a layer of Bart."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.fc1, self.fc2 = nn.LayerNorm(8), nn.Linear(8, 32), nn.Linear(32, 8)

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.dropout(self.fc1(self.norm(x)).tanh(), 0.5, self.training)
        return x + F.dropout(self.fc2(hidden), 0.5, self.training)


def _drawing_twice(rank: int, world_size: int) -> list[Tensor]:
    torch.manual_seed(0)
    model, x = nn.Sequential(_Twice(), _Twice()), torch.randn(6, 8)
    analysis = analyse(model, lambda each: each(x).square().mean(), blocks=find_blocks(model))
    plan = make_plan(analysis, world_size)
    assert "0.fc1.weight" in plan.sharded
    apply_plan(model, plan, world())
    torch.manual_seed(3)
    out = model(x)
    out.square().mean().backward()
    whole = [p.grad for n, p in model.named_parameters() if n not in plan.sharded]
    return [out.detach(), *whole, torch.rand(2)]


def test_a_module_that_draws_for_parts_and_for_the_whole_keeps_the_whole_alike() -> None:
    first, other = run_ranks(_drawing_twice, 2)
    assert len(first) == 8
    for mine, theirs in zip(first, other, strict=True):
        torch.testing.assert_close(mine, theirs)


def _p_of_heads(rank: int, world_size: int) -> dict[str, float]:
    """How alike the masks of the heads of two ranks are where every weight is alike."""
    found = {}
    for backend in ("local", "region"):
        _, model, _ = applied("gpt_drawing", backend)
        attention = model.blocks[0].attention
        masks: list[Tensor] = []
        attention.o.register_forward_pre_hook(lambda _, args, m=masks: m.append(args[0]))
        with torch.no_grad():
            for each in (attention.q, attention.k):
                each.weight.zero_()
                each.bias.zero_()
            attention.v.weight.zero_()
            attention.v.bias.fill_(1.0)
        torch.manual_seed(0)
        attention(torch.zeros(4, 16, 64))
        (part,) = masks
        part = part.to_local() if hasattr(part, "to_local") else part
        gathered = [torch.empty_like(part) for _ in range(world_size)]
        dist.all_gather(gathered, part.detach().contiguous())
        # Every channel of a head is the share of its weights that was kept, over 1 - p.
        found[backend] = (gathered[0] == gathered[1]).float().mean().item()
    return found


@pytest.mark.full
def test_heads_of_two_ranks_draw_apart_in_either_backend() -> None:
    for found in run_ranks(_p_of_heads, 2):
        for share in found.values():
            # Sixteen weights of which each is dropped with p = 0.1: equal counts are common,
            # equal masks would make all places equal.
            assert share < 0.6
