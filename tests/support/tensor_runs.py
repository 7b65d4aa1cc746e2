"""Runs a model by a plan beside the same model whole, in the ranks of a test."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from boltmesh.strategies.blocks import find_blocks
from boltmesh.strategies.tensor.analysis.analyse import analyse
from boltmesh.strategies.tensor.plan import TensorPlan
from boltmesh.strategies.tensor.planning import make_plan
from boltmesh.strategies.tensor.runtime import collectives
from boltmesh.strategies.tensor.runtime.apply import AppliedPlan, apply_plan
from boltmesh.strategies.tensor.runtime.collectives import TensorGroup
from tests.support.tensor_layers import MODELS, more
from tests.support.tensor_models import example

Loss = Callable[[nn.Module], Tensor]


def world() -> TensorGroup:
    """All ranks of the test as one tensor group."""
    group = dist.group.WORLD
    assert group is not None
    return TensorGroup(group, torch.device("cpu"))


def built(name: str, dtype: torch.dtype = torch.float32) -> tuple[nn.Module, Loss]:
    """A model by name, alike on every rank, in training mode, and what gives its loss."""
    made = more(name) if name in MODELS else example(name)
    for key, value in made.batch.items():
        made.batch[key] = value.to(dtype) if value.is_floating_point() else value
    return made.module.train().to(dtype), made.loss


def planned(model: nn.Module, loss: Loss, size: int, backend: str) -> TensorPlan:
    """The plan of a model, all of whose blocks run by one backend."""
    blocks = find_blocks(model)
    return _run_by(backend, make_plan(analyse(model, loss, blocks=blocks), size), blocks)


def _run_by(backend: str, plan: TensorPlan, blocks: Iterable[str]) -> TensorPlan:
    return replace(plan, backends=dict.fromkeys((*blocks, ""), backend))  # type: ignore[arg-type]


@lru_cache(maxsize=1)
def _plan(name: str, dtype: torch.dtype, size: int) -> tuple[TensorPlan, tuple[str, ...]]:
    """The plan of a model by name, whatever runs it, and its blocks."""
    model, loss = built(name, dtype)
    blocks = find_blocks(model)
    return make_plan(analyse(model, loss, blocks=blocks), size), tuple(blocks)


@lru_cache(maxsize=1)
def _whole(name: str, dtype: torch.dtype) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss and the gradients of a model by name, run whole."""
    model, loss = built(name, dtype)
    value = loss(model)
    value.backward()
    return value.detach(), gradients(model)


def applied(name: str, backend: str, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    """A model that runs by its plan: the applied plan, the model, its loss."""
    model, loss = built(name, dtype)
    plan = replace(_run_by(backend, *_plan(name, dtype, dist.get_world_size())), **changes)
    return apply_plan(model, plan, world()), model, loss


def gradients(module: nn.Module, plan: AppliedPlan | None = None) -> dict[str, Tensor]:
    """Whole gradients by first name. Collective with a plan."""
    found = {}
    for name, parameter in module.named_parameters():
        if parameter.grad is not None:
            is_part = plan is not None and name in plan.plan.sharded
            found[name] = plan.join(name, parameter.grad) if is_part else parameter.grad.clone()
    return found


@dataclass
class Difference:
    """Of a planned step from the whole one."""

    loss: float
    gradient: float
    """The largest, relative to that gradient's largest element, or to a thousandth of all's."""
    where: str
    missing: list[str]
    forward: dict[str, int]
    """Collectives."""
    backward: dict[str, int]


def difference(
    mine: tuple[Tensor, dict[str, Tensor]], whole: tuple[Tensor, dict[str, Tensor]]
) -> Difference:
    """Compare a loss and gradients with those of the whole model."""
    largest = max(each.abs().max().item() for each in whole[1].values())
    worst, where = 0.0, ""
    for name, expected in whole[1].items():
        if name in mine[1]:
            scale = max(expected.abs().max().item(), 1e-3 * largest)
            error = (mine[1][name] - expected).abs().max().item() / scale
            if not error <= worst:
                worst, where = error, name
    missing = sorted(whole[1].keys() ^ mine[1].keys())
    return Difference((mine[0] - whole[0]).abs().item(), worst, where, missing, {}, {})


@contextmanager
def counted() -> Iterator[Counter[str]]:
    """Count the collectives that a divided model calls for."""
    counts: Counter[str] = Counter()
    homes = {
        "all_reduce": dist,
        "all_gather_single": collectives,
        "reduce_scatter_single": collectives,
    }
    before = {name: getattr(home, name) for name, home in homes.items()}

    def counting(name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            counts[name] += 1
            return before[name](*args, **kwargs)

        return call

    for name, home in homes.items():
        setattr(home, name, counting(name))
    try:
        yield counts
    finally:
        for name, home in homes.items():
            setattr(home, name, before[name])


def compared(name: str, backend: str, dtype: torch.dtype = torch.float32) -> Difference:
    """Run one step whole and one by the plan."""
    whole = _whole(name, dtype)
    plan, model, loss = applied(name, backend, dtype)
    with counted() as forward:
        value = loss(model)
    with counted() as backward:
        value.backward()
    found = difference((value.detach(), gradients(model, plan)), whole)
    found.forward, found.backward = dict(forward), dict(backward)
    return found


def matrix(
    rank: int, world_size: int, pairs: list[tuple[str, str]], dtype: torch.dtype
) -> dict[tuple[str, str], Difference | str]:
    """Compare many models in one start of the ranks; an error stands for itself."""
    return {pair: _compared_or_error(*pair, dtype) for pair in pairs}


def _compared_or_error(name: str, backend: str, dtype: torch.dtype) -> Difference | str:
    try:
        return compared(name, backend, dtype)
    except (RuntimeError, NotImplementedError) as error:
        return f"{type(error).__name__}: {error}"
