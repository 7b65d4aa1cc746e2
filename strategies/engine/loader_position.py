"""A ``DataLoader`` that knows its place in an epoch, and can begin there again.

A resumed loader replays its epoch: the random state in which the epoch's iterator was made is put
back, so that the shuffle and the worker seeds are the same; batches that training has used are
passed over (by index where nothing but the index is lost, else by loading them); then the random
state of the moment of the checkpoint is put back, and training goes on.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset
from typing_extensions import Self, override

from boltmesh.strategies.random_state import (
    RandomState,
    capture_random_state,
    restore_random_state,
)
from boltmesh.strategies.torch_compat import skip_indices


@dataclass
class LoaderState:
    """Where one rank stands in one loader."""

    position: int
    """Batches of this epoch that training has used; 0 at the start of an epoch."""
    epoch_start: RandomState | None
    """Before this epoch's iterator was made; None where a new epoch begins."""
    before_prefetch: RandomState | None = None
    """Before the batch was loaded that is fetched and not yet used, where there is one."""
    sampler_seed: int | None = None
    """By which a distributed sampler shuffles each epoch."""

    def to_dict(self) -> dict[str, Any]:
        """As plain containers."""
        return dict(vars(self))

    @classmethod
    def from_dict(cls, state: dict[str, Any]) -> Self:
        """The inverse of ``to_dict``."""
        return cls(**state)


