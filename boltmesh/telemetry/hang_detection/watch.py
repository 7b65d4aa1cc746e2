"""Explains on every rank why it stands still, by what the others say of themselves.

[Note: Who speaks when]
A thread of each rank sleeps and looks, a few times a minute, how long ago this rank entered or
left a collective. One that has stood still for half of the patience puts into the job's store
where it stands, whatever it does: one that waits and one that others wait for alike. One that has
waited for all of the patience reads what the others said, and the telemetry files of those on this
host that said nothing. Of all that wait in the same collective one does that, and of all that come
to the same result one prints it. Nothing is written or asked while collectives advance.

What is found goes into the error by which the collective ends the run, see ``explain``.

Starts the watch over this rank, with what its recorder has.
"""

import contextlib
import functools
import os
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, Protocol

import msgspec
from typing_extensions import override

from boltmesh.errors import BoltMeshError
from boltmesh.telemetry.hang_detection.diagnose import Explanation, RankProgress, explain, find_wait
from boltmesh.telemetry.hang_detection.inspect import idle_s, look_at, look_at_self
from boltmesh.telemetry.reader.cause import LOST_PEER, is_consequence
from boltmesh.telemetry.writer.phases import PhaseClock
from boltmesh.telemetry.writer.rank_file import RankFile
from boltmesh.telemetry.writer.torch_compat.hook import COLLECTIVES
from boltmesh.telemetry.writer.torch_compat.operators import default_store

LONGEST_PATIENCE_S: Final = 120.0
LONGEST_PATIENCE_WITH_LONG_S: Final = 600.0
"""Where all that are missing validate, write a checkpoint, or have made no step yet."""

LONGEST_INTERVAL_S: Final = 5.0
EVENT: Final = "hang: "
"""Begins the line that telemetry keeps."""

_TIMEOUTS: Final = ("timed out", "timeout")


class WatchStore(Protocol):
    """What is used of a ``torch.distributed.Store``."""

    def set(self, key: str, value: Any, /) -> None:
        """Set a key."""

    def get(self, key: str, /) -> bytes:
        """Return a value; waits for a key that is not there."""

    def add(self, key: str, amount: int, /) -> int:
        """Add to a counter, which begins at 0, and return it."""

    def check(self, keys: list[str], /) -> bool:
        """Tell whether all keys are there, without waiting for them."""

    def delete_key(self, key: str, /) -> bool:
        """Remove a key."""


class HangWatch:
    """Watches one rank from a thread of its own. See [Note: Who speaks when].

    Args:
        rank: Global rank.
        world_size: Ranks of the job.
        timeout_s: How long a collective may take before the run ends, seconds. The first word
            comes after a third of it, and after two minutes at the latest.
        folder: Of the job's telemetry, for ranks that do not answer.
        look: Returns where this rank stands.
        idle_s: Returns since when it has neither entered nor left a collective, cheaply.
        find_store: Returns the job's store; None: there is none.
        tell: Told the explanation, by the one rank that tells it.
    """

    def __init__(
        self,
        *,
        rank: int,
        world_size: int,
        timeout_s: float,
        folder: Path,
        look: Callable[[], RankProgress],
        idle_s: Callable[[], float],
        find_store: Callable[[], WatchStore | None],
        tell: Callable[[str], None],
    ) -> None:
        self.verdict: str | None = None
        """Why this rank waits, once that is known."""
        self.patience_s = min(timeout_s / 3, LONGEST_PATIENCE_S)
        self._long_patience_s = min(2 * timeout_s / 3, LONGEST_PATIENCE_WITH_LONG_S)
        self._interval_s = min(self.patience_s / 4, LONGEST_INTERVAL_S)
        self._rank, self._world_size, self._timeout_s = rank, world_size, timeout_s
        self._folder = folder
        self._look, self._idle_s = look, idle_s
        self._find_store, self._tell = find_store, tell
        self._lock = threading.Lock()
        self._turn: str | None = None
        """What this rank has to explain for all that wait in the same collective."""
        self._has_said = self._has_explained = False
        self._is_over = threading.Event()
        threading.Thread(target=self._watch, name="boltmesh-hangs", daemon=True).start()

    def stop(self) -> None:
        """Watch no longer."""
        self._is_over.set()

    def explain(self, error: BaseException) -> None:
        """Put what is known into the error by which a collective was given up."""
        text = str(error)
        if self._has_explained or not is_consequence(text):
            return
        is_timeout = any(sign in text.lower() for sign in _TIMEOUTS)
        if self.verdict is None and is_timeout:
            with contextlib.suppress(Exception):  # the store goes with the rank that serves it
                self._consider(self._idle_s(), is_last=True)
        if self.verdict is None:
            return
        self._has_explained = True
        lost = next((line for line in text.splitlines() if _is_of_lost_peer(line)), "")
        if isinstance(error, BoltMeshError):
            error.args = (f"{text.rstrip('.')}. {self.verdict}",)
        else:
            error.args = (self.verdict if is_timeout or not lost else f"{self.verdict} ({lost})",)

    def _watch(self) -> None:
        while not self._is_over.wait(self._interval_s):
            idle_s = self._idle_s()
            if idle_s < self.patience_s / 2:
                self.verdict = self._turn = None
                if self._has_said:
                    with contextlib.suppress(Exception):
                        self._take_back()
                continue
            with contextlib.suppress(Exception):  # training ends as it would without this
                self._consider(idle_s)

    def _consider(self, idle_s: float, *, is_last: bool = False) -> None:
        """Say where this rank stands; when it has waited for long enough, find out why."""
        with self._lock:
            store = self._find_store()
            if store is None:
                return
            own = self._look()
            store.set(f"standing/{self._rank}", msgspec.json.encode(own).decode())
            self._has_said = True
            if self.verdict is not None or (idle_s < self.patience_s and not is_last):
                return
            wait = find_wait({self._rank: own}, self._rank, self._world_size)
            if wait is None:
                return
            key = f"{wait.group.name}/{wait.group.key[1]}/{wait.group.sequence}"
            if self._turn != key and store.check([f"verdict/{key}"]):
                self.verdict = store.get(f"verdict/{key}").decode()
                return
            if self._turn != key and store.add(f"turn/{key}", 1) > 1 and not is_last:
                return
            self._turn = key
            found = explain(_Answers(store, own, self._folder), self._rank, self._world_size)
            if found is None or (
                found.takes_long and idle_s < self._long_patience_s and not is_last
            ):
                return
            self.verdict = found.text
            store.set(f"verdict/{key}", found.text)
            if store.add(f"told/{found.key}", 1) == 1:
                self._say(found, idle_s)

    def _take_back(self) -> None:
        """Remove what is no answer to the next question; a rank may be unable to speak then."""
        with self._lock:
            store = self._find_store()
            if store is not None:
                store.delete_key(f"standing/{self._rank}")
            self._has_said = False

    def _say(self, found: Explanation, idle_s: float) -> None:
        """Print one message, and record it."""
        self._tell(f"{EVENT}{found.text}")
        left_s = self._timeout_s - idle_s
        when = f"Nothing has moved for {idle_s:.0f} s"
        when += f"; the run ends in {left_s:.0f} s unless it does." if left_s > 0 else "."
        lines = [f"boltmesh: {EVENT}{found.text} {when}", *found.stacks]
        sys.stderr.flush()
        os.write(2, ("\n".join(lines) + "\n").encode(errors="replace"))


