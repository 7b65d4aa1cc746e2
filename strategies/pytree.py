"""Nested values: flattening to leaves and rebuilding, and walking the containers of a batch.

``take_apart`` flattens a value and returns a function that rebuilds it from other leaves.
``open_container`` opens one container at a time, with the path of each member for messages.
"""

import copy
import dataclasses
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from enum import Enum
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from boltmesh.errors import ConfigError
from boltmesh.strategies.torch_compat.tensors import open_one_level

Build = Callable[[Sequence[Any]], Any]
"""Builds a value of the same nesting from as many leaves."""

CONSTANTS = (
    *(int, float, complex, bool, str, bytes, type, type(None), Enum),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size),
)

MUTABLE_FREE = (Tensor, int, float, bool, str, type(None))
"""Immutable leaves: a tuple of these may be returned twice."""


def take_apart(value: Any) -> tuple[list[Any], Build]:
    """Return the leaves of a nested value in a fixed order, and a function that rebuilds it.

    Opens tuples, lists, mappings, named tuples, dataclasses and every class that is registered
    with torch's pytree, as outputs of Hugging Face models are. Everything else is a leaf.
    """
    if isinstance(value, MUTABLE_FREE):
        return [value], _first
    close: Build
    kind = type(value)
    if kind is tuple or kind is list:  # the most frequent kinds, for which torch takes long
        children, close = list(value), kind
    elif kind is dict:
        children, close = list(value.values()), partial(_keyed_by, list(value))
    elif dataclasses.is_dataclass(value) and not isinstance(value, (type, dict)):
        names = [each.name for each in dataclasses.fields(value)]
        children = [getattr(value, name) for name in names]

        empty = _with_fields(value, names, [None] * len(names))
        close = partial(_with_fields, empty, names)
    else:
        opened = open_one_level(value)
        if opened is not None:
            children, close = opened
        elif isinstance(value, Mapping):
            children, close = list(value.values()), partial(close_mapping, value)
        else:
            return [value], _first
    taken = [take_apart(each) for each in children]

    builders = [(len(inner), rebuild) for inner, rebuild in taken]  # drops the original values
    return [leaf for inner, _ in taken for leaf in inner], partial(_built, builders, close)


def _built(builders: Sequence[tuple[int, Build]], close: Build, leaves: Sequence[Any]) -> Any:
    parts, start = [], 0
    for count, rebuild in builders:
        parts.append(rebuild(leaves[start : start + count]))
        start += count
    return close(parts)


