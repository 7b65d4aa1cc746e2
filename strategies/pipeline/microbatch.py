"""Splits a batch into microbatches along its rows.

Any nesting of dicts, lists, tuples, named tuples, dataclasses and mappings is followed. Tensors and
arrays are cut along their first dimension. Values without rows (numbers, None, strings, 0-dim
tensors) go to every microbatch.

[Note: Lists of samples]
A list of tensors has either parts of a batch as items (``[inputs, targets]``, each with a row for
every sample) or samples (``[image, image, image]``); taking one for the other trains on nonsense.
The rest of the batch usually decides: its number of rows is the length of the list, or that of the
tensors in it. If both fit, the batch size of the DataLoader decides, then the decision in earlier
batches; a list that is still undecided is refused.

``Sizes`` has the lengths of the tensors and lists of a batch, and which lists may hold samples.
``batch_norms`` finds layers that compute moments over all rows of a batch.
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
"""Lists up to this length are parts of a batch unless something shows otherwise."""

_ROWS = (Tensor, np.ndarray)


class MisfitError(Exception):
    """A part of a batch has another number of rows than the batch."""

    def __init__(self, path: str, size: int) -> None:
        super().__init__(path)
        self.path, self.size = path, size

    def explain(self, first: str, count: int) -> ConfigError:
        """Return the error for the user.

        Args:
            first: Place of a part with as many rows as the batch.
            count: Rows of the batch.
        """
        return _disagreement(first, count, self.path, self.size)


class AmbiguousError(MisfitError):
    """A list may hold samples or parts of the batch."""

    @override
    def explain(self, first: str, count: int) -> ConfigError:
        return ConfigError(
            f"{self.path} is a list of {self.size} tensors of one kind: each may be "
            f"a sample, or hold a part of all samples. Give a dict of tensors for "
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
    """Lengths of the members of a batch, by their place."""

    def __init__(self) -> None:
        self.firm: dict[str, int] = {}
        """Rows of tensors that are certainly cut along their first dimension."""
        self.in_lists: dict[str, int] = {}
        """Rows of tensors in lists whose items have one structure and may be samples."""
        self.lists: dict[str, int] = {}
        """Lengths of these lists."""
        self.outer: list[str] = []
        """The outermost of these lists."""
        self.constants: dict[str, int] = {}
        """Lengths of lists of strings, numbers and other constants."""

    def read(self, value: Any, path: str, *, is_open: bool) -> None:
        """Add a part of a batch.

        Args:
            value: The part.
            path: Its place.
            is_open: Whether it is in a list that may hold samples.
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
    """Yield the places of lists whose items are samples, if the batch has ``rows`` rows.

    Raises:
        MisfitError: The batch cannot have ``rows`` rows.
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
    """Whether items may be samples of one batch: of the same structure and types."""
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
    """The number of rows of a batch, and which of its lists have samples as items."""

    count: int
    samples: frozenset[str] = frozenset()
    """Places of these lists in the batch."""


@dataclass
class MicrobatchSplitter:
    """Splits the batches of a run; reads lists in later batches as in earlier ones."""

    batch_sizes: set[int] = field(default_factory=set)
    """Batch sizes of the DataLoaders, as far as they are known."""
    _known: dict[str, bool] = field(default_factory=dict)
    """Whether a list holds samples, by its place."""

    def rows(self, batch: Any) -> Rows:
        """Return a batch's rows.

        Raises:
            ConfigError: Parts of the batch have different rows, none has rows, or one cannot be
                cut.
        """
        for path, leaf in leaves(batch):
            refuse_uncuttable(leaf, path)
        sizes = Sizes()
        sizes.read(batch, "batch", is_open=False)
        if sizes.firm:
            rows = self._by_rows(batch, sizes.firm)
        elif sizes.in_lists:
            rows = self._by_lists(batch, sizes)
        else:
            rows = self._by_constants(batch, sizes.constants)
        if rows.count == 0:
            raise ConfigError("The batch has no rows. Leave empty batches out of the data.")
        self._known.update({path: path in rows.samples for path in sizes.lists})
        return rows

    def cut(self, batch: Any, wanted: int, fewest_rows: int = 1) -> tuple[list[Any], list[int]]:
        """Return a batch's microbatches and the rows of each.

        Args:
            batch: The DataLoader's batch on its device; tensors have the shape ``(B, *)``, or
                ``()`` without rows.
            wanted: Number of microbatches; fewer if there are not enough rows.
            fewest_rows: Fewest rows of a microbatch, unless the batch has fewer.

        Returns:
            Views of the batch in order, and their numbers of rows.

        Raises:
            ConfigError: See ``rows``.
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
        """Return the rows of a batch with all tensors in lists that may hold samples or parts."""
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
    """Return the microbatches in order, as views of the batch's tensors.

    Args:
        batch: The DataLoader's batch on its device; tensors have the shape ``(B, *)``, or ``()``
            without rows.
        rows: Rows of the batch.
        sizes: Rows of each microbatch; they add up to the batch's rows.
    """
    ends = np.cumsum(sizes).tolist()
    slices = [slice(end - size, end) for end, size in zip(ends, sizes, strict=True)]
    return [_cut(batch, "batch", rows, part) for part in slices]


def pick(batch: Any, rows: Rows, numbers: Sequence[int]) -> Any:
    """Return a batch of the numbered rows, in any order and with repetitions.

    Args:
        batch: The DataLoader's batch on its device; tensors have the shape ``(B, *)``, or ``()``
            without rows.
        rows: Rows of the batch.
        numbers: Indices of rows. Consecutive rows give views, others copies.
    """
    start = numbers[0]
    follow_each_other = list(numbers) == list(range(start, start + len(numbers)))
    part = slice(start, start + len(numbers)) if follow_each_other else list(numbers)
    return _cut(batch, "batch", rows, part)


def even_sizes(rows: int, num_microbatches: int, fewest_rows: int = 1) -> list[int]:
    """Return sizes of microbatches that differ by at most one, larger ones first.

    Args:
        rows: Rows of the batch.
        num_microbatches: Number of sizes; fewer if there are not enough rows.
        fewest_rows: Fewest rows of a microbatch, unless the batch has fewer.
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
        # Hugging Face's fast tokenizers keep an encoding per row, which word_ids() reads.
        return type(value)(dict(made), encoding=_items(encodings, part))
    return made


def _items(members: Sequence[Any], part: slice | list[int]) -> Sequence[Any]:
    return members[part] if isinstance(part, slice) else [members[each] for each in part]


Norm = nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d


def batch_norms(module: Module, *, of_vectors: bool = False) -> list[Norm]:
    """Return batch norms, or those of vectors only, which have no moments of one row."""
    kinds = nn.BatchNorm1d if of_vectors else Norm
    return [each for each in module.modules() if isinstance(each, kinds)]


def fewest_rows(norms: Iterable[Norm]) -> int:
    """Return the fewest rows of a microbatch: two if one of the layers computes moments of it."""
    takes_moments = any(each.training or each.running_mean is None for each in norms)
    return 2 if takes_moments else 1
