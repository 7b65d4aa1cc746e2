"""Ends a step on all ranks of a pipeline together when one of them fails.

[Note: Failing together]
A rank that waits for a message cannot be woken: gloo's receives neither time out without closing
the connection nor can they be taken back, and NCCL's wait on the device. So whoever fails puts its
cause into the store that all ranks have met by, and then goes on with its list of actions without
computing: it sends zeros where values or gradients are due and takes what comes. The others find
the cause as soon as they stand still, and do the same. All messages go through, nobody waits for
one that never comes, and the groups can be used afterwards. Then all raise the first cause.

Nothing is asked for while a rank moves on; one that stands still reads one key ten times a second.

[Note: Failing within a shared stage]
Where ranks share each layer, one that fails leaves the others of its stage in the midst of a sum,
which only the end of its process ends. So it does not wait for anybody who computes: it gives those
that stand still the time to hear of it, sends its zeros, and raises. Who receives zeros knows by
then what they are, and does not go on into a sum of its own, for which nobody may come.

How long ranks of a pipeline wait for each other once one of them is known to have failed.

Whoever waits in vain for a peer has waited for as long as a collective may take. What is left to do
then, messages in flight and the agreement that all fail, would wait as long again for the same peer
where it hangs. So all of it together gets what is left of the one time, and a little for the
others, who learn of a failure when they stand still.
"""

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from typing import Final

from torch._C._distributed_c10d import Store
from torch.distributed import Work
from torch.nn import Module

from boltmesh.errors import PipelineError
from boltmesh.strategies.pipeline.schedules.actions import Action
from boltmesh.strategies.torch_compat.communication import shared_store

LEAST_S: Final = 3.0
"""What is given to the others in any case, seconds."""


class Deadline:
    """Counts from when this rank began what has failed.

    Args:
        timeout: How long ranks may wait for each other; None: torch's default.
    """

    def __init__(self, timeout: timedelta | None) -> None:
        self._timeout_s = None if timeout is None else timeout.total_seconds()
        self._ends_s: float | None = None

    def begin(self, since_s: float) -> None:
        """A failure is known, of what began at ``since_s`` of the monotonic clock."""
        if self._timeout_s is not None:
            self._ends_s = max(since_s + self._timeout_s, time.monotonic() + LEAST_S)

    def wait(self, works: Iterable[Work | None]) -> None:
        """Wait for messages on the CPU, as long as any may take while nothing has failed.

        Raises:
            RuntimeError: One of them did not come.
        """
        for work in works:
            if work is None:
                continue
            if self._ends_s is None:
                work.wait()
            else:
                # No time at all would mean as much as one likes.
                left_s = max(0.001, self._ends_s - time.monotonic())
                work.wait(timedelta(seconds=left_s))

    def wait_for_each(self, works: Iterable[Work]) -> None:
        """The same, whatever becomes of each."""
        for work in works:
            with contextlib.suppress(Exception):  # the cause is known; this peer may be gone
                self.wait([work])


GRACE_S: Final = 30.0
"""How long a rank may go on to stand still once a failure is known, before it is ended."""

_LOOK_S: Final = 0.1
SPREADS_S: Final = 3 * _LOOK_S
"""After which a rank that stands still knows of a failure: it notices that it does, then asks."""
_READ_S: Final = 10.0

_DOING: Final = {
    "F": "the forward pass",
    "B": "the backward pass",
    "I": "the backward pass to the inputs",
    "W": "the backward pass to the weights",
    "SEND_F": "handing on the values",
    "RECV_F": "receiving the values",
    "SEND_B": "handing back the gradients",
    "RECV_B": "receiving the gradients",
}


def describe_failure(
    error: BaseException,
    action: Action | None,
    *,
    rank: int,
    name_of: Callable[[Module], str | None],
    batch: str = "",
) -> str:
    """Say what failed where, in one sentence; what the executor said itself stays as it is."""
    if isinstance(error, PipelineError):
        return f"{error} (found on rank {rank})" if action is not None else str(error)
    if action is None:
        where = f"The pipeline on rank {rank} failed outside of any stage"
    else:
        where = (
            f"Stage {action.stage} on rank {rank} failed in {_DOING[action.kind]} of microbatch "
            f"{action.microbatch}{batch}"
        )
        module = failing_module(error)
        if module is not None:
            name = name_of(module)
            kind = type(module).__name__
            where += f", in '{name}' ({kind})" if name else f", in a {kind}"
    return f"{where}: {type(error).__name__}: {error}"