def tensors_in(value: Any) -> list[Tensor]:
    """Return the tensors of a nested value, in the order of :func:`take_apart`."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, MUTABLE_FREE):
        return []
    kind = type(value)
    if kind is tuple or kind is list:
        return [leaf for each in value for leaf in tensors_in(each)]
    if kind is dict:
        return [leaf for each in value.values() for leaf in tensors_in(each)]
    return [leaf for leaf in take_apart(value)[0] if isinstance(leaf, Tensor)]


def replace_tensors(value: Any, replace: Callable[[Tensor], Any]) -> Any:
    """Return the same nesting with other tensors; the same object if none is replaced."""
    if isinstance(value, Tensor):
        return replace(value)
    leaves, build = take_apart(value)
    made = [replace(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    return value if all(a is b for a, b in zip(leaves, made, strict=True)) else build(made)


def own_arguments(arguments: Any, written: Collection[int] | None = None) -> Any:
    """Return arguments of a step that one run of it may change: others do not see that.

    Containers are new, and objects of other classes shallow copies.

    Args:
        arguments: Nested values.
        written: Which leaves are copied if they are tensors, in the order of :func:`take_apart`;
            None copies all.
    """
    leaves, build = take_apart(arguments)
    copies: dict[int, Tensor] = {}
    made = []
    for at, leaf in enumerate(leaves):
        if not isinstance(leaf, Tensor):
            made.append(leaf if is_constant(leaf) else _copy(leaf))
        elif written is None or at in written:
            if id(leaf) not in copies:
                copies[id(leaf)] = leaf.detach().clone().requires_grad_(leaf.requires_grad)
            made.append(copies[id(leaf)])
        else:
            made.append(leaf)
    return build(made)


def _copy(value: Any) -> Any:
    try:
        return copy.copy(value)
    except TypeError:  # a lock or a generator, of which there is one
        return value


def nesting(value: Any) -> Any:
    """Return the classes of a value and of what lists, tuples and mappings hold, and their keys."""
    if isinstance(value, Mapping):
        return type(value), tuple((key, nesting(each)) for key, each in value.items())
    if isinstance(value, list | tuple):
        return type(value), tuple(map(nesting, value))
    return type(value)


def is_constant(value: Any) -> bool:
    """Whether a leaf contains no tensor and is the same on every rank: a number, a string."""
    return isinstance(value, CONSTANTS)


def is_immutable(value: Any) -> bool:
    """Whether a value cannot be changed by code that receives it."""
    if isinstance(value, MUTABLE_FREE):
        return True
    return type(value) is tuple and all(map(is_immutable, value))


def close_mapping(like: Mapping[Any, Any], members: Sequence[Any]) -> Any:
    """Return a mapping of the class of ``like`` if it can be built, else a dict."""
    changed = dict(zip(like, members, strict=True))
    if isinstance(getattr(like, "data", None), dict):  # a UserDict, with its other attributes
        whole = copy.copy(like)
        vars(whole)["data"] = changed
        return whole
    if isinstance(like, dict):  # with its attributes, whatever its class is made of
        whole = copy.copy(like)
        dict.update(whole, changed)
        return whole
    try:
        return type(like)(changed)  # type: ignore[call-arg]
    except TypeError:
        return changed


def _with_fields(value: Any, names: Sequence[str], made: Sequence[Any]) -> Any:
    # Not dataclasses.replace: __post_init__ may compute or check the batch as a whole.
    changed = copy.copy(value)
    for name, each in zip(names, made, strict=True):
        object.__setattr__(changed, name, each)
    return changed


def _keyed_by(keys: Sequence[Any], members: Sequence[Any]) -> dict[Any, Any]:
    return dict(zip(keys, members, strict=True))


def _first(leaves: Sequence[Any]) -> Any:
    return leaves[0]


Member = tuple[str, Any]
"""Path of a value as a Python expression, and the value."""

Close = Callable[[list[Any]], Any]
"""Builds a container like the opened one, with these members."""

_CONSTANT = (str, bytes, int, float, complex, type(None))
_PLAIN = (Tensor, type, *_CONSTANT)
_DEEPEST_LOOK = 4


def open_container(value: Any, path: str) -> tuple[list[Member], Close] | None:
    """Return the members of a container and a function that builds one like it; else None.

    Opens lists, tuples, named tuples, dataclasses, mappings (Hugging Face's ``BatchEncoding`` is
    one) and every class that is registered with torch's pytree.

    Args:
        value: Part of a batch.
        path: Its path in the batch, for messages.
    """
    if isinstance(value, (*_PLAIN, PackedSequence)):
        return None
    if type(value) is dict:
        return _keyed(value, path), lambda made: dict(zip(value, made, strict=True))
    if isinstance(value, list | tuple):
        names: Sequence[Any] = getattr(value, "_fields", range(len(value)))
        pairs = zip(names, value, strict=True)
        return [(f"{path}[{name}]", each) for name, each in pairs], lambda made: like(value, made)
    if dataclasses.is_dataclass(value) and not isinstance(value, Mapping):
        fields = [each.name for each in dataclasses.fields(value) if hasattr(value, each.name)]
        members = [(f"{path}.{name}", getattr(value, name)) for name in fields]
        return members, lambda made: _with_fields(value, fields, made)
    opened = open_one_level(value)
    if opened is not None:
        children, close = opened
        return [(f"{path}[{index}]", each) for index, each in enumerate(children)], close
    if isinstance(value, Mapping):
        return _keyed(value, path), lambda made: close_mapping(value, made)
    return None


def like(value: Any, items: Sequence[Any]) -> Any:
    """Return a list or tuple of the class of ``value``."""
    return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)


def is_constant_list(value: Any) -> bool:
    """Whether a list holds only strings, numbers and None; long ones are not searched."""
    return isinstance(value, list | tuple) and all(isinstance(each, _CONSTANT) for each in value)


def leaves(value: Any, path: str = "batch") -> Iterator[Member]:
    """Yield the leaves with their paths; a list of strings or numbers is one leaf."""
    opened = None if is_constant_list(value) else open_container(value, path)
    if opened is None:
        yield path, value
        return
    for name, each in opened[0]:
        yield from leaves(each, name)


def refuse_uncuttable(value: Any, path: str) -> None:
    """Refuse a leaf that has rows but cannot be split, or that contains tensors.

    Raises:
        ConfigError: With its path in the batch, its type and the alternative.
    """
    if isinstance(value, PackedSequence):
        raise ConfigError(
            f"{path} is a PackedSequence, in which the rows of a batch are mixed, so it cannot be "
            f"cut into microbatches. Give the padded tensor and the lengths, and pack them inside "
            f"of a layer, or use microbatches=1."
        )
    if isinstance(value, Tensor):
        if value.layout != torch.strided or value.is_nested:
            kind = "nested" if value.is_nested else str(value.layout).removeprefix("torch.")
            raise ConfigError(
                f"{path} is a {kind} tensor, which cannot be cut into microbatches. Give a dense "
                f"one, padded where rows differ in length, or use microbatches=1."
            )
        return
    if not isinstance(value, (*_PLAIN, list, tuple)) and _hides_tensors(value):
        raise ConfigError(
            f"{path} is a {type(value).__module__}.{type(value).__qualname__} with tensors inside, "
            f"and which of its rows belong to which sample is unknown. Give a dict or dataclass "
            f"of tensors, register the class with torch.utils._pytree, or use microbatches=1."
        )


def _keyed(value: Mapping[Any, Any], path: str) -> list[Member]:
    return [(f"{path}[{key!r}]", each) for key, each in value.items()]


def _hides_tensors(value: Any) -> bool:
    return any(isinstance(each, Tensor | PackedSequence) for each in hidden_members(value))


def hidden_members(value: Any, depth: int = 0) -> Iterator[Any]:
    """Yield the tensors, numbers and strings within an object of any class, and what is too deep.

    Args:
        value: No container that ``take_apart`` opens.
        depth: How deep the value lies within an object.
    """
    if depth > _DEEPEST_LOOK or isinstance(value, (Tensor, PackedSequence, *_PLAIN)):
        yield value
        return
    if isinstance(value, Mapping):
        inner = list(value.values())
    elif isinstance(value, list | tuple | set | frozenset):
        inner = list(value)
    else:
        slots = [name for kind in type(value).__mro__ for name in getattr(kind, "__slots__", ())]
        inner = [*getattr(value, "__dict__", {}).values()]
        inner += [getattr(value, name, None) for name in slots if name != "__dict__"]
    for each in inner:
        yield from hidden_members(each, depth + 1)
