"""Nested values as torch opens them."""

from collections.abc import Callable, Sequence
from typing import Any

from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils._pytree import tree_leaves as tree_leaves
from torch.utils._pytree import tree_map as tree_map
from torch.utils._pytree import tree_map_only as tree_map_only


def open_one_level(value: Any) -> tuple[list[Any], Callable[[Sequence[Any]], Any]] | None:
    """Return the children of a value that pytree can open, and what closes it; None for a leaf."""
    children, spec = tree_flatten(value, is_leaf=lambda each: each is not value)
    if len(children) == 1 and children[0] is value:
        return None
    return children, lambda parts: tree_unflatten(list(parts), spec)
