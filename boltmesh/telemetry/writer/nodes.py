"""Lets the hosts of a job know of each other's ranks, through the job's own store.

On each host one rank, the one with local rank 0, puts a summary of its host's ranks into the store
at the end of a step, about once a second, and reads those of the other hosts into a file of the
job's folder, from which a reader on this host fills in the ranks that have no file here. The store
is there in any case: no thread, no socket and no port is added.

Training neither waits nor fails for it. A key is read only after a look has shown that it is
there; an exchange that was slow makes the next one rare; the first that fails is the last.

Only dictionaries in memory are used so: a store that is a file would grow with each summary.
"""

import contextlib
import os
import socket
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, Protocol

import msgspec

from boltmesh.errors import TelemetryError
from boltmesh.telemetry.job import rank_file, write_whole
from boltmesh.telemetry.reader.rank_reader import RankReader
from boltmesh.telemetry.reader.rank_view import RankView
from boltmesh.telemetry.sanitize import clean
from boltmesh.telemetry.snapshot import (
    CollectiveInFlight,
    GroupProgress,
    Memory,
    RankSnapshot,
    RankState,
)

NODES_FILE: Final = "nodes.msgpack"
VERSION: Final = 1
MAX_NODES: Final = 16_384

EVERY_S: Final = 1.0
"""Time between two exchanges, at least."""
LONGEST_S: Final = 30.0
"""And at most."""
_NODES_PER_S: Final = 16
"""Each host reads from each other one: the store serves the square of their number."""
_SHARE: Final = 200
"""Exchanges may take 1 / _SHARE of the time."""
_SLOW_S: Final = 2.0
"""An exchange that takes longer says that the store is in trouble."""


class Store(Protocol):
    """The methods that are used of a ``torch.distributed.Store``."""

    def set(self, key: str, value: Any, /) -> None:
        """Set a key."""

    def add(self, key: str, amount: int, /) -> int:
        """Add to a counter, which begins at 0, and return it."""

    def check(self, keys: list[str], /) -> bool:
        """Tell whether all keys are there, without waiting for them."""

    def multi_get(self, keys: list[str], /) -> Sequence[bytes]:
        """Return the values; waits for keys that are not there."""