class ResumePoint:
    """The random state of one rank's training, kept apart from what validation does to it.

    A resumed run puts it back at the first moment at which training uses it. Validation within a
    fit draws numbers too (a loader draws one whenever it is iterated over), and a checkpoint may
    be written before, during or after it; so what it draws is taken back when it ends, as Lightning
    does for the sanity check.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.is_resuming = False
        """From the start of a resumed fit until its first batch is about to be used."""
        self._now: RandomState | None = None
        self._is_applied = False
        self._aside: RandomState | None = None

    def current(self) -> RandomState:
        """The state of training, also while validation runs."""
        return self._aside if self._aside is not None else capture_random_state(self.device)

    def set_aside(self) -> None:
        """Validation begins."""
        if self._aside is None:
            self._aside = capture_random_state(self.device)

    def take_back(self) -> None:
        """Validation has ended."""
        if self._aside is not None:
            restore_random_state(self._aside, self.device)
            self._aside = None

    def begin(self, state: RandomState | None) -> None:
        """A resumed fit starts; ``state`` is that of the checkpoint, where it has one."""
        self.is_resuming = True
        self._now = state
        self._is_applied = False

    def apply(self) -> None:
        """Put the state back now, again if need be: Lightning may ask for an iterator twice."""
        if self._now is not None:
            restore_random_state(self._now, self.device)
        self._is_applied = True

    def apply_once(self) -> None:
        """Put the state back unless that was done."""
        if self.is_resuming and not self._is_applied:
            self.apply()

    def settle(self) -> None:
        """The first batch is about to be used: from here on the run is like any other."""
        if self.is_resuming:
            self._aside = None
            self.apply_once()
            self.is_resuming = False
            self._now = None


@dataclass
class _Place:
    """What a resumable loader knows of itself."""

    point: ResumePoint
    is_for_training: bool
    start: LoaderState | None = None
    """Where the next pass begins, when a run was resumed."""
    epoch: "_Epoch | None" = None
    """The pass that was begun last."""

    def __getstate__(self) -> dict[str, Any]:
        # Users copy Trainers with their loaders, and an iterator cannot be copied.
        return {**vars(self), "epoch": None}


class _ResumableLoader:
    """Marks the class of a loader that knows its place."""

    place: _Place | None = None
    """None for a copy that Lightning has made and not handed to the strategy."""


def _iterate(loader: Any) -> Iterator[Any]:
    """Takes the place of ``__iter__``: a pass over the loader that knows its place."""
    place: _Place | None = loader.place
    make: Callable[[], Iterator[Any]] = partial(type(loader).plain_iter, loader)
    if place is None:
        return make()
    if not place.is_for_training:
        place.point.set_aside()
        return make()
    start, place.start = place.start, None
    if start is None and place.epoch is not None and place.point.is_resuming:
        start = place.epoch.start  # Lightning asked twice before it used a batch
    place.epoch = _Epoch(loader, make, place.point, start)
    return place.epoch


class _Epoch(Iterator[Any]):
    """One pass over a loader that knows its place."""

    def __init__(
        self,
        loader: Any,
        make_iterator: Callable[[], Iterator[Any]],
        point: ResumePoint,
        start: LoaderState | None,
    ) -> None:
        self.position = 0
        self.epoch_start: RandomState | None = None
        self.before_last: RandomState | None = None
        self._make = make_iterator
        self._point = point
        self.start = start
        # Only these batches are made in this process and fetched ahead of their use.
        self._keeps_last = isinstance(loader.dataset, IterableDataset) and loader.num_workers == 0
        self._inner: Iterator[Any] | None = None
        if start is None:
            self._begin()

    @override
    def __next__(self) -> Any:
        # A restarting fit loop may have iterated over a validation loader that it does not run.
        self._point.take_back()
        if self._inner is None:
            self._resume()
        else:
            self._point.apply_once()
        assert self._inner is not None
        if self._keeps_last:
            self.before_last = capture_random_state(self._point.device)
        batch = next(self._inner)
        self.position += 1
        return batch

    def _begin(self) -> None:
        self.epoch_start = capture_random_state(self._point.device)
        self._inner = self._make()

    def _resume(self) -> None:
        """Make the iterator only now: Lightning tells the sampler its epoch after ``iter()``."""
        start = self.start
        assert start is not None
        if start.epoch_start is None and start.position == 0:
            self._point.apply()
            self._begin()
            return
        outside = capture_random_state(self._point.device)
        if start.epoch_start is not None:
            restore_random_state(start.epoch_start, self._point.device)
        self._begin()
        assert self._inner is not None
        if not skip_indices(self._inner, start.position):
            for _ in range(start.position):
                next(self._inner)
        self.position = start.position
        restore_random_state(outside, self._point.device)
        if start.before_prefetch is not None:
            restore_random_state(start.before_prefetch, self._point.device)
        else:
            self._point.apply()


def make_resumable(loader: object, point: ResumePoint, *, is_for_training: bool) -> bool:
    """Teach a ``DataLoader`` its place. Anything else, and what is stateful already, is left alone.

    The object keeps its identity and its class stays a subclass of what it was, so that whoever
    holds it or asks ``isinstance`` sees no difference.

    Returns:
        Whether this loader can be resumed now.
    """
    if not isinstance(loader, DataLoader):
        return False
    if not isinstance(loader, _ResumableLoader):
        if hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict"):
            return False
        kind = type(loader)
        # The user's class comes first: only then may an object change to the new one.
        names = {"__iter__": _iterate, "plain_iter": kind.__iter__}
        loader.__class__ = type(kind.__name__, (kind, _ResumableLoader), names)
    loader.place = _Place(point, is_for_training)
    return True


def is_resumable(loader: object) -> bool:
    """Whether ``make_resumable`` took this loader."""
    return isinstance(loader, _ResumableLoader)


def loader_state(loader: Any, *, prefetched: int, is_epoch_over: bool) -> LoaderState:
    """Where this rank stands in a resumable loader."""
    epoch: _Epoch | None = loader.place.epoch
    seed = getattr(loader.sampler, "seed", None)
    if epoch is None or is_epoch_over:
        return LoaderState(position=0, epoch_start=None, sampler_seed=seed)
    before = epoch.before_last if prefetched else None
    return LoaderState(epoch.position - prefetched, epoch.epoch_start, before, seed)


def resume_loader(loader: Any, state: LoaderState) -> None:
    """Let the next pass over the loader begin where ``state`` says."""
    loader.place.start = state
    if state.sampler_seed is not None and hasattr(loader.sampler, "seed"):
        loader.sampler.seed = state.sampler_seed


def is_resumed(loader: Any) -> bool:
    """Whether the pass that was begun last, or else the next one, begins where a state says."""
    place: _Place = loader.place
    return place.start is not None or (place.epoch is not None and place.epoch.start is not None)
