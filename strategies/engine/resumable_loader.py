"""Loaders that know their position in an epoch and resume there.

``make_resumable`` turns a ``DataLoader`` into one. A resumed loader replays its epoch: the random
state in which the epoch's iterator was made is restored, so that the shuffle and the worker seeds
are the same; batches that training has used are skipped (by index if nothing but the index is
lost, else by loading them); then the random state at the checkpoint is restored, and training
continues. Several loaders of one training are replayed together, before the first batch of any.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from lightning.fabric.utilities.data import sized_len
from torch import Tensor
from torch.utils.data import DataLoader
from typing_extensions import override

from boltmesh.strategies.lightning_compat.loops import own_generators
from boltmesh.strategies.random_state import RandomState, capture_random_state, restore_random_state
from boltmesh.strategies.torch_compat.files import skip_indices


@dataclass
class LoaderState:
    """Position of one rank in one loader."""

    position: int
    """Number of batches of this epoch that training has used; 0 at the start of an epoch."""
    epoch_start: RandomState | None
    """Random state before this epoch's iterator was made; None at the start of an epoch."""
    before_prefetch: RandomState | None = None
    """Random state before the load of the batch that is fetched and not yet used, if any."""
    sampler_seed: int | None = None
    """Seed by which a distributed sampler shuffles each epoch."""
    generators: list[Tensor] | None = None
    """States of the generators of the loader and its samplers at ``epoch_start``; the present ones
    at the start of an epoch."""
    has_ended: bool = False
    """Whether an earlier pass of this epoch has ended, as for a loader beside a longer one."""

    @property
    def is_new_epoch(self) -> bool:
        """Whether the next pass begins an epoch, at the moment of the checkpoint."""
        return self.epoch_start is None and self.position == 0


class ResumePoint:
    """The random state of one rank's training, kept apart from that of validation.

    A resumed run restores it when training first uses it. Validation within a fit draws numbers
    too (a loader draws one whenever it is iterated over), and a checkpoint may be written before,
    during or after it; so the state before validation is restored after it, as Lightning does for
    the sanity check.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.is_resuming = False
        """True from the start of a resumed fit until its first batch is about to be used."""
        self.fetches_ahead = False
        """Whether a training loader has no length, so that batches are fetched before their use."""
        self._now: RandomState | None = None
        self._is_applied = False
        self._aside: RandomState | None = None
        self._waiting: list[_Epoch] = []

    def current(self) -> RandomState:
        """Return the state of training, also while validation runs."""
        return self._aside if self._aside is not None else capture_random_state(self.device)

    def set_aside(self) -> None:
        """Keep the state of training. Called when validation begins."""
        if self._aside is None:
            self._aside = capture_random_state(self.device)

    def take_back(self) -> None:
        """Restore the state of training. Called when validation has ended."""
        if self._aside is not None:
            restore_random_state(self._aside, self.device)
            self._aside = None

    def begin(self, state: RandomState | None) -> None:
        """Start a resumed fit with the checkpoint's random state, if it has one."""
        self.is_resuming = True
        self._now = state
        self._is_applied = False
        self._waiting = []

    def add_pass(self, epoch: "_Epoch", *, instead_of: "_Epoch | None") -> None:
        """Postpone the replay of a pass until the first batch of any loader is requested."""
        self._waiting = [each for each in self._waiting if each is not instead_of]
        self._waiting.append(epoch)

    def resume_passes(self) -> None:
        """Replay the postponed passes, then restore the random state.

        All together, in the order in which the loop began them: a loader draws numbers for its
        next batch after the others have drawn theirs at their beginning.
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
        """Restore the state, also a second time: Lightning may make an iterator twice."""
        if self._now is not None:
            restore_random_state(self._now, self.device)
        self._is_applied = True

    def apply_once(self) -> None:
        """Restore the state unless it was restored."""
        if self.is_resuming and not self._is_applied:
            self.apply()

    def settle(self) -> None:
        """End the resumption. Called before the first batch is used."""
        if self.is_resuming:
            self._aside = None
            self.apply_once()
            self.is_resuming = False
            self._now = None


@dataclass
class _LoaderPosition:
    """State of a resumable loader."""

    point: ResumePoint
    is_for_training: bool
    start: LoaderState | None = None
    """Start of the next pass in a resumed run."""
    is_resumed: bool = False
    """Whether one of its passes begins or has begun at a loaded state."""
    epoch: "_Epoch | None" = None
    """The latest pass."""

    def __getstate__(self) -> dict[str, Any]:
        # Users copy Trainers with their loaders, and an iterator cannot be copied.
        return {**vars(self), "epoch": None}


class _ResumableLoader:
    """Marks the class of a resumable loader."""

    place: _LoaderPosition | None = None
    """None for a copy that Lightning made and did not pass to the strategy."""


def _iterate(loader: Any) -> Iterator[Any]:
    """Replacement of ``__iter__``: a pass over the loader that knows its position."""
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
        start = last.start  # Lightning made a second iterator before it used a batch
    place.epoch = _Epoch(loader, make, place.point, start)
    if start is not None:
        place.point.add_pass(place.epoch, instead_of=last)
    return place.epoch


class _Epoch(Iterator[Any]):
    """One pass over a resumable loader."""

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
        """Whether it has repeated the end of an earlier pass and continues in the next one."""
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
        """Continue after the repeated end of an earlier pass."""
        self.goes_on, self._has_gone_on = False, True
        if self.start is not None and self.start.before_prefetch is not None:
            restore_random_state(self.start.before_prefetch, self._point.device)

    def _begin(self) -> None:
        self.epoch_start = capture_random_state(self._point.device)
        self.generators_at_start = [each.get_state() for each in self.generators]
        self.inner = self._make()

    def resume(self) -> None:
        """Make the iterator and skip used batches; Lightning has set the sampler's epoch by now.

        It does so after ``iter()``.
        """
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
    """Make a ``DataLoader`` resumable. Other objects and stateful loaders are left alone.

    The object keeps its identity and its new class is a subclass of the old one, so that references
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
        # The user's class comes first: else Python refuses the assignment of ``__class__``.
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
    """Return this rank's position in a resumable loader.

    Args:
        loader: A loader that ``is_resumable``.
        prefetched: Batches that are fetched and not yet used.
        is_epoch_over: The next pass begins an epoch.
        has_ended: See ``LoaderState``.
    """
    epoch: _Epoch | None = loader.place.epoch
    seed = getattr(loader.sampler, "seed", None)
    if epoch is None or is_epoch_over:
        now = [each.get_state() for each in own_generators(loader)]
        return LoaderState(position=0, epoch_start=None, sampler_seed=seed, generators=now)
    before = epoch.before_last if prefetched else None
    position, then = epoch.position - prefetched, epoch.generators_at_start
    return LoaderState(position, epoch.epoch_start, before, seed, then, has_ended)


def resume_loader(loader: Any, state: LoaderState) -> None:
    """Let the next pass over the loader begin at ``state``."""
    loader.place.start = state
    loader.place.is_resumed = True
    if state.sampler_seed is not None and hasattr(loader.sampler, "seed"):
        loader.sampler.seed = state.sampler_seed
