"""Finds out why a rank stands still: it asks the others through the store that all have met by.

A rank that left the common route (it waits for an agreement that does not come) says so, with the
place and what it wanted to do there. A rank that stands in a collective looks whether anybody has
left, and answers with what it did at that place itself. One that does the same there answers
nothing, so a rank that is only slow is never taken for one that went elsewhere.

Nothing is written while training moves, and a standing rank reads one number every few seconds.

Says in words how ranks have parted: plain functions over what each of them said.
"""

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final, NamedTuple

import msgspec
from torch._C._distributed_c10d import Store

from boltmesh.errors import DivergenceError
from boltmesh.strategies.torch_compat.communication import shared_store

_MOST_RANKS_NAMED = 8

_ADVICE = (
    "With sharded parameters all ranks run the same modules in the same order. Let one rank decide "
    "and broadcast, or run the module on every rank and multiply by zero what is not wanted."
)


class RankReport(NamedTuple):
    """What one rank does at the place where they part."""

    rank: int
    text: str


def describe_parting(said: Iterable[RankReport]) -> str:
    """Return who does what where the others do something else; those that are most come last."""
    by_text: dict[str, list[int]] = {}
    for rank, text in sorted(set(said)):
        by_text.setdefault(text, []).append(rank)
    # Of parties of one size the one with the first rank is what the others are measured by.
    parties = sorted(by_text.items(), key=lambda party: (len(party[1]), -party[1][0]))
    words = [f"{_name_ranks(ranks)} {text}" for text, ranks in parties]
    return f"The ranks have parted: {' where '.join(words)}. {_ADVICE}"


