"""Parameters of a block that have a gradient on some ranks alone, such as those of experts.

[Note: Gradients that no rank has]
All ranks have to reduce the same gradients, so a rank without one gives zeros. If no rank has one,
the parameter must get none, as in one process: an optimizer then leaves it alone. A rank notes in
the job's store for which parameters it gives zeros, before it enters the reduction. Once that has
ended, all ranks have entered it, and what each of them noted is there. A rank that gives none does
not use the store. Notes are read at the end of the backward pass, and with offload, which takes
gradients away, before one counts as arrived: the same ones then arrive on all ranks. A rank removes
its notes once a later backward pass has reduced something: all ranks have read them by then.
"""

import hashlib
import re
from collections.abc import Callable, Collection, Sequence
from functools import cached_property
from typing import Any, Final, cast

import msgspec
from torch._C._distributed_c10d import Store

from boltmesh.torch_compat import job_store

_NUMBER: Final = re.compile(r"\d+")


class ZeroGradients:
    """The parameters for which this rank gives zeros to one reduction.

    Args:
        keys: Prefix of the reduction's keys in the job's store.
        names: The parameters.
        num_ranks: How many ranks take part.
        on_read: Called with this object before notes are read.
    """

    def __init__(
        self,
        keys: str,
        names: Collection[str],
        num_ranks: int,
        on_read: Callable[["ZeroGradients"], None],
    ) -> None:
        self.names = names
        self._keys, self._num_ranks, self._on_read = keys, num_ranks, on_read
        text = msgspec.json.encode(sorted(names))
        self._digest = hashlib.blake2b(text, digest_size=8).hexdigest()
        store = self._store
        self._number = store.add("ranks", 1)
        store.add(self._digest, 1)
        store.set(str(self._number), text.decode())

    @property
    def _store(self) -> Store:
        store = job_store(self._keys)
        assert store is not None
        return store

    @cached_property
    def without_any(self) -> set[str]:
        """The parameters for which no rank has a gradient. Read once the reduction has ended."""
        self._on_read(self)
        store, num_ranks = self._store, self._num_ranks
        if store.add("ranks", 0) < num_ranks:
            return set()
        if store.add(self._digest, 0) == num_ranks:
            return {*self.names}
        keys = [str(number + 1) for number in range(num_ranks)]
        is_bulk = cast("Any", store).has_extended_api()
        noted = store.multi_get(keys) if is_bulk else map(store.get, keys)
        return set.intersection(*(msgspec.json.decode(each, type=set[str]) for each in noted))

    def forget(self) -> None:
        """Remove the notes, which no rank will read any more."""
        store = self._store
        for key in (str(self._number), self._digest, "ranks"):
            store.delete_key(key)


class MissingGradients:
    """Chooses the parameters without a gradient on this rank that a reduction includes.

    Args:
        name: Name of the group, the same on all of its ranks.
        num_ranks: Its number of ranks.
    """

    def __init__(self, name: str, num_ranks: int) -> None:
        self._name, self._num_ranks, self._run = name, num_ranks, 0
        self._reduced: dict[int | None, tuple[str, set[str]]] = {}
        """Unit and parameters of each reduction, by its key."""
        self._unread: list[ZeroGradients] = []
        self._read: list[ZeroGradients] = []
        """Notes that were read in this batch and step."""
        self._old: list[ZeroGradients] = []
        """Notes of earlier ones: all ranks have read them, once they began a later reduction."""

    def begin_run(self) -> None:
        """Begin a run, on all ranks."""
        self._run += 1

    def begin_backward(self) -> None:
        """Begin another batch or step: the backward passes before it have ended on this rank."""
        self._old += self._read
        self._read = []

    def learn(self, key: int, unit: str, names: Collection[str]) -> None:
        """Keep which parameters a reduction includes."""
        self._reduced[key] = unit, {*names}

    def to_include(
        self, unit: str, reduced: Sequence[str], missing: Sequence[str], expected: int | None
    ) -> set[str]:
        """Return the parameters without a gradient that a reduction includes.

        They are siblings of others (``experts.3.weight``), or were reduced at this place before.

        Args:
            unit: The unit.
            reduced: Its parameters that have a gradient.
            missing: Its other parameters that require one.
            expected: Key of what followed this place last.
        """
        families = {_NUMBER.sub("", each) for each in reduced}
        found = {each for each in missing if _NUMBER.sub("", each) in families}
        known, names = self._reduced.get(expected, ("", set()))
        if known == unit and {*reduced, *found} <= names <= {*reduced, *missing}:
            return names - {*reduced}
        return found

    def note(self, number: int, names: Collection[str]) -> ZeroGradients:
        """Note for which parameters this rank gives zeros to a reduction, before it begins.

        Args:
            number: Number of the reduction in the run, equal on all ranks.
            names: The parameters.
        """
        keys = f"boltmesh-zeros-{self._name}-{self._run}-{number}"
        noted = ZeroGradients(keys, names, self._num_ranks, self._forget_old)
        self._unread.append(noted)
        if len(self._unread) > _MOST_UNREAD:
            self._old.append(self._unread.pop(0))
        return noted

    def _forget_old(self, read: ZeroGradients) -> None:
        for each in self._old:
            each.forget()
        self._old = []
        self._read.append(read)
        if read in self._unread:
            self._unread.remove(read)


_MOST_UNREAD: Final = 4096
"""Notes are not read if the rank had a gradient in a later micro-batch."""
