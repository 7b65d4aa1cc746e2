"""Cuts a batch into microbatches along its rows.

Any nesting of dicts, lists, tuples, named tuples and dataclasses is followed. Tensors and arrays
are cut along their first dimension, and lists of strings or numbers that are as long as the batch
are cut too. What belongs to no row (numbers, None, 0-dim tensors) is given to every microbatch.
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from boltmesh.errors import ConfigError

_ROWS = (Tensor, np.ndarray)


def num_rows(batch: Any) -> int:
    """Return how many rows a batch has: the length of its tensors, or of its lists without any.

    Raises:
        ConfigError: When they disagree, or nothing in the batch has rows.
    """
    sizes = {path: len(leaf) for path, leaf in _leaves(batch, "batch") if _has_rows(leaf)}
    if not sizes:
        sizes = {path: len(leaf) for path, leaf in _lists(batch, "batch")}
    if not sizes:
        raise ConfigError(
            f"A batch of {type(batch).__name__} cannot be cut into microbatches: it holds no "
            f"tensor or list with a row for each sample. Let the DataLoader give tensors, or use "
            f"microbatches=1."
        )
    if len(set(sizes.values())) > 1:
        (first, rows), *others = sizes.items()
        other, different = next((path, size) for path, size in others if size != rows)
        raise ConfigError(
            f"The batch cannot be cut into microbatches: {first} has {rows} rows and {other} has "
            f"{different}. Put the samples along the first dimension of each tensor, give what "
            f"belongs to no sample as a number or a 0-dim tensor, or use microbatches=1."
        )
    return next(iter(sizes.values()))


def cut(batch: Any, sizes: Sequence[int]) -> list[Any]:
    """Return the microbatches: views of the batch's tensors, in order.

    Args:
        batch: As the DataLoader gave it, on its device.
        sizes: Rows of each microbatch; they add up to the batch's rows.
    """
    rows = sum(sizes)
    ends = np.cumsum(sizes).tolist()
    return [
        _cut(batch, rows, slice(end - size, end)) for end, size in zip(ends, sizes, strict=True)
    ]


def even_sizes(rows: int, num_microbatches: int, fewest_rows: int = 1) -> list[int]:
    """Return sizes that differ by at most one, larger ones first; fewer where rows are too few.

    Args:
        rows: Of the batch.
        num_microbatches: At most.
        fewest_rows: Of a microbatch, but where the batch has no more.
    """
    count = min(max(rows // fewest_rows, 1), num_microbatches)
    return [rows // count + (index < rows % count) for index in range(count)]


def _has_rows(leaf: Any) -> bool:
    return isinstance(leaf, _ROWS) and leaf.ndim > 0


def _cut(value: Any, rows: int, part: slice) -> Any:
    if _has_rows(value):
        return value[part]
    if isinstance(value, list | tuple) and _is_list_of_samples(value) and len(value) == rows:
        return _like(value, value[part])
    return _rebuild(value, lambda each: _cut(each, rows, part))


def _like(value: Any, items: Any) -> Any:
    return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)


def _rebuild(value: Any, change: Callable[[Any], Any]) -> Any:
    """Return a copy of a container with its members changed; anything else as it is."""
    if isinstance(value, Mapping):
        changed = {key: change(each) for key, each in value.items()}
        if type(value) is dict:
            return changed
        try:
            return type(value)(changed)  # type: ignore[call-arg]
        except TypeError:
            return changed
    if isinstance(value, list | tuple):
        return _like(value, [change(each) for each in value])
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [each.name for each in dataclasses.fields(value) if each.init]
        return dataclasses.replace(value, **{name: change(getattr(value, name)) for name in names})
    return value


def _members(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        yield from ((f"{path}[{key!r}]", each) for key, each in value.items())
    elif isinstance(value, list | tuple):
        names: Sequence[Any] = getattr(value, "_fields", range(len(value)))
        yield from ((f"{path}[{name}]", each) for name, each in zip(names, value, strict=True))
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for each in dataclasses.fields(value):
            yield f"{path}.{each.name}", getattr(value, each.name)


def _leaves(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    inside = False
    for name, each in _members(value, path):
        inside = True
        yield from _leaves(each, name)
    if not inside:
        yield path, value


def _lists(value: Any, path: str) -> Iterator[tuple[str, Sequence[Any]]]:
    if isinstance(value, list | tuple) and _is_list_of_samples(value):
        yield path, value
        return
    for name, each in _members(value, path):
        yield from _lists(each, name)


def _is_list_of_samples(value: Sequence[Any]) -> bool:
    """Whether a list holds something for each sample, rather than the parts of a batch.

    ``[inputs, targets]`` are parts; ``["a cat", "a dog"]``, ``[3, 5]`` and ``[None, box]`` of
    one kind each are samples when there are as many as rows.
    """
    return bool(value) and all(isinstance(each, str | bytes | int | float) for each in value)