def _name_ranks(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    named = ", ".join(map(str, ranks[:_MOST_RANKS_NAMED]))
    more = len(ranks) - _MOST_RANKS_NAMED
    return f"each of ranks {named}" + (f" and {more} more" if more > 0 else "")


GRACE_S: Final = 30.0
"""How long a rank that hangs may take to notice that the others are gone, before it is ended."""

_GATHER_ANSWERS_S: Final = 0.5
_POLL_S: Final = 0.05


class _MismatchedRank(msgspec.Struct, frozen=True):
    """One rank that left the common route."""

    rank: int
    index: int
    text: str


class Watchdog:
    """The questions and answers of one rank.

    Args:
        rank: Global rank.
        name: Of the group, the same on all of its ranks.
        passed: What this rank did at a place, by its number from the start.
        idle_s: How long ago it did anything.
        patience_s: From when on it stands still.
        on_stuck: See ``OrderCheck``.
    """

    def __init__(
        self,
        rank: int,
        name: str,
        passed: Callable[[int], str | None],
        idle_s: Callable[[], float],
        *,
        patience_s: float,
        on_stuck: Callable[[DivergenceError], None],
    ) -> None:
        self.verdict: str | None = None
        """Who went where, once that is proven."""
        self.grace_s = GRACE_S
        self._rank, self._name = rank, name
        self._passed, self._idle_s = passed, idle_s
        self._patience_s = patience_s
        self._on_stuck = on_stuck
        self._lock = threading.RLock()
        self._is_over = threading.Event()
        self._thread: threading.Thread | None = None
        self._run = 0
        self._mine: int | None = None
        """The number under which this rank says that it left."""
        self._has_said = False
        self._pending: list[int] = []
        self._num_listed = 0
        self._own: tuple[float, str] | None = None
        """When this rank answered one who left, and what it makes of that itself."""

    def start(self) -> None:
        """Watch from a thread of its own; every start is another run with other keys."""
        self.stop()
        self._run += 1
        self._mine, self._pending, self._num_listed = None, [], 0
        self._has_said = False
        self._own = self.verdict = None
        self._is_over = threading.Event()
        self._thread = threading.Thread(
            target=self._watch, args=(self._is_over,), name="boltmesh-standstill", daemon=True
        )
        self._thread.start()

    def stop(self) -> None:
        """Watch no longer."""
        self._is_over.set()

    def leave(self, index: int, text: str) -> None:
        """Say, once, that this rank left the common route, at which place and for what."""
        with self._lock, self._store() as store:
            if store is None or self._has_said:
                return
            if self._mine is None:
                self._mine = store.add("left", 1)
            said = _MismatchedRank(self._rank, index, text)
            store.set(f"left/{self._mine}", msgspec.json.encode(said).decode())
            self._has_said = True

    def ask(self) -> str | None:
        """Return who went where, if that is proven."""
        self._look()
        return self.verdict or (self._own[1] if self._own is not None else None)

    def ask_who_stays(self, index: int, text: str) -> str | None:
        """The same for a rank that left: does any other stand at that place for something else?"""
        self.leave(index, text)
        self._look()
        with self._lock, self._store() as store:
            if self.verdict is None and store is not None and store.add(f"answers/{self._mine}", 0):
                time.sleep(_GATHER_ANSWERS_S)
                num_answers = store.add(f"answers/{self._mine}", 0)
                keys = [f"answers/{self._mine}/{at}" for at in range(1, num_answers + 1)]
                said = [
                    msgspec.json.decode(store.get(key), type=RankReport)
                    for key in keys
                    if store.check([key])
                ]
                if said:
                    self.settle(describe_parting([RankReport(self._rank, text), *said]))
                    self._wait_for_readers(num_answers)
        if self.verdict is not None:
            self.stop()  # the caller is the thread that trains, and knows
        return self.verdict

    def settle(self, verdict: str) -> str:
        """Tell all who look what is proven and watch no longer; return it."""
        self._publish(verdict)
        self.stop()
        return verdict

    def _publish(self, verdict: str) -> None:
        self.verdict = verdict
        with self._lock, self._store() as store:
            if store is not None and store.add("settled", 1) == 1:
                store.set("verdict", verdict)

    def _watch(self, is_over: threading.Event) -> None:
        known_since = 0.0
        while not is_over.wait(self._patience_s / 2):
            if self._idle_s() < self._patience_s:
                known_since = 0.0
                continue
            self._look()
            if self.verdict is None and self._own is not None:
                since, verdict = self._own
                if time.monotonic() - since >= self._patience_s:  # who left does not ask any more
                    self._publish(verdict)
            if self.verdict is None:
                continue
            known_since = known_since or time.monotonic()
            if time.monotonic() - known_since >= self.grace_s:
                self._end_process(self.verdict)

    def _look(self) -> None:
        """Read what has been proven, and answer those who left this rank's route."""
        with self._lock, self._store() as store:
            if store is None or self.verdict is not None:
                return
            if store.check(["verdict"]):
                self.verdict = store.get("verdict").decode()
                store.add("read", 1)
                return
            num_left = store.add("left", 0)
            self._pending += range(self._num_listed + 1, num_left + 1)
            self._num_listed = num_left
            for number in self._pending.copy():
                if self._answer(store, number):
                    self._pending.remove(number)

    def _answer(self, store: Store, number: int) -> bool:
        """Compare with one who left; return whether there is nothing more to say."""
        key = f"left/{number}"
        if not store.check([key]):
            return False
        left = msgspec.json.decode(store.get(key), type=_MismatchedRank)
        mine = self._passed(left.index)
        if mine is None:
            return False  # this rank is not there yet
        if mine != left.text:
            parting = describe_parting(
                [RankReport(left.rank, left.text), RankReport(self._rank, mine)]
            )
            self._own = self._own or (time.monotonic(), parting)
            at = store.add(f"answers/{number}", 1)
            said = msgspec.json.encode(RankReport(self._rank, mine)).decode()
            store.set(f"answers/{number}/{at}", said)
        return True

    @contextlib.contextmanager
    def _store(self) -> Iterator[Store | None]:
        """Give the store, or None where there is none; what fails in it is left undone."""
        with contextlib.suppress(RuntimeError):  # it goes with the process that serves it
            yield shared_store(f"boltmesh-divergence-{self._name}-{self._run}")

    def _wait_for_readers(self, num_readers: int) -> None:
        """Stay until they have read the verdict: with this rank its store may go."""
        until = time.monotonic() + 2 * self._patience_s
        with self._store() as store:
            while store is not None and time.monotonic() < until:
                if store.add("read", 0) >= num_readers:
                    return
                time.sleep(_POLL_S)

    def _end_process(self, verdict: str) -> None:
        """End a rank whose training hangs in a collective that will never complete."""
        with contextlib.suppress(Exception):
            self._on_stuck(DivergenceError(verdict))
        sys.stderr.write(f"boltmesh: rank {self._rank} ends: {verdict}\n")
        sys.stderr.flush()
        os._exit(1)