def failing_module(error: BaseException) -> Module | None:
    """Return the innermost module whose code an error came from."""
    found = None
    traceback = error.__traceback__
    while traceback is not None:
        module = traceback.tb_frame.f_locals.get("self")
        if isinstance(module, Module):
            found = module
        traceback = traceback.tb_next
    return found


class FailureBoard:
    """Tells the ranks of one pipeline why one of them failed.

    Args:
        rank: Global rank, for messages.
        name: Of the group, the same on all of its ranks.
        on_stuck: Told, from another thread, when this rank does not come to an end although a
            failure is known. The process ends after it returns.
    """

    def __init__(
        self,
        rank: int,
        name: str,
        *,
        on_stuck: Callable[[PipelineError], None] = lambda _: None,
    ) -> None:
        self.cause: str | None = None
        """Why a rank failed, once this one knows."""
        self.num_moves = 0
        """Counted up by the rank with each thing that it does."""
        self.grace_s = GRACE_S
        self._rank, self._name = rank, name
        self._on_stuck = on_stuck
        self._failures = 0
        self._is_running = False
        self._is_over = threading.Event()
        self._thread: threading.Thread | None = None

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Look for failures of other ranks, from a thread that does nothing outside of this.

        It is not woken: what wakes a thread of Python in each step takes turns with the step.
        """
        if self._thread is None:
            self._thread = threading.Thread(
                target=self._watch, args=(self._is_over,), name="boltmesh-pipeline", daemon=True
            )
            self._thread.start()
        self._is_running = True
        try:
            yield
        finally:
            self._is_running = False

    def ring(self, cause: str) -> None:
        """Tell all ranks why this one fails, unless another one failed before."""
        with self._store() as store:
            if store is not None:
                if store.add("rung", 1) == 1:
                    store.set("cause", cause)
                else:
                    cause = self._read(store) or cause
        self.cause = self.cause or cause

    def hear(self) -> str:
        """Return the first cause, when some rank is known to have failed."""
        with self._store() as store:
            if store is not None:
                self.cause = self._read(store) or self.cause
        return self.cause or "A rank of the pipeline failed and could not say why."

    def look(self) -> str | None:
        """Return the first cause, None where nobody has told of any. Does not wait."""
        with self._store() as store:
            if store is not None and store.check(["cause"]):
                self.cause = store.get("cause").decode()
        return self.cause

    def reset(self) -> None:
        """Begin anew, on all ranks, after all have raised a failure."""
        self.cause = None
        self._failures += 1

    def open(self) -> None:
        """Watch again after ``close``."""
        if self._is_over.is_set():
            # A new event: the thread of before may still be about to see its own.
            self._is_over = threading.Event()
            self._thread = None

    def close(self) -> None:
        """Watch no longer until ``open``. The thread has ended then, unless it waits for a rank."""
        self._is_over.set()
        if self._thread is not None:
            self._thread.join(_LOOK_S)

    def _watch(self, is_over: threading.Event) -> None:
        seen = -1
        known_since = 0.0
        while not is_over.wait(_LOOK_S):
            if not self._is_running:
                known_since = 0.0
            elif self.cause is not None:
                known_since = known_since or time.monotonic()
                if time.monotonic() - known_since >= self.grace_s:
                    self._end_process(self.cause)
            elif self.num_moves != seen:
                seen = self.num_moves
            else:
                with self._store() as store:
                    if store is not None and store.check(["cause"]):
                        self.cause = store.get("cause").decode()

    def _read(self, store: Store) -> str | None:
        store.wait(["cause"], timedelta(seconds=_READ_S))
        return store.get("cause").decode() or None

    @contextlib.contextmanager
    def _store(self) -> Iterator[Store | None]:
        """Give the store, or None where there is none; what fails in it is left undone."""
        with contextlib.suppress(RuntimeError):  # it goes with the process that serves it
            yield shared_store(f"boltmesh-pipeline-{self._name}-{self._failures}")

    def _end_process(self, cause: str) -> None:
        """End a rank that hangs where nothing reaches it, such as behind a broken device."""
        with contextlib.suppress(Exception):
            self._on_stuck(PipelineError(cause))
        sys.stderr.write(f"boltmesh: rank {self._rank} ends: {cause}\n")
        sys.stderr.flush()
        os._exit(1)
