"""Experts on two ranks give what they give in one process, forward and backward."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from typing_extensions import override

from boltmesh.strategies.expert.divided import DividedExperts, _Stack
from boltmesh.strategies.expert.exchange import ExpertExchange
from boltmesh.strategies.expert.expected_traffic import expected_rows
from boltmesh.strategies.expert.find import ExpertCall, Experts
from tests.support.expert_models import Experts as Stacked
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.ranks

WIDTH, EXPERTS, CHOICES = 6, 8, 3
FOUND = Experts(
    "routed",
    "experts",
    EXPERTS,
    ("experts.up", "experts.bias", "experts.down"),
    {"rows": 0, "experts": 1, "weights": 2},
    (("experts", "num_experts"),),
)
ROUTES = ("spread", "one", "first", "none")


def made(route: str, rank: int) -> tuple[Stacked, Tensor, Tensor, Tensor]:
    """Return experts, and rows with their choices, another number of them on each rank."""
    torch.manual_seed(0)
    module = Stacked(WIDTH, EXPERTS).double()
    torch.manual_seed(1 + rank)
    count = 0 if route == "none" and rank else 5 + 2 * rank
    rows = torch.randn(count, WIDTH, dtype=torch.float64)
    weights, chosen = torch.randn(count, EXPERTS, dtype=torch.float64).topk(CHOICES, -1)
    if route == "one":  # rank 1 owns no expert that somebody wants
        weights, chosen = weights[:, :1], torch.full((count, 1), 2)
    elif route == "first":
        chosen = torch.arange(CHOICES).expand(count, CHOICES).contiguous()
    return module, rows, chosen, weights


def exchanged(rank: int, world_size: int, route: str) -> dict[str, Tensor]:
    module, rows, chosen, weights = made(route, rank)
    assert dist.group.WORLD is not None
    call = ExpertCall((rows, chosen, weights), {}, rows)
    divided = DividedExperts(module, FOUND, call, dist.group.WORLD)
    for parameter in module.parameters():
        parameter.data = parameter.data.tensor_split(world_size)[rank].clone()
    divided.put_on()
    rows.requires_grad_()
    weights.requires_grad_()
    output = module(rows, chosen, weights)
    (output * output.detach().cos()).sum().backward()
    assert rows.grad is not None
    assert weights.grad is not None
    gradients = {name: each.grad for name, each in module.named_parameters()}
    return {"output": output.detach(), "rows": rows.grad, "weights": weights.grad, **gradients}


@pytest.mark.sample("spread")
@pytest.mark.parametrize("route", ROUTES)
def test_output_and_gradients_are_those_of_one_process(route: str) -> None:
    ranks = run_ranks(exchanged, 2, route)
    totals: dict[str, Any] = {}
    for rank, got in enumerate(ranks):
        module, rows, chosen, weights = made(route, rank)
        rows.requires_grad_()
        weights.requires_grad_()
        output = module(rows, chosen, weights)
        (output * output.detach().cos()).sum().backward()
        for name, expected in (("output", output), ("rows", rows.grad), ("weights", weights.grad)):
            torch.testing.assert_close(got[name], expected, rtol=1e-12, atol=1e-12)
        for name, each in module.named_parameters():
            totals[name] = totals.get(name, 0) + each.grad
    for name, total in totals.items():
        parts = torch.cat([got[name] for got in ranks])
        torch.testing.assert_close(parts, total, rtol=1e-12, atol=1e-12)


class Filled(TorchDispatchMode):
    """Counts the gradients that are as large as a stack and of one index."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten.select_backward.default
        return func(*args, **(kwargs or {}))


