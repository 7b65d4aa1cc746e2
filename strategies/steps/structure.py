"""Takes nested values apart into leaves, and builds the same nesting from other leaves."""

import copy
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from functools import partial
from typing import Any

import torch
from torch import Tensor

from boltmesh.strategies.torch_compat import open_one_level

Build = Callable[[Sequence[Any]], Any]
"""Makes a new value of the same nesting from as many leaves."""

CONSTANTS = (
    *(int, float, complex, bool, str, bytes, type, type(None), Enum),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size),
)

MUTABLE_FREE = (Tensor, int, float, bool, str, type(None))
"""Leaves of which a tuple may be given out twice: nobody can change it between."""


def take_apart(value: Any) -> tuple[list[Any], Build]:
    """Return the leaves of a nested value in a fixed order, and what builds it again.

    Opens tuples, lists, mappings, named tuples, dataclasses and every class that is registered
    with torch's pytree, as outputs of Hugging Face models are. Everything else is a leaf.
    """
    if isinstance(value, MUTABLE_FREE):
        return [value], _first
    close: Build
    if dataclasses.is_dataclass(value) and not isinstance(value, (type, dict)):
        names = [each.name for each in dataclasses.fields(value)]
        children = [getattr(value, name) for name in names]

        empty = _close_dataclass(value, names, [None] * len(names))
        close = partial(_close_dataclass, empty, names)
    else:
        opened = open_one_level(value)
        if opened is not None:
            children, close = opened
        elif isinstance(value, Mapping):
            children, close = list(value.values()), partial(close_mapping, value)
        else:
            return [value], _first
    taken = [take_apart(each) for each in children]

    builders = [(len(inner), rebuild) for inner, rebuild in taken]  # without what they were made of

    def build(leaves: Sequence[Any]) -> Any:
        parts, start = [], 0
        for count, rebuild in builders:
            parts.append(rebuild(leaves[start : start + count]))
            start += count
        return close(parts)

    return [leaf for inner, _ in taken for leaf in inner], build


def tensors_in(value: Any) -> list[Tensor]:
    """Return the tensors of a nested value, in the order of :func:`take_apart`."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, MUTABLE_FREE):
        return []
    return [leaf for leaf in take_apart(value)[0] if isinstance(leaf, Tensor)]


def replace_tensors(value: Any, replace: Callable[[Tensor], Any]) -> Any:
    """Return the same nesting with other tensors; the same object where none is replaced."""
    if isinstance(value, Tensor):
        return replace(value)
    leaves, build = take_apart(value)
    made = [replace(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    return value if all(a is b for a, b in zip(leaves, made, strict=True)) else build(made)


def is_constant(value: Any) -> bool:
    """Whether a leaf holds no tensor and means the same wherever it is: a number, a string."""
    return isinstance(value, CONSTANTS)


def is_immutable(value: Any) -> bool:
    """Whether nobody who is handed this value can change what the next one sees of it."""
    if isinstance(value, MUTABLE_FREE):
        return True
    return type(value) is tuple and all(map(is_immutable, value))


def close_mapping(like: Mapping[Any, Any], members: Sequence[Any]) -> Any:
    """Return a mapping of the class of ``like`` where that can be made, else a dict."""
    changed = dict(zip(like, members, strict=True))
    if isinstance(getattr(like, "data", None), dict):  # a UserDict, with what else it carries
        whole = copy.copy(like)
        vars(whole)["data"] = changed
        return whole
    try:
        return type(like)(changed)  # type: ignore[call-arg]
    except TypeError:
        return changed


def _close_dataclass(like: Any, names: list[str], parts: Sequence[Any]) -> Any:
    made = copy.copy(like)
    for name, part in zip(names, parts, strict=True):
        object.__setattr__(made, name, part)
    return made


def _first(leaves: Sequence[Any]) -> Any:
    return leaves[0]
