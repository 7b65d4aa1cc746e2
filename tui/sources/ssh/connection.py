"""One ssh process, and the frames that come out of it."""

import contextlib
import os
import subprocess
import threading
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, BinaryIO, Final, cast

from boltmesh.errors import ConfigError, TelemetryError
from boltmesh.tui.sources.frames import (
    MAGIC,
    MAX_MAGIC_BYTES,
    VersionError,
    check_magic,
    read_frame,
)
from boltmesh.tui.sources.ssh.failure import SshError, explain

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
