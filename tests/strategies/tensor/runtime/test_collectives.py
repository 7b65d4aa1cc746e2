"""Each boundary of the tensor axis against the sum over ranks written out in one process."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.utils.flop_counter import FlopCounterMode

from boltmesh.strategies.pipeline.runtime.backward import StageGraph, backward_inputs
from boltmesh.strategies.tensor.runtime import collectives
from boltmesh.strategies.tensor.runtime.boundaries import BlockBoundary
from boltmesh.strategies.tensor.runtime.plain_shards import Column
from tests.support.ranks import run_ranks
from tests.support.tensor_runs import world

pytestmark = pytest.mark.ranks

NAMES = [
    "reduce_gradient",
    "reduce_sum",
    "gather_parts",
    "take_part",
    "gather_sequence",
    "scatter_sum",
]


def _input(rank: int, shape: tuple[int, ...] = (4, 6)) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)


def _both(function: Callable[[Tensor], Tensor], value: Tensor, seed: int) -> tuple[Tensor, Tensor]:
    value = value.clone().requires_grad_()
    out = function(value)
    out.backward(_input(seed, tuple(out.shape)))
    assert value.grad is not None
    return out.detach(), value.grad


def _every_boundary(
    rank: int, world_size: int, is_compiled: bool
) -> dict[tuple[str, int], tuple[Tensor, Tensor]]:
    group = world()
    assert (group.size, group.rank) == (world_size, rank)  # before anything is compiled
    results = {}
    for name in NAMES:
        for dim in (0, 1):
            function = getattr(collectives, name)
            dims = () if name.startswith("reduce") else (dim,)

            def boundary(
                value: Tensor, function: Callable = function, dims: tuple = dims
            ) -> Tensor:
                return function(value, group, *dims)

            if is_compiled:
                torch._dynamo.reset()
                boundary = torch.compile(boundary, backend="eager", fullgraph=True)
            results[name, dim] = _both(boundary, _input(rank), 10 + rank)
    return results


def _parts(value: Tensor, size: int, dim: int) -> list[Tensor]:
    return list(value.chunk(size, dim))


@pytest.fixture(scope="module", params=[(1, False), (2, False), (2, True)], ids=str)
def by_rank(request: pytest.FixtureRequest) -> list[dict]:
    size, is_compiled = request.param
    return run_ranks(_every_boundary, size, is_compiled)


@pytest.mark.sample(
    "(1, False)-reduce_gradient-0",
    "(2, False)-reduce_sum-0",
    "(2, True)-gather_parts-0",
    "(2, False)-take_part-0",
    "(2, False)-gather_sequence-0",
    "(2, True)-scatter_sum-0",
)
@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("name", NAMES)
def test_a_boundary_and_its_backward_are_what_they_are_said_to_be(
    by_rank: list[dict], name: str, dim: int
) -> None:
    size = len(by_rank)
    values = [_input(rank) for rank in range(size)]
    for rank, results in enumerate(by_rank):
        out, gradient = results[name, dim]
        grads = [_input(10 + each, tuple(out.shape)) for each in range(size)]
        expected = {
            "reduce_gradient": (values[rank], sum(grads)),
            "reduce_sum": (sum(values), grads[rank]),
            "gather_parts": (torch.cat(values, dim), _parts(grads[rank], size, dim)[rank]),
            "take_part": (_parts(values[rank], size, dim)[rank], torch.cat(grads, dim)),
            "gather_sequence": (
                torch.cat(values, dim),
                _parts(torch.stack(grads).sum(0), size, dim)[rank],
            ),
            "scatter_sum": (
                _parts(torch.stack(values).sum(0), size, dim)[rank],
                torch.cat(grads, dim),
            ),
        }[name]
        torch.testing.assert_close(out, expected[0], rtol=0, atol=1e-15)
        torch.testing.assert_close(gradient, expected[1], rtol=0, atol=1e-15)


def _penalty(rank: int, world_size: int) -> tuple[Tensor, Tensor]:
    """A gradient penalty over a column and a row: the gradient of a gradient."""
    group = world()
    rows = 4 // world_size
    column, row = (
        each[rank * rows : (rank + 1) * rows].clone().requires_grad_()
        for each in (_input(1, (4, 3)), _input(2, (4, 2)))
    )
    value = _input(3, (5, 3)).requires_grad_()
    hidden = torch.tanh(collectives.reduce_gradient(value, group) @ column.t())
    out = collectives.reduce_sum(hidden @ row, group)
    (slope,) = torch.autograd.grad(out.square().sum(), value, create_graph=True)
    slope.square().sum().backward()
    assert column.grad is not None
    assert row.grad is not None
    return column.grad, row.grad


def test_gradients_of_gradients_pass_the_boundaries() -> None:
    ((column, row),) = run_ranks(_penalty, 1)
    parts = run_ranks(_penalty, 2)
    torch.testing.assert_close(torch.cat([each[0] for each in parts]), column)
    torch.testing.assert_close(torch.cat([each[1] for each in parts]), row)


def _layers(bias: bool) -> tuple[Tensor, list[nn.Linear]]:
    torch.manual_seed(dist.get_rank())
    return torch.randn(2, 3, 8), [nn.Linear(8, 4, bias=bias) for _ in range(3)]


def _attended(value: Tensor, layers: list[nn.Linear], *, is_beside: bool) -> Tensor:
    """Let three layers take a value as queries, keys and values do."""
    boundary, columns = BlockBoundary(world()), []
    for each in layers:
        around: Any = Column(boundary) if is_beside else None
        given = value if is_beside else boundary.enter(value)
        columns.append(around(each.forward, given) if is_beside else each(given))
    q, k, v = columns
    return torch.softmax(q @ k.mT, -1) @ v


class _Noted:
    """A sum in flight, which notes what is done before it is waited for."""

    def __init__(self, work: Any, log: list[str]) -> None:
        self._work, self._log = work, log

    def wait(self) -> None:
        self._log.append("wait")
        self._work.wait()


def _both_ways(rank: int, size: int, bias: bool, autocast: bool, again: bool) -> list[str]:
    log: list[str] = []
    all_reduce: Any = dist.all_reduce

    def noted(tensor: Tensor, *args: Any, async_op: bool = False, **kwargs: Any) -> Any:
        log.append("sum" if async_op else "waited sum")
        work = all_reduce(tensor, *args, async_op=async_op, **kwargs)
        return _Noted(work, log) if async_op else work

    found = []
    for is_beside in (False, True):
        value, layers = _layers(bias)
        value.requires_grad_()
        parameters = [each for layer in layers for each in layer.parameters()]
        names = [
            name for name, layer in zip("qkv", layers, strict=True) for _ in layer.parameters()
        ]
        for name, each in zip(names, parameters, strict=True):
            each.register_post_accumulate_grad_hook(lambda _, name=name: log.append(name))
        log.clear()
        dist.all_reduce = noted
        try:
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast, cache_enabled=False):
                out = _attended(value * 1, layers, is_beside=is_beside)
            loss = out.float().square().sum()
            if again:
                (first,) = torch.autograd.grad(loss, value, create_graph=True)
                loss = first.square().sum()
            loss.backward()
        finally:
            dist.all_reduce = all_reduce
        found.append([out.detach(), value.grad, *(each.grad for each in parameters)])
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other), (one - other).abs().max()
    return log


@pytest.mark.sample("True-True")
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("autocast", [False, True])
def test_a_weight_gets_its_gradient_while_that_of_its_input_is_summed(
    bias: bool, autocast: bool
) -> None:
    """To the bit what it gets before the sum. Keys and values have theirs by then."""
    for log in run_ranks(_both_ways, 2, bias, autocast, False):
        assert sorted(log[: 2 * (1 + bias)]) == sorted("kv" * (1 + bias))
        assert log[2 * (1 + bias) :] == ["sum", *"q" * (1 + bias), "wait"]


@pytest.mark.full
def test_a_gradient_of_a_gradient_goes_through_the_sum_and_the_product() -> None:
    for log in run_ranks(_both_ways, 2, True, False, True):
        assert "waited sum" in log


def _halves(rank: int, size: int) -> tuple[int, int, bool]:
    value, (layer, *_) = _layers(bias=True)
    value.requires_grad_()
    out = Column(BlockBoundary(world()))(layer.forward, value * 1)
    graph, seed = StageGraph.of((value,), (out,)), torch.ones_like(out)
    with FlopCounterMode(display=False) as first:
        _, later = backward_inputs(graph, (seed,))
    with FlopCounterMode(display=False) as second:
        later.run()
    return first.get_total_flops(), second.get_total_flops(), layer.weight.grad is not None


@pytest.mark.full
def test_halves_of_a_backward_pass_compute_each_product_once() -> None:
    one = 2 * 2 * 3 * 8 * 4
    assert run_ranks(_halves, 2) == [(one, one, True)] * 2


def _written_products(rank: int, size: int) -> list[tuple[Tensor | None, ...]]:
    found: list[tuple[Tensor | None, ...]] = []
    for is_beside in (False, True):
        layer = nn.Linear(6, 5, dtype=torch.float64)
        nn.init.constant_(layer.weight, 0.1 * (rank + 1))
        nn.init.constant_(layer.bias, 0.2)
        value = _input(7, (2, 3, 6)).requires_grad_()
        both = collectives.reduce_gradient_beside(value, layer.weight, layer.bias, world())
        assert both is not None
        product = both[1] if is_beside else layer(collectives.reduce_gradient(value, world()))
        product *= 2
        product[product > 0.5] = 0.0
        product.square().sum().backward()
        found.append((product.detach(), value.grad, layer.weight.grad, layer.bias.grad))
    return found


def test_a_product_may_be_written_to_in_place() -> None:
    for alone, beside in run_ranks(_written_products, 2):
        torch.testing.assert_close(beside, alone)


def _gather_by_two_groups(rank: int, size: int) -> Tensor:
    for _ in range(2):  # of a proof, and of the run
        group = dist.new_group(range(size))
        mesh = collectives.TensorGroup(group, torch.device("cpu")).mesh
        doubled: Any = 2 * DTensor.from_local(_input(rank), mesh, [Shard(0)])
        whole = doubled.redistribute(placements=[Replicate()]).to_local()
        dist.destroy_process_group(group)
    return whole


def test_a_mesh_is_not_that_of_a_group_that_is_gone() -> None:
    for whole in run_ranks(_gather_by_two_groups, 2):
        torch.testing.assert_close(whole, 2 * torch.cat([_input(0), _input(1)]))