def filled(rank: int, world_size: int) -> tuple[int, bool]:
    """Return how many such gradients a loop over stacks makes, and whether these are left as is."""
    module, rows, chosen, weights = made("first", rank)
    assert dist.group.WORLD is not None
    call = ExpertCall((rows, chosen, weights), {}, rows)
    divided = DividedExperts(module, FOUND, call, dist.group.WORLD)
    for parameter in module.parameters():
        parameter.data = parameter.data.tensor_split(world_size)[rank].clone()
    module.bias.requires_grad_(False)
    stacks = list(module.parameters())
    divided.put_on()
    with Filled() as mode:
        module(rows, chosen, weights).square().sum().backward()
    are_kept = all(one is other for one, other in zip(stacks, module.parameters(), strict=True))
    return mode.count, are_kept and module.bias.grad is None


def test_the_gradient_of_a_stack_is_made_once() -> None:
    assert run_ranks(filled, 2) == [(0, True)] * 2


def test_a_stack_is_indexed_as_torch_does() -> None:
    plain = torch.arange(24.0).view(4, 3, 2)
    stack = plain.clone().requires_grad_().as_subclass(_Stack)
    number = torch.tensor(1)
    indices: list[Any] = [2, -1, number, number.int(), number.to(torch.uint8), number.bool()]
    indices += [slice(1, 3), (1, 2), torch.tensor([0, 3]), None, ...]
    for index in indices:
        torch.testing.assert_close(stack[index].detach(), plain[index])
    for wrong in (4, number.float()):
        with pytest.raises(IndexError):
            stack[wrong]


def counted(rank: int, world_size: int) -> tuple[int, int]:
    """Return how many rows come to a rank of which every row wants all experts."""
    assert dist.group.WORLD is not None
    exchange = ExpertExchange(EXPERTS, dist.group.WORLD)
    came = []

    def compute(rows: Tensor, local: Tensor, weights: Tensor) -> Tensor:
        came.append((rows.unique(dim=0).shape[0], rows.shape[0]))
        return rows

    torch.manual_seed(rank)
    rows = torch.randn(7, WIDTH)
    exchange.run(rows, torch.arange(EXPERTS).expand(7, EXPERTS), rows.new_ones(7, EXPERTS), compute)
    return came[0]


def test_a_row_comes_once_for_all_of_its_experts() -> None:
    for rows, choices in run_ranks(counted, 2):
        assert (rows, choices) == (14, 14 * EXPERTS // 2)


def test_expected_rows_of_published_layers() -> None:
    # Rows sent to other ranks for each token: Qwen3-30B-A3B and Mixtral, 8 ranks.
    assert expected_rows(1, 128, 8, 8) * 7 / 8 == pytest.approx(4.67, abs=0.01)
    assert expected_rows(1, 8, 2, 8) * 7 / 8 == pytest.approx(1.75)


WAITS = ("tolist", "item", "nonzero", "bincount", "unique", "cpu", "numpy", "__bool__", "__int__")
"""Functions that wait for a device; so does ``torch.tensor`` of numbers of the host there."""


class Waits(TorchFunctionMode):
    """Keeps what would wait for the device if tensors lay on one."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    @override
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.__name__
        if name in WAITS or (func is torch.tensor and (kwargs or {}).get("device") is not None):
            self.names.append(name)
        is_by_row = name == "repeat_interleave" and isinstance(args[1], Tensor)
        if is_by_row and "output_size" not in (kwargs or {}):
            self.names.append(name)
        return func(*args, **(kwargs or {}))


def waited(rank: int, world_size: int) -> list[list[str]]:
    _, rows, chosen, weights = made("spread", rank)
    assert dist.group.WORLD is not None
    exchange = ExpertExchange(EXPERTS, dist.group.WORLD)
    exchange.capacity = 2
    found = []
    for run in (exchange.run, exchange.run_in_places):
        with Waits() as waits:
            given = rows.clone().requires_grad_(), chosen, weights.clone().requires_grad_()
            run(*given, lambda rows, local, weight: rows * weight[:, None]).sum().backward()
        found.append(waits.names)
    return found


def test_a_layer_waits_for_its_device_once_and_with_a_capacity_never() -> None:
    assert run_ranks(waited, 2) == [[["tolist"], []]] * 2
