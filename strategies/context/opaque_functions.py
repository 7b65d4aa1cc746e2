"""Functions that bypass tensor subclasses: ``autograd.Function`` and ``flex_attention``.

Within ``functions_watched`` a user's ``Function`` runs like any other function of cut tensors.

Within ``flex_attention_watched`` the operator gets this rank's queries, and the keys that the mask
lets them attend to. The mask is whole on every rank. Keys are fetched by its blocks that are not
empty, and its function gets the positions of queries and keys in the whole sequence.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from boltmesh.errors import UnsupportedError
from boltmesh.strategies.context.attention import fetch_keys, is_at_place, positions_of
from boltmesh.strategies.context.dispatch import run_by_answer
from boltmesh.strategies.context.positions import Intervals, merged
from boltmesh.strategies.context.seq_shard import SeqShard, make_all_whole
from boltmesh.strategies.torch_compat.autograd import CHECKPOINT_INPUTS, LinearMap
from boltmesh.strategies.torch_compat.flex_attention import (
    Operator,
    blocks_shown,
    flex_attention_by,
    mask_of_parts,
    scores_of_parts,
)
from boltmesh.strategies.torch_compat.tensors import is_fake, subclasses_unasked


@contextmanager
def flex_attention_watched() -> Iterator[list[None]]:
    """Context in which ``flex_attention`` accepts cut tensors; yields a list of calls."""
    calls: list[None] = []

    def run(operator: Operator, *args: Any) -> Any:
        calls.append(None)
        return _run(operator, *args)

    with flex_attention_by(run):
        yield calls


def _run(
    operator: Operator, query: Any, key: Any, value: Any, score: Any, mask: Any, *options: Any
) -> Any:
    several = query, key, value
    if not all(map(is_at_place, several)) or key.positions.parts != value.positions.parts:
        whole = make_all_whole(several, "keys of flex_attention")
        return _attended(operator, *whole, score, mask, *options)
    state = query.state
    wants = [_shown(mask, own, key.shape[-2]) for own in query.positions.parts]
    own, have = query.positions.parts[state.rank], wants[state.rank]
    with subclasses_unasked():
        keys, values = fetch_keys(key, value, wants)
        local = query.local
        if not own:
            shape = (*local.shape[:-1], values.shape[-1])
            edges = 0 * (local.sum() + keys.sum() + values.sum())
            rest = local.new_zeros(local.shape[:-1])
            results: tuple[Tensor, ...] = local.new_zeros(shape) + edges, rest, rest
        else:
            if not is_fake(local):
                at = positions_of(own, local.device), positions_of(have, local.device)
                mask = state.once(mask[3], ("flex", own, have), partial(mask_of_parts, mask, *at))
                score = scores_of_parts(score, *at)
            results = _attended(operator, local, keys, values, score, mask, *options)
    out, *sums = results
    rows = out.ndim - 2
    return query.like(out, dim=rows), *(
        query.like(each, dim=rows) if each.shape == out.shape[:-1] else each for each in sums
    )


def _attended(operator: Operator, query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> Any:
    if not is_fake(query):
        return operator(query, key, value, *rest)
    # Looks along the same dims, and the analysis knows it.
    out = functional.scaled_dot_product_attention(query, key, value, enable_gqa=True)
    sums = query.new_empty(query.shape[:-1], dtype=torch.float32)
    return out, sums, sums


def _shown(mask: tuple[Any, ...], own: Intervals, length: int) -> Intervals:
    """Return the keys that some queries may attend to; if there are none, the first key."""
    if not own:
        return ()
    if is_fake(mask[3]):
        return merged([(0, length)])
    shown, queries, keys = blocks_shown(mask)
    rows = torch.zeros(len(shown), dtype=torch.bool, device=shown.device)
    for start, stop in own:
        rows[start // queries : (stop - 1) // queries + 1] = True
    blocks = shown[rows].any(0).nonzero().flatten().tolist()
    intervals = merged((each * keys, min((each + 1) * keys, length)) for each in blocks)
    return intervals or ((0, 1),)


_APPLY: Any = vars(torch.autograd.Function)["apply"]


def _apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
    """Call ``Function.apply`` of torch, which is a function of Python or of C."""
    return _APPLY.__get__(None, cls)(*args, **kwargs)


def _applied(cls: Any, *args: Any, **kwargs: Any) -> Any:
    """Replaces ``Function.apply``, so that cut tensors are handled."""
    if cls is CHECKPOINT_INPUTS or not any(isinstance(each, SeqShard) for each in args):
        return _apply(cls, *args, **kwargs)
    if cls.__name__ in {"CheckpointFunction", "CheckpointFunctionAttribute"}:
        raise UnsupportedError(
            "Reentrant activation checkpointing hides what a block does from the context axis. "
            "Use torch.utils.checkpoint.checkpoint(..., use_reentrant=False), "
            "gradient_checkpointing_enable({'use_reentrant': False}) of Hugging Face's models, or "
            "activation_checkpointing='full' of the strategy."
        )
    if cls is LinearMap:
        # A collective of the tensor axis along another dim than the sequence, for which there is
        # ``SequenceParts``: it goes in and comes out as this rank's positions.
        first, *others = args
        return first.like(_apply(cls, first.local, *others))
    return run_by_answer(_function_of(cls), args, kwargs)


@cache
def _function_of(cls: Any) -> Any:
    """Return a function that calls ``apply``: one for each class, as answers are cached by it."""

    def call(*args: Any, **kwargs: Any) -> Any:
        return _apply(cls, *args, **kwargs)

    call.__name__ = cls.__name__
    call.has_own_backward = True  # type: ignore[attr-defined]
    return call


@contextmanager
def functions_watched() -> Iterator[None]:
    """Context in which a user's ``autograd.Function`` accepts cut tensors."""
    before = torch.autograd.Function.__dict__.get("apply")
    torch.autograd.Function.apply = classmethod(_applied)  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        if before is None:
            del torch.autograd.Function.apply
        else:
            torch.autograd.Function.apply = before  # type: ignore[method-assign]
