"""Measures a batch: how long its tensors and lists are, and which lists may hold samples.

See [Note: Lists of samples] in ``microbatches.py``.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor
from typing_extensions import override

from boltmesh.errors import ConfigError
from boltmesh.strategies.steps.nesting import is_constant_list, leaves, open_container

PAIR = 2
"""Lists up to this length are parts of a batch where nothing says otherwise."""

_ROWS = (Tensor, np.ndarray)


class MisfitError(Exception):
    """Part of a batch has other rows than the batch."""

    def __init__(self, path: str, size: int) -> None:
        super().__init__(path)
        self.path, self.size = path, size

    def explain(self, first: str, count: int) -> ConfigError:
        """Return what to tell the user.

        Args:
            first: Where something lies that has as many rows as the batch.
            count: The rows of the batch.
        """
        return _disagreement(first, count, self.path, self.size)


class AmbiguousError(MisfitError):
    """A list may hold samples or parts of the batch."""

    @override
    def explain(self, first: str, count: int) -> ConfigError:
        return ConfigError(
            f"{self.path} is a list of {self.size} tensors of one kind: nobody can tell whether "
            f"each is a sample, or each holds a part of all samples. Give a dict of tensors for "
            f"parts, or one stacked tensor for samples; or use microbatches=1."
        )


def refuse_differing(sizes: Mapping[str, int]) -> None:
    """Raise unless all have the same length."""
    (first, count), *others = sizes.items()
    for other, different in others:
        if different != count:
            raise _disagreement(first, count, other, different)


def _disagreement(first: str, rows: int, other: str, different: int) -> ConfigError:
    return ConfigError(
        f"The batch cannot be cut into microbatches: {first} has {rows} rows and {other} has "
        f"{different}. Put the samples along the first dimension of each tensor, give what belongs "
        f"to no sample as a number or a 0-dim tensor, or use microbatches=1."
    )


def has_rows(leaf: Any) -> bool:
    """Whether a leaf is cut along its first dimension."""
    return isinstance(leaf, _ROWS) and leaf.ndim > 0


def _is_list(value: Any) -> bool:
    return isinstance(value, list | tuple) and not hasattr(value, "_fields")


def _holds_rows(value: Any) -> bool:
    return any(has_rows(leaf) for _, leaf in leaves(value))


class Sizes:
    """How long the things in a batch are, by their place."""

    def __init__(self) -> None:
        self.firm: dict[str, int] = {}
        """Rows of tensors that are surely cut along their first dimension."""
        self.in_lists: dict[str, int] = {}
        """Of tensors in lists of alike things, which may be samples."""
        self.lists: dict[str, int] = {}
        """The lengths of these lists."""
        self.outer: list[str] = []
        """Those that lie in no other one."""
        self.constants: dict[str, int] = {}
        """The lengths of lists of strings, numbers and the like."""

    def read(self, value: Any, path: str, *, is_open: bool) -> None:
        """Take in a part of a batch.

        Args:
            value: The part.
            path: Its place.
            is_open: Whether it lies in a list of alike things.
        """
        if has_rows(value):
            (self.in_lists if is_open else self.firm)[path] = len(value)
            return
        if is_constant_list(value):
            self.constants[path] = len(value)
            return
        opened = open_container(value, path)
        if opened is None:
            return
        if _is_list(value) and _holds_rows(value) and _are_alike(value):
            self.lists[path] = len(value)
            if not is_open:
                self.outer.append(path)
            is_open = True
        elif _is_list(value) and value and _is_flat(value) and not _holds_rows(value):
            self.constants[path] = len(value)
        for name, each in opened[0]:
            self.read(each, name, is_open=is_open)


def sample_lists(value: Any, path: str, rows: int, known: Mapping[str, bool]) -> Iterator[str]:
    """Yield the lists that hold a sample in each place, if the batch has so many rows.

    Raises:
        MisfitError: It cannot have so many.
    """
    if has_rows(value):
        if len(value) != rows:
            raise MisfitError(path, len(value))
        return
    if is_constant_list(value):
        if _is_list(value) and value and len(value) == rows:
            yield path
        return
    opened = open_container(value, path)
    if opened is None:
        return
    members = opened[0]
    may_be_samples = _is_list(value) and len(value) == rows
    try:
        inner = [each for name, part in members for each in sample_lists(part, name, rows, known)]
    except MisfitError:
        if not may_be_samples:
            raise
        yield path
        return
    if not may_be_samples:
        yield from inner
    elif not _holds_rows(value):
        yield from inner or [path]
    elif _are_alike(value) and known.get(path, rows > PAIR):
        if path not in known:
            raise AmbiguousError(path, len(value))
        yield path
    else:
        yield from inner


def _is_flat(items: Sequence[Any]) -> bool:
    return not any(open_container(each, "") for each in items)


def _are_alike(items: Sequence[Any]) -> bool:
    """Whether things may be samples of one batch: nested alike, and of the same types."""
    return bool(items) and all(_is_like(items[0], each) for each in items[1:])


def _is_like(one: Any, other: Any) -> bool:
    if isinstance(one, _ROWS) or isinstance(other, _ROWS):
        same_kind = isinstance(one, Tensor) == isinstance(other, Tensor)
        both = isinstance(one, _ROWS) and isinstance(other, _ROWS)
        return both and same_kind and one.ndim == other.ndim and one.dtype == other.dtype
    if type(one) is not type(other):
        return False
    if isinstance(one, Mapping):
        return one.keys() == other.keys() and all(_is_like(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return not one or not other or _is_like(one[0], other[0])
    return True
