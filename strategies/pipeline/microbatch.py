"""Cuts a batch into microbatches along its rows.

Any nesting of dicts, lists, tuples, named tuples, dataclasses and mappings is followed. Tensors and
arrays are cut along their first dimension. What belongs to no row (numbers, None, strings, 0-dim
tensors) is given to every microbatch.

[Note: Lists of samples]
A list of tensors is either the parts of a batch (``[inputs, targets]``, each with a row for every
sample) or holds one sample in each place (``[image, image, image]``), and cutting the one as the
other trains on nonsense. What else is in the batch decides as a rule: its rows are as many as the
list is long, or as the tensors in it. Where both would fit, the batch size of the DataLoader
decides, then how the list was taken in earlier batches; what is still open is refused.

``Sizes`` measures a batch: how long its tensors and lists are, and which lists may hold samples.
``batch_norms`` finds layers that look at all rows of a batch.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch import Tensor, nn
from torch.nn import Module
from typing_extensions import override

from boltmesh.errors import ConfigError
from boltmesh.strategies.pytree import (
    is_constant_list,
    leaves,
    like,
    open_container,
    refuse_uncuttable,
)

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


@dataclass(frozen=True)
class Rows:
    """How many rows a batch has, and which of its lists hold a sample in each place."""

    count: int
    samples: frozenset[str] = frozenset()
    """Where these lists lie in the batch."""


@dataclass
class MicrobatchSplitter:
    """Cuts the batches of a run; takes lists in later batches as it did in earlier ones."""

    batch_sizes: set[int] = field(default_factory=set)
    """How many rows the DataLoaders give, where they say so."""
    _known: dict[str, bool] = field(default_factory=dict)
    """By the place of a list whether it holds samples."""

    def rows(self, batch: Any) -> Rows:
        """Return a batch's rows.

        Raises:
            ConfigError: When parts of it disagree, nothing in it has rows, or something cannot be
                cut.
        """
        for path, leaf in leaves(batch):
            refuse_uncuttable(leaf, path)
        sizes = Sizes()
        sizes.read(batch, "batch", is_open=False)
        if sizes.firm:
            found = self._by_rows(batch, sizes.firm)
        elif sizes.in_lists:
            found = self._by_lists(batch, sizes)
        else:
            found = self._by_constants(batch, sizes.constants)
        if found.count == 0:
            raise ConfigError("The batch has no rows. Leave empty batches out of the data.")
        self._known.update({path: path in found.samples for path in sizes.lists})
        return found

    def cut(self, batch: Any, wanted: int, fewest_rows: int = 1) -> tuple[list[Any], list[int]]:
        """Return a batch's microbatches, views of it in order, and the rows of each.

        Args:
            batch: As the DataLoader gave it, on its device.
            wanted: How many; fewer where rows are too few.
            fewest_rows: Of a microbatch, but where the batch has no more.
        """
        rows = self.rows(batch)
        sizes = even_sizes(rows.count, wanted, fewest_rows)
        return cut(batch, rows, sizes), sizes

    def _by_rows(self, batch: Any, firm: Mapping[str, int]) -> Rows:
        (first, count), *_ = firm.items()
        refuse_differing(firm)
        try:
            return Rows(count, frozenset(sample_lists(batch, "batch", count, self._known)))
        except MisfitError as misfit:
            raise misfit.explain(first, count) from None

    def _by_constants(self, batch: Any, lists: Mapping[str, int]) -> Rows:
        if not lists:
            raise ConfigError(
                f"A batch of {type(batch).__name__} cannot be cut into microbatches: it holds no "
                f"tensor or list with a row for each sample. Let the DataLoader give tensors, or "
                f"use microbatches=1."
            )
        fitting = self.batch_sizes.intersection(lists.values())
        if len(fitting) != 1:
            refuse_differing(lists)
        count = fitting.pop() if len(fitting) == 1 else next(iter(lists.values()))
        return Rows(count, frozenset(sample_lists(batch, "batch", count, self._known)))

    def _by_lists(self, batch: Any, sizes: "Sizes") -> Rows:
        """All tensors lie in lists of samples or parts: see which number of rows makes sense."""
        fitting: list[Rows] = []
        problem: MisfitError | None = None
        for count in sorted({*sizes.in_lists.values(), *sizes.lists.values()}):
            try:
                samples = frozenset(sample_lists(batch, "batch", count, self._known))
            except MisfitError as misfit:
                problem = misfit if isinstance(misfit, AmbiguousError) else problem
                continue
            is_known = count in self.batch_sizes or any(self._known.get(path) for path in samples)
            if not samples or count > PAIR or is_known:
                fitting.append(Rows(count, samples))
        if not fitting:
            if problem is not None:
                raise problem.explain("", 0)
            refuse_differing(sizes.in_lists)
        of_loaders = [each for each in fitting if each.count in self.batch_sizes]
        known = {path: self._known[path] for path in sizes.outer if path in self._known}
        as_before = [
            each
            for each in fitting
            if known and all((path in each.samples) == was for path, was in known.items())
        ]
        parts = [each for each in fitting if not each.samples]
        is_pair = all(sizes.lists[path] <= PAIR for path in sizes.outer)
        for some in (fitting, of_loaders, as_before, parts if is_pair else []):
            if len(some) == 1:
                return some[0]
        path = sizes.outer[0]
        raise AmbiguousError(path, sizes.lists[path]).explain("", 0)


def cut(batch: Any, rows: Rows, sizes: Sequence[int]) -> list[Any]:
    """Return the microbatches: views of the batch's tensors, in order.

    Args:
        batch: As the DataLoader gave it, on its device.
        rows: Of the batch.
        sizes: Rows of each microbatch; they add up to the batch's rows.
    """
    ends = np.cumsum(sizes).tolist()
    slices = [slice(end - size, end) for end, size in zip(ends, sizes, strict=True)]
    return [_cut(batch, "batch", rows, part) for part in slices]


def pick(batch: Any, rows: Rows, numbers: Sequence[int]) -> Any:
    """Return a batch of some rows, in any order and each as often as it is named.

    Args:
        batch: As the DataLoader gave it, on its device.
        rows: Of the batch.
        numbers: Of the rows. Views are made of those that follow each other, else copies.
    """
    start = numbers[0]
    follow_each_other = list(numbers) == list(range(start, start + len(numbers)))
    part = slice(start, start + len(numbers)) if follow_each_other else list(numbers)
    return _cut(batch, "batch", rows, part)


def even_sizes(rows: int, num_microbatches: int, fewest_rows: int = 1) -> list[int]:
    """Return sizes that differ by at most one, larger ones first; fewer where rows are too few.

    Args:
        rows: Of the batch.
        num_microbatches: At most.
        fewest_rows: Of a microbatch, but where the batch has no more.
    """
    count = min(max(rows // fewest_rows, 1), num_microbatches)
    return [rows // count + (index < rows % count) for index in range(count)]


def _cut(value: Any, path: str, rows: Rows, part: slice | list[int]) -> Any:
    if has_rows(value):
        return value[part]
    if path in rows.samples:
        return like(value, _items(value, part))
    opened = None if is_constant_list(value) else open_container(value, path)
    if opened is None:
        return value
    members, close = opened
    made = close([_cut(each, name, rows, part) for name, each in members])
    encodings = getattr(value, "encodings", None)
    if isinstance(encodings, list) and len(encodings) == rows.count:
        # Hugging Face's fast tokenizers keep what word_ids() and the like read, by row.
        return type(value)(dict(made), encoding=_items(encodings, part))
    return made


def _items(members: Sequence[Any], part: slice | list[int]) -> Sequence[Any]:
    return members[part] if isinstance(part, slice) else [members[each] for each in part]


Norm = nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d


def batch_norms(module: Module, *, of_vectors: bool = False) -> list[Norm]:
    """Return batch norms, or those of vectors, which have no moments of one row."""
    kinds = nn.BatchNorm1d if of_vectors else Norm
    return [each for each in module.modules() if isinstance(each, kinds)]


def fewest_rows(norms: Iterable[Norm]) -> int:
    """Return how many rows a microbatch needs: two where one of the layers takes moments of it."""
    takes_moments = any(each.training or each.running_mean is None for each in norms)
    return 2 if takes_moments else 1
