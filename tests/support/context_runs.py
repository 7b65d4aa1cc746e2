"""A model by one process beside the same model cut, in the ranks of a test."""

import copy
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from boltmesh.strategies.blocks import find_blocks
from boltmesh.strategies.context.entries import EntryHooks, find_entries
from boltmesh.strategies.context.exchange import ContextGroup
from boltmesh.strategies.context.opaque_functions import flex_attention_watched, functions_watched
from boltmesh.strategies.context.seq_shard import ContextState
from boltmesh.strategies.context.tokenwise import TokenwiseModules, find_tokenwise
from boltmesh.strategies.tensor.analysis.analyse import analyse
from tests.support.context_models import batch_of, built


def world() -> ContextGroup:
    """All ranks of the test as one context group."""
    group = dist.group.WORLD
    assert group is not None
    return ContextGroup(group, torch.device("cpu"))


def apart(one: Tensor, other: Tensor) -> float:
    """The largest difference; infinite where anything is no number."""
    found = float((one.double() - other.double()).abs().max()) if one.numel() else 0.0
    return found if found == found else float("inf")


def compare(
    name: str, *, length: int = 26, steps: int = 2, double: bool = False, **options: Any
) -> dict[str, Any]:
    """Train a model whole and cut; return how far apart losses, gradients and parameters are."""
    torch.manual_seed(1)
    one = built(name)
    return compare_model(one, [
        batch_of(name, length + 2 * step, torch.Generator().manual_seed(2 + step))
        for step in range(steps)
    ], double=double, **options)  # fmt: skip


def compare_model(
    one: nn.Module,
    batches: list[dict[str, Tensor]],
    *,
    double: bool = False,
    tile: int | None = None,
    **options: Any,
) -> dict[str, Any]:
    """As ``compare``, for a model and its batches."""
    if double:
        one = one.double()
        batches = [
            {
                key: each.double() if each.is_floating_point() else each
                for key, each in batch.items()
            }
            for batch in batches
        ]
    cut = copy.deepcopy(one)
    blocks = find_blocks(cut)
    with flex_attention_watched():
        analysis = analyse(cut, lambda model: model(batches[0]), blocks=blocks)
    entries = find_entries(cut, analysis, tuple(blocks))
    assert entries, "no sequence"
    state = ContextState(world(), **options)
    tokenwise = find_tokenwise(analysis)
    TokenwiseModules(cut, tokenwise, state, tile=tile)
    hooks = EntryHooks(cut, entries, state)
    hooks.is_on = True
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.3) for each in (one, cut)]
    worst = {"loss": 0.0, "gradient": 0.0}
    for batch in batches:
        state.take_batch(batch)
        losses = []
        for model, optimizer in zip((one, cut), optimizers, strict=True):
            optimizer.zero_grad()
            with functions_watched(), flex_attention_watched():
                loss = model(batch)
                loss.backward()
            losses.append(loss.detach())
        state.end_step()
        pairs = list(zip(one.parameters(), cut.parameters(), strict=True))
        for _, parameter in pairs:
            if parameter.grad is not None:
                dist.all_reduce(parameter.grad)
                parameter.grad /= state.group.size
        grads = [(a.grad, b.grad) for a, b in pairs]
        assert all((a is None) == (b is None) for a, b in grads)
        found = [(a, b) for a, b in grads if a is not None and b is not None]
        scale = max(float(a.abs().max()) for a, _ in found)
        worst["loss"] = max(worst["loss"], apart(*losses) / float(losses[0].abs()))
        worst["gradient"] = max(worst["gradient"], *(apart(a, b) / scale for a, b in found))
        for optimizer in optimizers:
            optimizer.step()
    pairs = list(zip(one.parameters(), cut.parameters(), strict=True))
    worst["parameter"] = max(apart(a, b) for a, b in pairs)
    return {**worst, "sent": dict(state.group.sent), "gathered": dict(state.gathered),
            "entries": [f"{each.module}:{each.dim}" for each in entries],
            "tokenwise": list(tokenwise)}  # fmt: skip
