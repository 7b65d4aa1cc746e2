"""Loaders that know their place in an epoch, and begin there again.

``make_resumable`` gives a ``DataLoader`` the means to do so. A resumed loader replays its epoch:
the random state in which the epoch's iterator was made is put back, so that the shuffle and the
worker seeds are the same; batches that training has used are passed over (by index where nothing
but the index is lost, else by loading them); then the random state of the moment of the checkpoint
is put back, and training goes on. Several loaders of one training are replayed together, before the
first of them gives a batch.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from lightning.fabric.utilities.data import sized_len
from torch import Tensor
from torch.utils.data import DataLoader
from typing_extensions import Self, override

from boltmesh.strategies.lightning_compat.loops import own_generators
from boltmesh.strategies.random_state import RandomState, capture_random_state, restore_random_state
from boltmesh.strategies.torch_compat.files import skip_indices


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
    generators: list[Tensor] | None = None
    """States of the generators of the loader and its samplers, of the moment of ``epoch_start``;
    the present ones where a new epoch begins."""
    has_ended: bool = False
    """Whether an earlier pass of this epoch has ended, as of a loader beside a longer one."""

    @property
    def is_new_epoch(self) -> bool:
        """Whether the next pass begins an epoch, at the moment of the checkpoint."""
        return self.epoch_start is None and self.position == 0

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
        self.fetches_ahead = False
        """Whether a training loader has no length, so that batches are fetched before their use."""
        self._now: RandomState | None = None
        self._is_applied = False
        self._aside: RandomState | None = None
        self._waiting: list[_Epoch] = []

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
        self._waiting = []

    def add_pass(self, epoch: "_Epoch", *, instead_of: "_Epoch | None") -> None:
        """Let a pass over a loader wait until the first batch of any is asked for."""
        self._waiting = [each for each in self._waiting if each is not instead_of]
        self._waiting.append(epoch)

    def resume_passes(self) -> None:
        """Put the passes that wait where they were, and then the state.

        All at once, in the order in which the loop began them: what a loader draws for its next
        batch comes after what the others drew when they were begun.
        """
        waiting, self._waiting = self._waiting, []
        starts = [each.start for each in waiting if each.start is not None]
        if all(each.is_new_epoch for each in starts):
            self.apply()
            for epoch in waiting:
                epoch.resume()
            return
        outside = capture_random_state(self.device)
        for epoch in waiting:
            epoch.resume()
        restore_random_state(outside, self.device)
        fetched = [each.before_prefetch for each in starts if each.before_prefetch is not None]
        if fetched:
            restore_random_state(fetched[0], self.device)
        else:
            self.apply()

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
class _LoaderPosition:
    """What a resumable loader knows of itself."""

    point: ResumePoint
    is_for_training: bool
    start: LoaderState | None = None
    """Where the next pass begins, when a run was resumed."""
    is_resumed: bool = False
    """Whether a pass of it begins or has begun where a state says."""
    epoch: "_Epoch | None" = None
    """The pass that was begun last."""

    def __getstate__(self) -> dict[str, Any]:
        # Users copy Trainers with their loaders, and an iterator cannot be copied.
        return {**vars(self), "epoch": None}


class _ResumableLoader:
    """Marks the class of a loader that knows its place."""

    place: _LoaderPosition | None = None
    """None for a copy that Lightning has made and not handed to the strategy."""


def _iterate(loader: Any) -> Iterator[Any]:
    """Takes the place of ``__iter__``: a pass over the loader that knows its place."""
    place: _LoaderPosition | None = loader.place
    make: Callable[[], Iterator[Any]] = partial(type(loader).plain_iter, loader)
    if place is None:
        return make()
    if not place.is_for_training:
        place.point.set_aside()
        return make()
    start, place.start = place.start, None
    last = place.epoch
    if last is not None and last.goes_on:
        last.go_on()
        return last
    if start is None and last is not None and place.point.is_resuming:
        start = last.start  # Lightning asked twice before it used a batch
    place.epoch = _Epoch(loader, make, place.point, start)
    if start is not None:
        place.point.add_pass(place.epoch, instead_of=last)
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
        self.generators = own_generators(loader)
        self.generators_at_start: list[Tensor] = []
        self._make = make_iterator
        self._point = point
        self.start = start
        self.goes_on = False
        """Whether it has repeated the end of an earlier pass, and continues in the next one."""
        self._has_given = self._has_gone_on = False
        self._ends_first = start is not None and start.has_ended
        # Only these batches are made in this process and fetched ahead of their use.
        self._keeps_last = point.fetches_ahead and loader.num_workers == 0
        self.inner: Iterator[Any] | None = None
        if start is None:
            self._begin()

    @override
    def __next__(self) -> Any:
        # A restarting fit loop may have iterated over a validation loader that it does not run.
        self._point.take_back()
        if self.inner is None:
            self._point.resume_passes()
        elif self._has_given:  # else loaders before it give their part of the same first batch
            self._point.apply_once()
        assert self.inner is not None
        if self._ends_first:
            self._ends_first, self.goes_on = False, True
            raise StopIteration
        if self._keeps_last:
            self.before_last = capture_random_state(self._point.device)
        try:
            batch = next(self.inner)
        except StopIteration:
            self.start = None  # the next pass is another one, which may be of the same epoch
            if self._has_given or not self._has_gone_on:
                raise
            self._begin()  # the loop has seen the end of a pass already, and this one was over too
            self.position = 0
            batch = next(self.inner)
        self.position += 1
        self._has_given = True
        return batch

    def go_on(self) -> None:
        """Give the batches of the pass that has only seemed to end."""
        self.goes_on, self._has_gone_on = False, True
        if self.start is not None and self.start.before_prefetch is not None:
            restore_random_state(self.start.before_prefetch, self._point.device)

    def _begin(self) -> None:
        self.epoch_start = capture_random_state(self._point.device)
        self.generators_at_start = [each.get_state() for each in self.generators]
        self.inner = self._make()

    def resume(self) -> None:
        """Make the iterator only now: Lightning tells the sampler its epoch after ``iter()``."""
        start = self.start
        assert start is not None
        if start.epoch_start is not None:
            restore_random_state(start.epoch_start, self._point.device)
        for generator, state in zip(self.generators, start.generators or (), strict=False):
            generator.set_state(state)
        self._begin()
        assert self.inner is not None
        if not skip_indices(self.inner, start.position):
            for _ in range(start.position):
                next(self.inner)
        self.position = start.position


def make_resumable(loader: object, point: ResumePoint, *, is_for_training: bool) -> bool:
    """Teach a ``DataLoader`` its place. Anything else, and what is stateful already, is left alone.

    The object keeps its identity and its class stays a subclass of what it was, so that references
    to it and ``isinstance`` stay valid.

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
    loader.place = _LoaderPosition(point, is_for_training)
    point.fetches_ahead |= is_for_training and sized_len(loader) is None
    return True


def is_resumable(loader: object) -> bool:
    """Whether ``make_resumable`` took this loader."""
    return isinstance(loader, _ResumableLoader)


def loader_state(
    loader: Any, *, prefetched: int, is_epoch_over: bool, has_ended: bool
) -> LoaderState:
    """Where this rank stands in a resumable loader."""
    epoch: _Epoch | None = loader.place.epoch
    seed = getattr(loader.sampler, "seed", None)
    if epoch is None or is_epoch_over:
        now = [each.get_state() for each in own_generators(loader)]
        return LoaderState(position=0, epoch_start=None, sampler_seed=seed, generators=now)
    before = epoch.before_last if prefetched else None
    position, then = epoch.position - prefetched, epoch.generators_at_start
    return LoaderState(position, epoch.epoch_start, before, seed, then, has_ended)


def resume_loader(loader: Any, state: LoaderState) -> None:
    """Let the next pass over the loader begin where ``state`` says."""
    loader.place.start = state
    loader.place.is_resumed = True
    if state.sampler_seed is not None and hasattr(loader.sampler, "seed"):
        loader.sampler.seed = state.sampler_seed
