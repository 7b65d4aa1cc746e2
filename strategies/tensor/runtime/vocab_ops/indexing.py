"""Square brackets on logits: positions are chosen on each rank, if all their tokens are kept."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from boltmesh.strategies.tensor.runtime.vocab_ops.elementwise import view_dim
from boltmesh.strategies.tensor.runtime.vocab_tensor import (
    NO_RULE,
    VocabularyTensor,
    rule_for,
    unwrap,
    wrap,
)

_EVERYTHING = slice(None)


@rule_for("__getitem__")
def get_item(func: Callable[..., Any], divided: Any, index: Any) -> Any:
    """Choose positions."""
    if not isinstance(divided, VocabularyTensor) or _holds_divided(index):
        return NO_RULE
    items = _expanded(divided, index)
    if items is None:
        return NO_RULE
    if any(isinstance(each, Tensor) for each in items):
        dim = _dim_behind_tensors(divided, items)
        if dim is None:
            return NO_RULE
    else:
        found = view_dim(lambda outline: outline[tuple(items)], divided)
        if found is None:
            return NO_RULE
        dim = found[0]
    return wrap(unwrap(divided)[tuple(items)], divided.vocabulary, dim)


@rule_for("__setitem__")
def set_item(func: Callable[..., Any], divided: Any, index: Any, value: Any) -> Any:
    """Write a number to all tokens of some positions."""
    if not isinstance(divided, VocabularyTensor) or isinstance(value, Tensor):
        return NO_RULE
    items = None if _holds_divided(index) else _expanded(divided, index)
    if items is None:
        return NO_RULE
    if any(isinstance(each, Tensor) for each in items):
        dim = _dim_behind_tensors(divided, items)
    else:
        dim = (view_dim(lambda outline: outline[tuple(items)], divided) or (None,))[0]
    if dim is None:
        return NO_RULE
    part = unwrap(divided)
    part[tuple(items)] = value
    return wrap(part, divided.vocabulary, divided.divided_dim)


@rule_for("index_select")
def index_select(
    func: Callable[..., Any], divided: Any, dim: int, index: Tensor, **kwargs: Any
) -> Any:
    """Choose positions of another dimension than the divided one."""
    if not isinstance(divided, VocabularyTensor) or dim % divided.dim() == divided.divided_dim:
        return NO_RULE
    part = func(unwrap(divided), dim, index)
    return wrap(part, divided.vocabulary, divided.divided_dim)


def _holds_divided(index: Any) -> bool:
    items = index if isinstance(index, (tuple, list)) else [index]
    return any(isinstance(each, VocabularyTensor) for each in items)


def _expanded(divided: VocabularyTensor, index: Any) -> list[Any] | None:
    """An index with its ellipsis spelled out; None for kinds that are left to torch."""
    items = list(index) if isinstance(index, tuple) else [index]
    if not all(
        each is None
        or each is Ellipsis
        or isinstance(each, slice)
        or (isinstance(each, int) and not isinstance(each, bool))
        or isinstance(each, Tensor)
        for each in items
    ):
        return None
    missing = divided.dim() - sum(_consumed(each) for each in items)
    places = [place for place, each in enumerate(items) if each is Ellipsis]
    if len(places) > 1 or missing < 0:
        return None
    place = places[0] if places else len(items)
    return [*items[:place], *[_EVERYTHING] * missing, *items[place + 1 :]]


def _consumed(item: Any) -> int:
    """How many dimensions an item of an index stands for."""
    if item is None or item is Ellipsis:
        return 0
    return item.dim() if _is_mask(item) else 1


def _is_mask(item: Any) -> bool:
    return isinstance(item, Tensor) and item.dtype in {torch.bool, torch.uint8}


def _dim_behind_tensors(divided: VocabularyTensor, items: list[Any]) -> int | None:
    """Where the divided dimension is after tensors that stand next to each other chose positions.

    Their dimensions take the place of the first; apart from each other they would go to the front.
    """
    tensors = [each for each in items if isinstance(each, Tensor)]
    if any(each.dim() == 0 for each in tensors):
        return None
    chosen = max(1 if _is_mask(each) else each.dim() for each in tensors)
    seen, made, found = 0, 0, None
    has_begun, has_ended = False, False
    for item in items:
        if isinstance(item, Tensor):
            if has_ended:
                return None
            made += 0 if has_begun else chosen
            has_begun = True
        elif not isinstance(item, int):
            has_ended = has_begun
            if item is not None and seen == divided.divided_dim:
                if item != _EVERYTHING:
                    return None
                found = made
            made += 1
        seen += _consumed(item)
    return found