class RankSummary(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Summary of a rank for other hosts; see ``RankSnapshot``."""

    rank: int
    pid: int | None = None
    device: str = ""
    device_uuid: str | None = None
    state: RankState = "running"
    coordinates: dict[str, int] = {}
    phase: str | None = None
    global_step: int = 0
    epoch: int = 0
    last_seen: float = 0.0
    samples_per_second: float | None = None
    tokens_per_second: float | None = None
    memory: Memory | None = None
    in_flight: CollectiveInFlight | None = None
    groups: tuple[GroupProgress, ...] = ()
    """Without their members, which every host knows."""
    error: str | None = None


class NodeSummary(msgspec.Struct, frozen=True, kw_only=True):
    """Summary of a host for the others."""

    version: int = VERSION
    host: str
    time: float
    """Wall clock of that host."""
    interval_s: float
    """Until its next summary."""
    ranks: tuple[RankSummary, ...]


class ReceivedNode(msgspec.Struct, frozen=True):
    """The newest summary of another host."""

    received: float
    """Wall clock of this host, when it was new."""
    content: bytes
    """A NodeSummary."""


class ReceivedNodes(msgspec.Struct, frozen=True, kw_only=True):
    """The content of the file."""

    version: int = VERSION
    looked: float
    """Wall clock of the last exchange."""
    interval_s: float
    nodes: tuple[ReceivedNode, ...]
    note: str | None = None
    """Why there will be no more."""


class NodeExchange:
    """Publishes a summary of this host's ranks, and reads those of the other hosts.

    Args:
        path: The job's folder on this host.
        rank: The one that does it, for this process.
        world_size: Ranks of the job.
        find_store: Returns the job's store; None: there is none, for now or at all.
        say: Called once with the reason when it is given up.
        clock: Seconds that only go forward.
    """

    def __init__(
        self,
        path: Path,
        *,
        rank: int,
        world_size: int,
        find_store: Callable[[], Store | None],
        say: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.is_on = world_size > 1
        self.interval_s = EVERY_S
        self._path = path
        self._rank = rank
        self._world_size = world_size
        self._find_store = find_store
        self._say = say
        self._clock = clock
        self._due = clock()
        self._views: list[RankView] = []
        self._slot: int | None = None
        self._known: dict[int, ReceivedNode] = {}

    def after_step(self) -> None:
        """Exchange summaries, when it is time to. Never raises."""
        if self.is_on and self._clock() >= self._due:
            self._try()

    def end(self, *, is_heard: bool = True) -> None:
        """Exchange summaries a last time if other hosts may still read them; never raises."""
        if self.is_on and self._slot is not None and is_heard:
            self._try()
        self.is_on = False
        for view in self._views:
            view.close()

    def _try(self) -> None:
        began = self._clock()
        try:
            self._exchange()
        except Exception as error:  # noqa: BLE001 - telemetry never stops training
            self._give_up(f"{type(error).__name__}: {error}")
            return
        took = self._clock() - began
        if took > _SLOW_S:
            self._give_up(f"the job's store took {took:.1f} s to answer")
            return
        nodes_s = (len(self._known) + 1) / _NODES_PER_S
        self.interval_s = min(max(EVERY_S, nodes_s, _SHARE * took), LONGEST_S)
        self._due = self._clock() + self.interval_s

    def _give_up(self, why: str) -> None:
        self.is_on = False
        reason = clean(why.partition("\n")[0], 200)
        with contextlib.suppress(Exception):
            self._say(f"ranks of other hosts are no longer heard of: {reason}")
        with contextlib.suppress(Exception):
            self._write(note=reason)

    def _exchange(self) -> None:
        if not self._views:
            self._views = self._find_ranks()
            if len(self._views) == self._world_size:  # all are here
                self.is_on = False
                return
        store = self._find_store()
        if store is None:
            return
        if self._slot is None:
            self._slot = store.add("nodes", 1) - 1
        store.set(_key(self._slot), self._summarise())
        for slot in range(min(store.add("nodes", 0), MAX_NODES)):
            if slot != self._slot and slot not in self._known and store.check([_key(slot)]):
                self._known[slot] = ReceivedNode(0.0, b"")
        slots = list(self._known)
        contents = store.multi_get([_key(slot) for slot in slots]) if slots else []
        now = time.time()
        for slot, content in zip(slots, contents, strict=True):
            if content != self._known[slot].content:
                self._known[slot] = ReceivedNode(now, bytes(content))
        self._write()

    def _find_ranks(self) -> list[RankView]:
        """Return the ranks of this host: those whose files here have a living writer."""
        found = []
        for rank in range(self._world_size):
            path = rank_file(self._path, rank)
            if rank != self._rank and not path.exists():
                continue
            reader = RankReader(path, keep_steps=32, keep_spans=1)
            with contextlib.suppress(TelemetryError, OSError):
                reader.peek()
                if reader.is_alive:
                    found.append(RankView(rank, reader))
                    continue
            reader.close()
        return found

    def _summarise(self) -> bytes:
        summary = NodeSummary(
            host=socket.gethostname(),
            time=time.time(),
            interval_s=self.interval_s,
            ranks=tuple(_summarise(view.look()) for view in self._views),
        )
        return msgspec.msgpack.encode(summary)

    def _write(self, note: str | None = None) -> None:
        heard = ReceivedNodes(
            looked=time.time(),
            interval_s=self.interval_s,
            nodes=tuple(each for each in self._known.values() if each.content),
            note=note,
        )
        write_whole(self._path / NODES_FILE, msgspec.msgpack.encode(heard))


def _key(slot: int) -> str:
    return f"node-{slot}"


def _summarise(rank: RankSnapshot) -> RankSummary:
    return RankSummary(
        rank=rank.rank,
        pid=rank.pid,
        device=rank.device,
        device_uuid=rank.device_uuid,
        state=rank.state,
        coordinates=rank.coordinates,
        phase=rank.phase,
        global_step=rank.global_step,
        epoch=rank.epoch,
        last_seen=rank.last_seen,
        samples_per_second=rank.samples_per_second,
        tokens_per_second=rank.tokens_per_second,
        memory=rank.memory,
        in_flight=rank.in_flight,
        groups=tuple(msgspec.structs.replace(group, ranks=()) for group in rank.groups),
        error=rank.error,
    )


def remove_nodes(path: Path) -> None:
    """Forget the summaries that an earlier run under the same id received."""
    with contextlib.suppress(OSError):
        os.unlink(path / NODES_FILE)
