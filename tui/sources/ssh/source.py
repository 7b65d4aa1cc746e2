"""A job on another host as a source: an ssh process, reconnected when it is lost."""

import contextlib
import os
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, BinaryIO, Final, cast

from boltmesh.errors import BoltMeshError, ConfigError, TelemetryError
from boltmesh.telemetry.reader.reader import JobSummary
from boltmesh.tui.sources.frames import (
    MAGIC,
    MAX_MAGIC_BYTES,
    FrameDecoder,
    Hello,
    RemoteError,
    VersionError,
    check_magic,
    decode_hello,
    decode_jobs,
    read_frame,
)
from boltmesh.tui.sources.live import InterruptionError, Observation
from boltmesh.tui.sources.ssh.remote import Remote, SshError, explain

if TYPE_CHECKING:
    from typing_extensions import Self


MAX_NOISE_BYTES: Final = 1 << 20
"""What a login may write to stdout before the frames."""
ANSWER_S: Final = 30.0
"""How long a host may take to its first frame."""
_MAX_STDERR_BYTES: Final = 16 << 10
_END_S: Final = 2.0
_LISTEN_S: Final = 0.5


class Connection:
    """Starts ssh; as a context manager ends it.

    Reading blocks; ``end`` may be called from another thread and ends that.

    Args:
        host: As the user wrote it, for messages.
        line: The command.

    Raises:
        ConfigError: There is no such command.
    """

    def __init__(self, host: str, line: Sequence[str], *, answer_s: float = ANSWER_S) -> None:
        self._host = host
        self._is_late = False
        self._answer_s = answer_s
        try:
            self._process = subprocess.Popen(  # noqa: S603 - no shell, and words quoted for the one there
                line,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,  # Ctrl-C is for the dashboard, which then ends this
            )
        except OSError as error:
            raise ConfigError(
                f"'{line[0]}' cannot be started ({error.strerror}). Install OpenSSH's client, or "
                f"set BOLTMESH_SSH to the command to connect with."
            ) from error
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        self._stdin = self._process.stdin
        self._stdout = cast("BinaryIO", self._process.stdout)
        self._errors = self._process.stderr
        self._stderr = b""
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()
        self._alarm = threading.Timer(answer_s, self._give_up)
        self._alarm.daemon = True
        self._alarm.start()

    def __enter__(self) -> "Self":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def payloads(self) -> Iterator[bytes]:
        """Yield the payloads of the frames, as they come.

        Raises:
            SshError: There are none, or no more.
        """
        try:
            self._skip_noise()
            while (payload := read_frame(self._stdout)) is not None:
                self._alarm.cancel()
                yield payload
        except VersionError as error:
            raise SshError(f"{self._host}: {error}", is_final=True) from error
        except SshError:
            raise
        except (TelemetryError, OSError, ValueError) as error:
            # A frame that is torn has its cause in how ssh ended, if it did.
            if self._wait(_LISTEN_S) is None:
                raise SshError(f"{self._host}: {error}", is_final=False) from error
        raise self._failure()

    def end(self) -> None:
        """End ssh, and by that whoever reads from it; from any thread."""
        self._process.terminate()

    def close(self) -> None:
        """End ssh and let go of it; for the thread that reads."""
        self._alarm.cancel()
        with contextlib.suppress(OSError):
            self._stdin.close()  # by which the other side ends
        self.end()
        if self._wait(_END_S) is None:
            self._process.kill()
            self._process.wait()
        self._stdout.close()
        # See _failure: the pipe belongs to the listener as long as that may read.
        self._listener.join(_LISTEN_S)
        if not self._listener.is_alive():
            self._errors.close()

    def _skip_noise(self) -> None:
        """Read on to the magic line, past what a login writes."""
        left = MAX_NOISE_BYTES
        begins_line = True
        while left > 0:
            line = self._stdout.readline(max(MAX_MAGIC_BYTES, 4096))
            if not line:
                raise self._failure()
            if begins_line and line.startswith(MAGIC):
                check_magic(line)
                return
            begins_line = line.endswith(b"\n")
            left -= len(line)
        raise SshError(
            f"{self._host} writes more than {MAX_NOISE_BYTES >> 20} MiB of other things before "
            f"boltmesh has its turn. What a login prints belongs into interactive shells only.",
            is_final=True,
        )

    def _listen(self) -> None:
        """Keep the end of what ssh says."""
        with contextlib.suppress(OSError, ValueError):
            while part := os.read(self._errors.fileno(), 4096):
                self._stderr = (self._stderr + part)[-_MAX_STDERR_BYTES:]

    def _give_up(self) -> None:
        self._is_late = True
        self._process.kill()

    def _wait(self, seconds: float) -> int | None:
        try:
            return self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None

    def _failure(self) -> SshError:
        if self._is_late:
            return SshError(
                f"{self._host} did not answer within {self._answer_s:.0f} s.", is_final=False
            )
        exit_code = self._wait(_END_S)
        # A master connection that stays behind keeps stderr open: its end is not waited for.
        self._listener.join(_LISTEN_S)
        return explain(self._host, exit_code, self._stderr.decode("utf-8", "replace"))


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