class _Answers(Mapping[int, RankProgress]):
    """Where the ranks stand: as they say themselves, else as their files on this host say.

    Each is asked for once, and only those that are looked for.
    """

    def __init__(self, store: WatchStore, own: RankProgress, folder: Path) -> None:
        self._store, self._folder = store, folder
        self._known: dict[int, RankProgress | None] = {own.rank: own}

    @override
    def __getitem__(self, rank: int) -> RankProgress:
        if rank not in self._known:
            self._known[rank] = self._ask(rank)
        found = self._known[rank]
        if found is None:
            raise KeyError(rank)
        return found

    @override
    def __iter__(self) -> Any:
        return iter([rank for rank, found in self._known.items() if found is not None])

    @override
    def __len__(self) -> int:
        return sum(found is not None for found in self._known.values())

    def _ask(self, rank: int) -> RankProgress | None:
        seen = look_at(rank, self._folder)
        key = f"standing/{rank}"
        if not self._store.check([key]):
            return seen
        said = msgspec.json.decode(self._store.get(key), type=RankProgress)
        # What it said in an earlier standstill is no answer to this one.
        return said if seen is None or _agree(said, seen) else seen


def _agree(said: RankProgress, seen: RankProgress) -> bool:
    """Tell whether a rank has entered nothing since it spoke."""
    told = {group.key: group.sequence for group in said.groups}
    return all(told.get(group.key, 0) >= group.sequence for group in seen.groups)


def _is_of_lost_peer(line: str) -> bool:
    return any(sign in line.lower() for sign in LOST_PEER)


def start_watch(
    file: RankFile,
    clock: PhaseClock,
    *,
    timeout_s: float,
    progress: Callable[[], tuple[int, bool]],
) -> HangWatch | None:
    """Watch this rank from now on; a rank alone in its job waits for nobody, and None is returned.

    Args:
        file: What the rank records, and where what is found is told.
        clock: Its phase, and the thread that trains.
        timeout_s: How long a collective may take before it ends the run, seconds.
        progress: Gives the newest optimizer step, and whether it has made one in this run.
    """
    header, folder = file.header, file.path.parent
    if header.world_size == 1:
        return None
    return HangWatch(
        rank=header.rank,
        world_size=header.world_size,
        timeout_s=timeout_s,
        folder=folder,
        look=functools.partial(
            look_at_self,
            file,
            clock,
            rank=header.rank,
            settle=COLLECTIVES.settle,
            progress=progress,
        ),
        idle_s=functools.partial(idle_s, file),
        find_store=functools.partial(default_store, f"boltmesh-hangs-{folder.name}", may_grow=True),
        tell=functools.partial(file.event, "warning"),
    )
