"""Each border of the tensor axis against the sum over ranks written out in one process."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from boltmesh.strategies.tensor.runtime import collectives
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


def _every_border(rank: int, world_size: int) -> dict[tuple[str, int], tuple[Tensor, Tensor]]:
    group = world()
    results = {}
    for name in NAMES:
        for dim in (0, 1):
            function = getattr(collectives, name)
            dims = () if name.startswith("reduce") else (dim,)

            def border(value: Tensor, function: Callable = function, dims: tuple = dims) -> Tensor:
                return function(value, group, *dims)

            results[name, dim] = _both(border, _input(rank), 10 + rank)
    return results


def _parts(value: Tensor, size: int, dim: int) -> list[Tensor]:
    return list(value.chunk(size, dim))


@pytest.fixture(scope="module", params=[1, 2])
def by_rank(request: pytest.FixtureRequest) -> list[dict]:
    return run_ranks(_every_border, request.param)


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("name", NAMES)
def test_a_border_and_its_backward_are_what_they_are_said_to_be(
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


def test_gradients_of_gradients_pass_the_borders() -> None:
    ((column, row),) = run_ranks(_penalty, 1)
    parts = run_ranks(_penalty, 2)
    torch.testing.assert_close(torch.cat([each[0] for each in parts]), column)
    torch.testing.assert_close(torch.cat([each[1] for each in parts]), row)
