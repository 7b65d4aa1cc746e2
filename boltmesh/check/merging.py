"""Makes one trace of what the ranks of a layout saw, and finds where they disagree."""

import itertools
import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from boltmesh.check.differences import Trace
from boltmesh.strategies.engine import MeshStrategy


def ranks_of_data(strategy: MeshStrategy) -> list[int] | None:
    """Return the ranks that saw different data; None for all."""
    layout = strategy.layout
    if layout.data == layout.world_size:
        return None
    return [layout.rank_at(data=each) for each in range(layout.data)]


def merge_over_ranks(trace: Trace, chosen: Sequence[int] | None) -> Trace:
    """Average what each rank saw and compare what all should hold. Collective over all ranks.

    Args:
        trace: Of this rank.
        chosen: One of each group of ranks that saw the same; None where there are no such groups.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return trace
    mine = (trace.losses, trace.gradient_norms, trace.metrics, trace.validation, trace.predictions)
    all_ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(all_ranks, mine)
    disagreement = _find_disagreement(trace.parameters)
    if chosen is not None:
        disagreement = disagreement or _find_stray(all_ranks, chosen)
        all_ranks = [all_ranks[rank] for rank in chosen]
    losses, norms, metrics, validation, predictions = zip(*all_ranks, strict=True)
    return Trace(
        losses=[mean(step) for step in zip(*losses, strict=True)],
        gradient_norms=[[each[0] for each in call] for call in zip(*norms, strict=True)],
        metrics=[mean_of_mappings(step) for step in zip(*metrics, strict=True)],
        parameters=trace.parameters,
        optimizer_state=_join_states(trace.optimizer_state),
        validation=mean_of_mappings(validation),
        predictions=interleave(predictions),
        disagreement=disagreement,
    )


def _join_states(own: dict[str, Tensor]) -> dict[str, Tensor]:
    """Add optimizer state that other ranks keep whole. Collective over all ranks."""
    names: list[list[str]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(names, sorted(own))
    common = set(names[0]).intersection(*names)
    if all(len(each) == len(common) for each in names):
        return own
    apart: list[dict[str, Tensor]] = [{} for _ in names]
    dist.all_gather_object(apart, {name: own[name] for name in own if name not in common})
    return own | {name: state for each in apart for name, state in each.items()}


def _find_stray(all_ranks: Sequence[Any], chosen: Sequence[int]) -> str | None:
    """Name the first rank that saw something else than the one of its group that is chosen."""
    for rank, (*numbers, predictions) in enumerate(all_ranks):
        first = max(each for each in chosen if each <= rank)
        *others, expected = all_ranks[first]
        if repr(numbers) != repr(others):  # as text, where NaN is itself
            return f"rank {rank} disagrees with rank {first} on losses, norms or metrics"
        pairs = itertools.zip_longest(predictions, expected)
        if not all(torch.equal(one, other) for one, other in pairs):
            return f"rank {rank} disagrees with rank {first} on predictions"
    return None


def merge_over_stages(trace: Trace, strategy: MeshStrategy) -> Trace:
    """Put together what each stage holds, and what the pipelines saw of different batches.

    Collective over all ranks.
    """
    mine = {
        "losses": trace.losses,
        "metrics": trace.metrics,
        "parameters": {
            name: each for name, each in trace.parameters.items() if strategy.holds(name)
        },
        "optimizer_state": trace.optimizer_state,
        "validation": trace.validation,
        "predictions": trace.predictions,
    }
    ranks: list[dict[str, Any]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(ranks, mine)
    merged: dict[str, dict[str, Tensor]] = {"parameters": {}, "optimizer_state": {}}
    disagreement = None
    for kind, values in merged.items():
        for rank, each in enumerate(ranks):
            for name, value in each[kind].items():
                if not torch.equal(values.setdefault(name, value), value):
                    disagreement = disagreement or f"rank {rank} disagrees on {kind} {name!r}"
    layout = strategy.layout
    firsts = [layout.rank_at(data=each) for each in range(layout.data)]
    for rank, each in enumerate(ranks):
        first = firsts[layout.coordinates(rank)["data"]]  # of those that saw the same
        for kind in ("losses", "metrics", "validation"):
            if each[kind] != ranks[first][kind]:
                disagreement = disagreement or f"rank {rank} disagrees with rank {first} on {kind}"
        pairs = zip(each["predictions"], ranks[first]["predictions"], strict=True)
        if not all(torch.equal(one, other) for one, other in pairs):
            disagreement = disagreement or f"rank {rank} disagrees with rank {first} on predictions"
    seen = [ranks[each] for each in firsts]
    return Trace(
        losses=[mean(step) for step in zip(*(each["losses"] for each in seen), strict=True)],
        gradient_norms=trace.gradient_norms,
        metrics=[
            mean_of_mappings(step) for step in zip(*(each["metrics"] for each in seen), strict=True)
        ],
        parameters={name: merged["parameters"][name] for name in trace.parameters},
        optimizer_state=merged["optimizer_state"],
        validation=mean_of_mappings(each["validation"] for each in seen),
        predictions=interleave([each["predictions"] for each in seen]),
        disagreement=disagreement,
    )


def _find_disagreement(parameters: dict[str, Tensor]) -> str | None:
    """Name the first parameter that is not the same to the bit on every rank."""
    found = None
    for name, parameter in parameters.items():
        low, high = parameter.double().clone(), parameter.double().clone()
        dist.all_reduce(low, op=dist.ReduceOp.MIN)
        dist.all_reduce(high, op=dist.ReduceOp.MAX)
        if found is None and not torch.equal(low, high):
            found = f"ranks disagree on parameter {name!r} by {(high - low).max().item():.2g}"
    return found


def interleave(ranks: Sequence[list[Tensor]]) -> list[Tensor]:
    """The first batch of each rank, then the second of each, as far as there are any."""
    turns = itertools.chain.from_iterable(itertools.zip_longest(*ranks))
    return [each for each in turns if each is not None]


def mean(values: Iterable[float]) -> float:
    """Return the mean to the last bit whatever the order; NaN of nothing."""
    values = list(values)
    return math.fsum(values) / len(values) if values else math.nan


def mean_of_mappings(mappings: Iterable[dict[str, float]]) -> dict[str, float]:
    """Return the mean of each name over the mappings that have it."""
    mappings = list(mappings)
    names = dict.fromkeys(name for each in mappings for name in each)
    return {name: mean(each[name] for each in mappings if name in each) for name in names}
