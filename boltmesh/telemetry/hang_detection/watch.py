"""Explains on every rank why its collectives do not advance, from the progress of all ranks.

[Note: Which rank publishes and prints]
The monitor thread of each rank sleeps and checks, a few times a minute, how long ago this rank
entered or left a collective. A rank that has been idle for half of ``patience_s`` publishes its
progress in the job's store, whether it waits itself or others wait for it. A rank that has been
idle for all of it reads the progress of the others, and the telemetry files of the ranks of this
host that published nothing. One of the ranks that wait in the same collective does that, and posts
the explanation on a ``FailureBoard`` for the others; one of the ranks that find the same
explanation prints it. Nothing is written or read while collectives advance.

The explanation goes into the error with which the collective ends the run, see ``explain``.
"""

import contextlib
import functools
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import msgspec
from torch._C._distributed_c10d import Store
from typing_extensions import override

from boltmesh.errors import BoltMeshError
from boltmesh.failure_board import FailureBoard, Monitor
from boltmesh.process import write_stderr
from boltmesh.telemetry.hang_detection.diagnose import Explanation, RankProgress, explain, find_wait
from boltmesh.telemetry.hang_detection.inspect import idle_s, own_progress, progress_from_file
from boltmesh.telemetry.reader.cause import LOST_PEER, is_consequence
from boltmesh.telemetry.writer.phases import PhaseClock
from boltmesh.telemetry.writer.rank_file import RankFile
from boltmesh.telemetry.writer.torch_compat.hook import COLLECTIVES
from boltmesh.torch_compat import job_store

LONGEST_PATIENCE_S: Final = 120.0
LONGEST_PATIENCE_WITH_LONG_S: Final = 600.0
"""If all missing ranks validate, write a checkpoint, or have made no step yet."""

LONGEST_INTERVAL_S: Final = 5.0
EVENT: Final = "hang: "
"""Prefix of the event in telemetry."""

_TIMEOUTS: Final = ("timed out", "timeout")


class HangWatch:
    """Monitors one rank. See [Note: Which rank publishes and prints].

    Args:
        rank: Global rank.
        world_size: Ranks of the job.
        timeout_s: How long a collective may take before the run ends, seconds. A hang is explained
            after a third of it, and after two minutes at the latest.
        folder: Folder of the job's telemetry, for ranks that publish nothing.
        progress: Returns the progress of this rank.
        idle_s: Returns the seconds since it entered or left a collective, cheaply.
        record: Called with the explanation on the one rank that prints it.
    """

    def __init__(
        self,
        *,
        rank: int,
        world_size: int,
        timeout_s: float,
        folder: Path,
        progress: Callable[[], RankProgress],
        idle_s: Callable[[], float],
        record: Callable[[str], None],
    ) -> None:
        self.explanation: str | None = None
        """Why this rank waits, once that is known."""
        self.patience_s = min(timeout_s / 3, LONGEST_PATIENCE_S)
        self._long_patience_s = min(2 * timeout_s / 3, LONGEST_PATIENCE_WITH_LONG_S)
        self._rank, self._world_size, self._timeout_s = rank, world_size, timeout_s
        self._folder, self._name = folder, f"hangs-{folder.name}"
        self._progress, self._idle_s, self._record = progress, idle_s, record
        self._lock = threading.Lock()
        self._own_wait: str | None = None
        """The collective that this rank explains for all ranks that wait in it."""
        self._has_published = self._has_explained = False
        interval_s = min(self.patience_s / 4, LONGEST_INTERVAL_S)
        self._monitor = Monitor(self._poll, interval_s, name="boltmesh-hangs")
        self._monitor.start()

    def stop(self) -> None:
        """Stop the monitor."""
        self._monitor.stop()

    def explain(self, error: BaseException) -> None:
        """Put the explanation into the error with which a collective ended."""
        text = str(error)
        if self._has_explained or not is_consequence(text):
            return
        is_timeout = any(sign in text.lower() for sign in _TIMEOUTS)
        if self.explanation is None and is_timeout:
            with contextlib.suppress(Exception):  # the store ends with the rank that serves it
                self._diagnose(self._idle_s(), is_last=True)
        if self.explanation is None:
            return
        self._has_explained = True
        lost = next((line for line in text.splitlines() if _is_of_lost_peer(line)), "")
        if isinstance(error, BoltMeshError):
            error.args = (f"{text.rstrip('.')}. {self.explanation}",)
        else:
            suffix = "" if is_timeout or not lost else f" ({lost})"
            error.args = (f"{self.explanation}{suffix}",)

    def _poll(self) -> None:
        idle_s = self._idle_s()
        if idle_s >= self.patience_s / 2:
            with contextlib.suppress(Exception):  # training ends as it would without this
                self._diagnose(idle_s)
            return
        self.explanation = self._own_wait = None
        if self._has_published:
            with contextlib.suppress(Exception):
                self._withdraw()

    def _diagnose(self, idle_s: float, *, is_last: bool = False) -> None:
        """Publish this rank's progress; once it has waited for ``patience_s``, find out why."""
        with self._lock:
            store = job_store(self._name)
            if store is None:
                return
            own = self._progress()
            store.set(f"progress/{self._rank}", msgspec.json.encode(own).decode())
            self._has_published = True
            if self.explanation is not None or (idle_s < self.patience_s and not is_last):
                return
            wait = find_wait({self._rank: own}, self._rank, self._world_size)
            if wait is None:
                return
            key = f"{wait.group.name}/{wait.group.key[1]}/{wait.group.sequence}"
            board = FailureBoard(self._rank, f"{self._name}/{key}")
            if self._own_wait != key:
                self.explanation = board.peek()
                if self.explanation is not None:
                    return
                if store.add(f"turn/{key}", 1) > 1 and not is_last:
                    return
            self._own_wait = key
            known = _PublishedProgress(store, own, self._folder)
            found = explain(known, self._rank, self._world_size)
            if found is None or (
                found.takes_long and idle_s < self._long_patience_s and not is_last
            ):
                return
            self.explanation = found.text
            board.post(found.text)
            if store.add(f"printed/{found.key}", 1) == 1:
                self._print(found, idle_s)

    def _withdraw(self) -> None:
        """Remove the published progress: it is out of date in the next hang."""
        with self._lock:
            store = job_store(self._name)
            if store is not None:
                store.delete_key(f"progress/{self._rank}")
            self._has_published = False

    def _print(self, found: Explanation, idle_s: float) -> None:
        """Print the explanation, and record it."""
        self._record(f"{EVENT}{found.text}")
        left_s = self._timeout_s - idle_s
        when = f"Nothing has moved for {idle_s:.0f} s"
        when += f"; the run ends in {left_s:.0f} s unless it does." if left_s > 0 else "."
        lines = [f"boltmesh: {EVENT}{found.text} {when}", *found.stacks]
        write_stderr("\n".join(lines) + "\n")


