"""The first cause of a failure, shared by the ranks of a group through the job's store.

A rank that fails posts its cause; the first one stays. The others find it because they stop making
progress: a daemon thread of each rank (``Monitor``) reads the board only while the rank is idle,
so a job that advances sends nothing. A rank that still hangs ``GRACE_S`` after the cause is known,
for example in a collective that never completes, is ended with it.

What posts here, and what for:

    strategies/data_parallel/order_check.py   order check of sharded gathers: mismatch explanation
    strategies/pipeline/runtime/           failing stage, handshake, error between batches,
                                           failure of another pipeline or of another rank's hook
    telemetry/hang_detection/watch.py      why a collective does not advance; never ends a process

The launchers (``launch/``, ``lightning_compat/launchers.py``) see exit codes instead of a store and
share ``boltmesh.process.end_process``.
"""

import atexit
import contextlib
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from typing import Final

from torch._C._distributed_c10d import Store
from torch.distributed import Work
from typing_extensions import override

from boltmesh.errors import BoltMeshError
from boltmesh.process import encodable, end_process
from boltmesh.torch_compat import job_store

GRACE_S: Final = 30.0
"""Seconds that a rank may hang once a failure is known, before it is ended."""

POLL_S: Final = 0.1
SPREAD_S: Final = 3 * POLL_S
"""Seconds after which every idle rank has read a cause: it notices that it is idle, then reads."""

_READ_S: Final = 10.0
_LEAST_S: Final = 3.0

_EXIT_S: Final = 10.0
"""Seconds that a process waits at its end for the threads of its monitors."""


class Monitor:
    """Daemon thread that calls ``check`` in an interval, from ``start`` to ``stop``.

    Args:
        check: Function to call; it has to catch its errors.
        interval_s: Seconds between two calls. The thread sleeps; nothing wakes it in between.
        name: Name of the thread.
    """

    def __init__(self, check: Callable[[], None], interval_s: float, *, name: str) -> None:
        self._check, self._interval_s, self._name = check, interval_s, name
        self._thread: _MonitorThread | None = None

    def start(self) -> None:
        """Start the thread unless it runs."""
        if self._thread is None:
            self._thread = _MonitorThread(self._check, self._interval_s, self._name)
            self._thread.start()

    def stop(self) -> None:
        """Stop the thread. It has ended then, unless it waits in ``check``."""
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.stop()
            if thread is not threading.current_thread():
                thread.join(POLL_S)


class _MonitorThread(threading.Thread):
    def __init__(self, check: Callable[[], None], interval_s: float, name: str) -> None:
        super().__init__(name=name, daemon=True)
        self._check, self._interval_s = check, interval_s
        self._is_over = threading.Event()

    @override
    def run(self) -> None:
        while not self._is_over.wait(self._interval_s):
            self._check()

    def stop(self) -> None:
        """Let the thread end after the check that it is in."""
        self._is_over.set()


@atexit.register
def _end_threads() -> None:
    """End the threads of monitors at the end of the process.

    A thread that returns from a call of torch, such as one of the store, to an interpreter that is
    ending aborts the process: ``terminate called without an active exception``.
    """
    threads = [each for each in threading.enumerate() if isinstance(each, _MonitorThread)]
    for thread in threads:
        thread.stop()
    until_s = time.monotonic() + _EXIT_S
    for thread in threads:
        thread.join(max(0.0, until_s - time.monotonic()))


