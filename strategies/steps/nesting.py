"""Opens the containers that batches are nested in, and closes them over other members."""

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from boltmesh.errors import ConfigError
from boltmesh.strategies.steps.structure import close_mapping
from boltmesh.strategies.torch_compat import open_one_level

Member = tuple[str, Any]
"""Where something lies, as Python would write it, and what lies there."""

Close = Callable[[list[Any]], Any]
"""Makes a container like the one that was opened, with these members."""

_CONSTANT = (str, bytes, int, float, complex, type(None))
_PLAIN = (Tensor, type, *_CONSTANT)
_DEEPEST_LOOK = 4


def open_container(value: Any, path: str) -> tuple[list[Member], Close] | None:
    """Return what a container holds and what makes one like it; None for anything else.

    Opens lists, tuples, named tuples, dataclasses, mappings (Hugging Face's ``BatchEncoding`` is
    one) and every class that is registered with torch's pytree.

    Args:
        value: Part of a batch.
        path: Where it lies, for messages.
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
    """Whether a list holds nothing but strings, numbers and None; long ones are not looked into."""
    return isinstance(value, list | tuple) and all(isinstance(each, _CONSTANT) for each in value)


def leaves(value: Any, path: str = "batch") -> Iterator[Member]:
    """Yield all that is no container, with its place; a list of strings or numbers is one thing."""
    opened = None if is_constant_list(value) else open_container(value, path)
    if opened is None:
        yield path, value
        return
    for name, each in opened[0]:
        yield from leaves(each, name)


def refuse_uncuttable(value: Any, path: str) -> None:
    """Refuse a leaf that has rows and that nobody can cut, or that hides tensors.

    Raises:
        ConfigError: With its place in the batch, its type and what to give instead.
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
    if not isinstance(value, (*_PLAIN, list, tuple)) and _hides_tensors(value, 0):
        raise ConfigError(
            f"{path} is a {type(value).__module__}.{type(value).__qualname__} with tensors inside, "
            f"and nobody knows which of its rows belong to which sample. Give a dict or dataclass "
            f"of tensors, register the class with torch.utils._pytree, or use microbatches=1."
        )


def _keyed(value: Mapping[Any, Any], path: str) -> list[Member]:
    return [(f"{path}[{key!r}]", each) for key, each in value.items()]


def _with_fields(value: Any, names: Sequence[str], made: Sequence[Any]) -> Any:
    # Not dataclasses.replace: __post_init__ may compute or check things of the whole batch.
    changed = copy.copy(value)
    for name, each in zip(names, made, strict=True):
        object.__setattr__(changed, name, each)
    return changed


def _hides_tensors(value: Any, depth: int) -> bool:
    if isinstance(value, Tensor | PackedSequence):
        return True
    if depth > _DEEPEST_LOOK or isinstance(value, _PLAIN):
        return False
    if isinstance(value, Mapping):
        inner = list(value.values())
    elif isinstance(value, list | tuple | set | frozenset):
        inner = list(value)
    else:
        slots = [name for kind in type(value).__mro__ for name in getattr(kind, "__slots__", ())]
        inner = [*getattr(value, "__dict__", {}).values()]
        inner += [getattr(value, name, None) for name in slots if name != "__dict__"]
    return any(_hides_tensors(each, depth + 1) for each in inner)