class _PublishedProgress(Mapping[int, RankProgress]):
    """Progress by rank: as the rank published it, else from its telemetry file on this host.

    Read once per rank, and only for the ranks that are looked up.
    """

    def __init__(self, store: Store, own: RankProgress, folder: Path) -> None:
        self._store, self._folder = store, folder
        self._known: dict[int, RankProgress | None] = {own.rank: own}

    @override
    def __getitem__(self, rank: int) -> RankProgress:
        if rank not in self._known:
            self._known[rank] = self._read(rank)
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

    def _read(self, rank: int) -> RankProgress | None:
        recorded = progress_from_file(rank, self._folder)
        key = f"progress/{rank}"
        if not self._store.check([key]):
            return recorded
        published = msgspec.json.decode(self._store.get(key), type=RankProgress)
        # The progress that a rank published in an earlier hang is out of date.
        return published if recorded is None or _is_current(published, recorded) else recorded


def _is_current(published: RankProgress, recorded: RankProgress) -> bool:
    """Return whether a rank has entered nothing since it published its progress."""
    sequences = {group.key: group.sequence for group in published.groups}
    return all(sequences.get(group.key, 0) >= group.sequence for group in recorded.groups)


def _is_of_lost_peer(line: str) -> bool:
    return any(sign in line.lower() for sign in LOST_PEER)


def start_watch(
    file: RankFile,
    clock: PhaseClock,
    *,
    timeout_s: float,
    progress: Callable[[], tuple[int, bool]],
) -> HangWatch | None:
    """Monitor this rank from now on; returns None for a job of one rank, which waits for no other.

    Args:
        file: The rank's telemetry, which also receives the explanation.
        clock: Its phase, and the thread that trains.
        timeout_s: How long a collective may take before it ends the run, seconds.
        progress: Returns the newest optimizer step, and whether it was made in this run.
    """
    header, folder = file.header, file.path.parent
    if header.world_size == 1:
        return None
    return HangWatch(
        rank=header.rank,
        world_size=header.world_size,
        timeout_s=timeout_s,
        folder=folder,
        progress=functools.partial(
            own_progress,
            file,
            clock,
            rank=header.rank,
            settle=COLLECTIVES.settle,
            progress=progress,
        ),
        idle_s=functools.partial(idle_s, file),
        record=functools.partial(file.event, "warning"),
    )
