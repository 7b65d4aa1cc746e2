"""A job on another host as a source, however often the connection to it is lost."""

import threading
import time
from collections.abc import Callable
from typing import Final

from boltmesh.errors import BoltMeshError, TelemetryError
from boltmesh.telemetry.reader.reader import JobSummary
from boltmesh.tui.sources.frames import FrameDecoder, Hello, RemoteError, decode_hello, decode_jobs
from boltmesh.tui.sources.live import InterruptionError, Observation
from boltmesh.tui.sources.ssh.connection import ANSWER_S, Connection
from boltmesh.tui.sources.ssh.failure import SshError
from boltmesh.tui.sources.ssh.remote import Remote

FIRST_PAUSE_S: Final = 1.0
LONGEST_PAUSE_S: Final = 30.0
"""Between two attempts to connect; each is twice the one before."""
SILENCE_S: Final = 10.0
"""Without a frame for so long a connection is as good as lost, though nobody has said so."""


class SshSource:
    """Follows one job of another host.

    A thread reads whatever comes and keeps the newest observation only, so that a screen that is
    slow or held never makes the job's host wait.

    Args:
        remote: The host.
        job: As ``boltmesh top`` takes it; once connected, it stays with the one that was found.
        first_pause_s: Before the first attempt to connect again.
        answer_s: How long the host may take to its first frame.
        clock: Seconds that only go forward.
    """

    def __init__(
        self,
        remote: Remote,
        job: str | None = None,
        *,
        first_pause_s: float = FIRST_PAUSE_S,
        answer_s: float = ANSWER_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.remote = remote
        self.hello: Hello | None = None
        """What the other side says of itself; None before it did."""
        self._job = job
        self._first_pause_s = first_pause_s
        self._answer_s = answer_s
        self._clock = clock
        self._changed = threading.Condition()
        self._newest: Observation | None = None
        self._received = clock()
        self._trouble: BoltMeshError | None = None
        self._is_final = False
        self._is_closed = False
        self._connection: Connection | None = None
        self._thread = threading.Thread(target=self._run, name="boltmesh-ssh", daemon=True)
        self._thread.start()

    def read(self) -> Observation:
        """Return the newest observation; waits for the first one.

        Raises:
            InterruptionError: The connection is lost, and tried again.
            BoltMeshError: There is none, and trying again would not help.
        """
        with self._changed:
            self._changed.wait_for(
                lambda: self._newest is not None or self._is_final or self._is_closed
            )
            if self._is_closed:
                raise TelemetryError(f"the connection to {self.remote.host} is closed.")
            if self._trouble is not None and self._is_final:
                raise self._trouble
            silence_s = self._clock() - self._received
            if self._trouble is not None:
                raise InterruptionError(
                    f"disconnected {silence_s:.0f} s, trying again: {self._trouble}"
                )
            if silence_s > SILENCE_S + self.remote.interval_s:
                raise InterruptionError(f"no word from {self.remote.host} for {silence_s:.0f} s.")
            assert self._newest is not None
            return self._newest

    def close(self) -> None:
        """End the connection; the job does not notice."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
            if self._connection is not None:
                self._connection.end()
        self._thread.join()

    def _run(self) -> None:
        pause_s = self._first_pause_s
        while not self._is_closed:
            received = self._received
            trouble = self._follow()
            if self._received > received:  # it worked, so the next one is likely to
                pause_s = self._first_pause_s
            with self._changed:
                self._trouble = trouble
                is_final = not isinstance(trouble, SshError) or trouble.is_final
                # What was seen once can come back, but for what asks the user to do something.
                self._is_final = self._newest is None or is_final
                self._changed.notify_all()
                if self._is_final:
                    return
                self._changed.wait_for(lambda: self._is_closed, timeout=pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    def _follow(self) -> BoltMeshError:
        """Connect and receive until it ends; return why it did."""
        host = self.remote.host
        python = self.hello.python if self.hello is not None else None
        line = self.remote.ssh_line(job=self._job, python=python)
        try:
            with Connection(host, line, answer_s=self._answer_s) as connection:
                with self._changed:
                    if self._is_closed:
                        return SshError("closed", is_final=True)
                    self._connection = connection
                try:
                    self._receive(connection)
                finally:
                    with self._changed:
                        self._connection = None
        except RemoteError as error:
            return SshError(f"{host}: {error}", is_final=False)
        except BoltMeshError as error:
            return error
        raise AssertionError("a connection ends with a reason")

    def _receive(self, connection: Connection) -> None:
        decoder = FrameDecoder()
        payloads = connection.payloads()
        self.hello = decode_hello(next(payloads))
        self._job = self.hello.job
        for payload in payloads:
            seen = decoder.decode(payload)
            with self._changed:
                self._newest = seen
                self._received = self._clock()
                self._trouble = None
                self._changed.notify_all()


def list_remote_jobs(remote: Remote, *, answer_s: float = ANSWER_S) -> list[JobSummary]:
    """Return the user's jobs on another host, newest first.

    Raises:
        BoltMeshError: They cannot be had; why.
    """
    line = remote.ssh_line(wants_list=True)
    with Connection(remote.host, line, answer_s=answer_s) as connection:
        try:
            return decode_jobs(next(connection.payloads()))
        except RemoteError as error:
            raise TelemetryError(f"{remote.host}: {error}") from error
