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
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from boltmesh.errors import ConfigError
from boltmesh.strategies.pipeline.rows import (
    PAIR,
    AmbiguousError,
    MisfitError,
    Sizes,
    has_rows,
    refuse_differing,
    sample_lists,
)
from boltmesh.strategies.steps.nesting import (
    is_constant_list,
    leaves,
    like,
    open_container,
    refuse_uncuttable,
)


@dataclass(frozen=True)
class Rows:
    """How many rows a batch has, and which of its lists hold a sample in each place."""

    count: int
    samples: frozenset[str] = frozenset()
    """Where these lists lie in the batch."""


@dataclass
class Cutter:
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
        told = self.batch_sizes.intersection(lists.values())
        if len(told) != 1:
            refuse_differing(lists)
        count = told.pop() if len(told) == 1 else next(iter(lists.values()))
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
            is_told = count in self.batch_sizes or any(self._known.get(path) for path in samples)
            if not samples or count > PAIR or is_told:
                fitting.append(Rows(count, samples))
        if not fitting:
            if problem is not None:
                raise problem.explain("", 0)
            refuse_differing(sizes.in_lists)
        told = [each for each in fitting if each.count in self.batch_sizes]
        known = {path: self._known[path] for path in sizes.outer if path in self._known}
        as_before = [
            each
            for each in fitting
            if known and all((path in each.samples) == was for path, was in known.items())
        ]
        parts = [each for each in fitting if not each.samples]
        is_pair = all(sizes.lists[path] <= PAIR for path in sizes.outer)
        for some in (fitting, told, as_before, parts if is_pair else []):
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
