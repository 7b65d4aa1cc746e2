"""Parameters of a block that have a gradient on some ranks alone, such as those of experts.

[Note: Gradients that no rank has]
All ranks have to reduce the same gradients, so a rank without one gives zeros. If no rank has one,
the parameter must get none, as in one process: an optimizer then leaves it alone. A rank notes in
the job's store for which parameters it gives zeros, before it enters the reduction. Once that has
ended, all ranks have entered it, and what each of them noted is there. A rank that gives none does
not use the store.
"""

import re
from collections.abc import Collection, Sequence
from functools import cached_property
from typing import Final

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
    """

    def __init__(self, keys: str, names: Collection[str], num_ranks: int) -> None:
        self.names = names
        self._keys, self._num_ranks = keys, num_ranks
        self._number = self._store.add("ranks", 1)
        self._store.set(str(self._number), msgspec.json.encode(sorted(names)).decode())

    @property
    def _store(self) -> Store:
        store = job_store(self._keys)
        assert store is not None
        return store

    @cached_property
    def without_any(self) -> set[str]:
        """The parameters for which no rank has a gradient. Read once the reduction has ended."""
        store = self._store
        if store.add("ranks", 0) < self._num_ranks:
            return set()
        noted = [store.get(str(number + 1)) for number in range(self._num_ranks)]
        return set.intersection(*(msgspec.json.decode(each, type=set[str]) for each in noted))

    def forget(self) -> None:
        """Remove this rank's note, which no rank will read any more."""
        self._store.delete_key(str(self._number))
        self._store.delete_key("ranks")


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
        self._noted: list[list[ZeroGradients]] = [[], [], []]
        """Notes of the last optimizer steps, the newest last."""

    def begin_run(self) -> None:
        """Begin a run, on all ranks."""
        self._run += 1
        self._noted = [[], [], []]

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
        noted = ZeroGradients(keys, names, self._num_ranks)
        self._noted[-1].append(noted)
        return noted

    def end_step(self) -> None:
        """Forget what no rank reads any more: the notes of the step before the last one."""
        for each in self._noted.pop(0):
            each.forget()
        self._noted.append([])