class FailureBoard:
    """The board of one group, as one of its ranks sees it.

    Args:
        rank: Global rank, for messages.
        name: Name of the group; the same on all of its ranks, and of no other board.
        error: Class of the error that ``on_stuck`` receives.
        on_stuck: Called from the monitor thread before a rank that hangs is ended.
        idle_s: Seconds without ``note_progress`` after which the rank counts as idle.
        poll_s: Interval of the monitor thread, seconds.
        check: Called while the rank is idle and no cause is known; by default reads the board.
    """

    def __init__(
        self,
        rank: int,
        name: str,
        *,
        error: type[BoltMeshError] = BoltMeshError,
        on_stuck: Callable[[BoltMeshError], None] = lambda _: None,
        idle_s: float = POLL_S,
        poll_s: float = POLL_S,
        check: Callable[[], object] | None = None,
    ) -> None:
        self.cause: str | None = None
        """The first cause, once this rank knows one."""
        self.grace_s = GRACE_S
        self._rank, self._name = rank, name
        self._error, self._on_stuck = error, on_stuck
        self._limit_s = idle_s
        self._check = self.peek if check is None else check
        self._round = 0
        self._moved_s = time.monotonic()
        self._known_s: float | None = None
        self._is_monitored = False
        self._monitor = Monitor(self._poll, poll_s, name="boltmesh-failures")

    def post(self, cause: str) -> None:
        """Post why this rank fails. The first cause of the group stays and becomes ``cause``."""
        cause = encodable(cause)
        with self.store() as store:
            if store is not None:
                if store.add("posts", 1) == 1:
                    store.set("cause", cause)
                else:
                    cause = self._read(store) or cause
        self.cause = self.cause or cause

    def peek(self) -> str | None:
        """Return the first cause, None if there is none yet. Does not wait."""
        with self.store() as store:
            if self.cause is None and store is not None and store.check(["cause"]):
                self.cause = store.get("cause").decode()
                store.add("readers", 1)
        return self.cause

    def wait_first(self) -> str:
        """Return the first cause, after some rank of the group has failed. Waits for its post."""
        with self.store() as store:
            if store is not None:
                self.cause = self._read(store) or self.cause
        return self.cause or "A rank failed and did not post a cause."

    def wait_for_readers(self, count: int, timeout_s: float) -> None:
        """Wait until ``count`` ranks have read the cause: the store may end with this process."""
        until_s = time.monotonic() + timeout_s
        with self.store() as store:
            while store is not None and time.monotonic() < until_s:
                if store.add("readers", 0) >= count:
                    return
                time.sleep(POLL_S / 2)

    def reset(self) -> None:
        """Start an empty board. All ranks of the group, after all have seen the failure."""
        self.cause = None
        self._round += 1

    def note_progress(self) -> None:
        """Record that this rank advances."""
        self._moved_s = time.monotonic()

    @property
    def is_idle(self) -> bool:
        """Whether this rank has made no progress for ``idle_s``."""
        return time.monotonic() - self._moved_s >= self._limit_s

    def start(self) -> None:
        """Monitor this rank: read the board while it is idle, end it if it hangs."""
        self.note_progress()
        self._is_monitored = True
        self._monitor.start()

    @contextlib.contextmanager
    def monitoring(self) -> Iterator[None]:
        """Monitor this rank within; the thread stays until ``close``."""
        self.start()
        try:
            yield
        finally:
            self._is_monitored = False

    def close(self) -> None:
        """Stop the thread, until the board is monitored again."""
        self._is_monitored = False
        self._monitor.stop()

    @contextlib.contextmanager
    def store(self) -> Iterator[Store | None]:
        """Give the board's keys of the store, or None without one.

        Errors of the store within are dropped: it ends with the process that serves it.
        """
        with contextlib.suppress(RuntimeError):
            yield job_store(f"boltmesh-failures-{self._name}-{self._round}")

    @staticmethod
    def _read(store: Store) -> str:
        store.wait(["cause"], timedelta(seconds=_READ_S))
        return store.get("cause").decode()

    def _poll(self) -> None:
        """Read the board if this rank is idle, and end the rank if it hangs. On the monitor."""
        if not (self._is_monitored and self.is_idle):
            self._known_s = None
            return
        if self.cause is None:
            self._check()
        if self.cause is None:
            return
        self._known_s = self._known_s or time.monotonic()
        if time.monotonic() - self._known_s >= self.grace_s:
            with contextlib.suppress(Exception):
                self._on_stuck(self._error(self.cause))
            end_process(1, f"rank {self._rank} ends: {self.cause}")


class Deadline:
    """How long ranks wait for each other once one of them is known to have failed.

    A rank that waited in vain for a peer has waited for as long as a collective may take. The
    messages in flight and the step-end handshake would wait as long again for the same peer if it
    hangs. So all of them together get the rest of that one timeout, and at least three seconds for
    the other ranks, which read of a failure only when they are idle.

    Args:
        timeout: How long ranks may wait for each other; None: torch's default.
    """

    def __init__(self, timeout: timedelta | None) -> None:
        self._timeout_s = None if timeout is None else timeout.total_seconds()
        self._ends_s: float | None = None

    def begin(self, since_s: float) -> None:
        """Start the clock: what has failed began at ``since_s`` of the monotonic clock."""
        if self._timeout_s is not None:
            self._ends_s = max(since_s + self._timeout_s, time.monotonic() + _LEAST_S)

    def wait(self, works: Iterable[Work | None]) -> None:
        """Wait for messages on the CPU; without a limit of its own before ``begin``.

        Raises:
            RuntimeError: A message did not arrive.
        """
        for work in works:
            if work is None:
                continue
            if self._ends_s is None:
                work.wait()
            else:
                # A timeout of zero means none.
                left_s = max(0.001, self._ends_s - time.monotonic())
                work.wait(timedelta(seconds=left_s))

    def wait_despite_errors(self, works: Iterable[Work]) -> None:
        """Wait for each message, whether or not it arrives."""
        for work in works:
            with contextlib.suppress(Exception):  # the cause is known; this peer may be gone
                self.wait([work])
