"""One ssh process that brings the frames of a job on another host, and its command line.

Here it is the user's own ``ssh``, with their configuration, agent, jump hosts and known hosts.
There it is ``boltmesh stream``, which has to be found first: a shell that ssh starts has neither
the PATH of a login nor an activated environment.

Why a connection fails, in one line: ssh, the shell and Python there say it in their own words on
stderr, between banners and warnings. Each cause that a user can remove has a line here.
"""

import contextlib
import os
import re
import shlex
import signal
import subprocess
import threading
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, BinaryIO, Final, cast

import msgspec

from boltmesh.errors import ConfigError, TelemetryError
from boltmesh.telemetry.sanitize import clean
from boltmesh.tui.sources.frames import (
    MAGIC,
    MAX_MAGIC_BYTES,
    VersionError,
    check_magic,
    read_frame,
)

if TYPE_CHECKING:
    from typing_extensions import Self

SSH_VARIABLE: Final = "BOLTMESH_SSH"
"""The command to connect with, for example ``ssh -F other_config``."""

MISSING: Final = 127
"""Exit code, as of a shell, where boltmesh was not found."""

_OPTIONS: Final = (
    "-T",  # no terminal
    "-x",  # no display of the user's, and
    "-a",  # no agent: nothing there needs either
    "-oBatchMode=yes",  # a question would be asked on the dashboard
    "-oClearAllForwardings=yes",  # what a config forwards belongs to the user's own sessions
    "-oRemoteCommand=none",
    "-oPermitLocalCommand=no",
    "-oServerAliveInterval=5",  # a connection that was cut silently ends after 15 s
    "-oServerAliveCountMax=3",
)

_FIND: Final = """\
PYTHONSAFEPATH=1; export PYTHONSAFEPATH;
p={python};
[ -x "$p" ] && "$p" -c "import boltmesh.cli" 2>/dev/null </dev/null &&
exec "$p" -m boltmesh {words};
b=$(command -v boltmesh) ||
b=$("${{SHELL:-sh}}" -lc "command -v boltmesh" 2>/dev/null </dev/null | tail -n 1);
[ -x "$b" ] && exec "$b" {words};
d={run_dir};
if [ -O "$d" ] && [ ! -L "$d" ]; then
p=$(ls -t "$d"/*/job.json 2>/dev/null | while read -r j; do
[ -O "$j" ] || continue;
p=$(sed -n 's/.*"python":"\\(\\/[^"\\\\]*\\)".*/\\1/p' "$j");
[ -x "$p" ] && "$p" -c "import boltmesh.cli" 2>/dev/null </dev/null && echo "$p" && break;
done);
[ -x "$p" ] && exec "$p" -m boltmesh {words};
fi;
echo "boltmesh is not found" >&2;
exit {missing}"""
"""Looks in the PATH, in the PATH of a login shell, and for the interpreter of the newest job.

A folder in a shared place is used only where it belongs to the user, or another user could leave
an interpreter there. What lies in the home folder, a checkout of boltmesh perhaps, is no
place to import from. It is sent on one line, as not every login shell takes more.
"""

_HOST = re.compile(r"[^\s\x00-\x1f\x7f-\x9f-][^\s\x00-\x1f\x7f-\x9f]*")


class Remote(msgspec.Struct, frozen=True):
    """A host, and how boltmesh is started there."""

    host: str
    """As ssh takes it: a name of the user's config, ``user@host`` or ``ssh://user@host:port``."""
    command: str | None = None
    """Runs boltmesh, in the words of that host's shell; None: it is looked for."""
    run_dir: str | None = None
    """Where jobs keep their telemetry there; None: its default."""
    interval_s: float = 1.0
    """Time between two looks there."""

    def __post_init__(self) -> None:
        """Refuse values that ssh would take for an option or for more than one word."""
        if not _HOST.fullmatch(self.host):
            raise ConfigError(
                f"--ssh {self.host!r} is no host. Use a name from your ssh config, user@host or "
                f"ssh://user@host:port."
            )

    def ssh_line(
        self,
        *,
        job: str | None = None,
        wants_list: bool = False,
        python: str | None = None,
    ) -> list[str]:
        """Return the command that connects.

        Args:
            job: Which job to follow.
            wants_list: Ask for the list of jobs instead.
            python: The job's interpreter there, where it is known.
        """
        words = ["stream", f"--interval={self.interval_s:g}"]
        if self.run_dir is not None:
            words.append(f"--run-dir={self.run_dir}")
        if wants_list:
            words.append("--list")
        if job is not None:
            words += ["--", job]
        return [*_ssh(), *_OPTIONS, "--", self.host, self._there(shlex.join(words), python)]

    def _there(self, words: str, python: str | None) -> str:
        if self.command is not None:
            return f"{self.command} {words}"
        default = '"${BOLTMESH_RUN_DIR:-${TMPDIR:-/tmp}/boltmesh-$(id -u)}"'
        script = _FIND.format(
            python=shlex.quote(python or ""),
            words=words,
            run_dir=default if self.run_dir is None else shlex.quote(self.run_dir),
            missing=MISSING,
        )
        return f"exec sh -c {shlex.quote(script.replace(chr(10), ' '))}"


def _ssh() -> list[str]:
    chosen = os.environ.get(SSH_VARIABLE) or "ssh"
    try:
        words = shlex.split(chosen)
    except ValueError as error:
        raise ConfigError(
            f"{SSH_VARIABLE}={chosen} is no command: {error}. Use for example "
            f"{SSH_VARIABLE}='ssh -F other_config'."
        ) from error
    return words or ["ssh"]


_SSH_FAILED: Final = 255
_CANNOT_RUN: Final = 126
_SIGNALLED: Final = 128

_KEY_CHANGED: Final = ("remote host identification has changed",)
_KEY_UNKNOWN: Final = ("host key verification failed",)
_REFUSED: Final = (
    "permission denied",
    "too many authentication failures",
    "no supported authentication methods",
    "account is disabled",
    "this account is currently not available",
)
_UNKNOWN: Final = ("could not resolve hostname", "name or service not known")
_BAD_SETTINGS: Final = ("bad configuration option", "bad owner or permissions", "no such identity")
_UNREACHABLE: Final = (
    "connection refused",
    "connection timed out",
    "operation timed out",
    "no route to host",
    "network is unreachable",
    "connection reset",
    "connection closed",
    "broken pipe",
    "timeout, server",
    "not responding",
    "kex_exchange_identification",
)


class SshError(TelemetryError):
    """Why a connection is not there, or no longer.

    Args:
        message: One line.
        is_final: Whether it would be the same another time.
    """

    def __init__(self, message: str, *, is_final: bool) -> None:
        super().__init__(clean(message))
        self.is_final = is_final


def explain(host: str, exit_code: int | None, stderr: str) -> SshError:
    """Return why an ssh that has ended gave no frame, or no more.

    Args:
        host: As the user wrote it.
        exit_code: Exit status of ssh; negative for a signal, None while it is unknown.
        stderr: The end of what it wrote.
    """
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    if exit_code == _SSH_FAILED:
        return _explain_ssh(host, lines)
    if (
        exit_code == MISSING
        or _find(lines, ("no module named boltmesh", "no module named 'boltmesh'"))
        or (exit_code == _CANNOT_RUN and lines)
    ):
        said = "" if exit_code == MISSING and len(lines) < 2 else f" It said: {lines[-1]}"
        return SshError(
            f"{host} has no boltmesh that could be found: not in the PATH of a login there, nor "
            f"with a job of yours. Install it, or name it: --remote-command "
            f"/path/to/venv/bin/boltmesh.{said}",
            is_final=True,
        )
    if old := _find(lines, ("no such command 'stream'",)):
        return SshError(
            f"boltmesh on {host} is too old to be watched from here ({old}). "
            f"Use the same boltmesh on both sides.",
            is_final=True,
        )
    if exit_code is None or exit_code == 0 or exit_code < 0 or exit_code > _SIGNALLED:
        return SshError(f"the connection to {host} was lost.", is_final=False)
    said = f": {lines[-1]}" if lines else ", and did not say why."
    return SshError(f"boltmesh on {host} failed (exit code {exit_code}){said}", is_final=True)


def _explain_ssh(host: str, lines: Sequence[str]) -> SshError:
    if _find(lines, _KEY_CHANGED):
        return SshError(
            f"the key of {host} is not the one that you know: it was reinstalled, or another "
            f"machine is in between. Find out which; only then forget it with ssh-keygen -R.",
            is_final=True,
        )
    if _find(lines, _KEY_UNKNOWN):
        return SshError(
            f"the key of {host} is not known here. Connect once with 'ssh {host}', compare the "
            f"key, and confirm it.",
            is_final=True,
        )
    if said := _find(lines, _REFUSED):
        return SshError(
            f"{host} refuses the login ({said}). 'ssh {host}' has to work without a question: "
            f"load your key into the agent, or name it in your ssh config.",
            is_final=True,
        )
    if said := _find(lines, _UNKNOWN):
        # A laptop that wakes up resolves no name until its network is back.
        return SshError(f"there is no host {host} ({said}).", is_final=False)
    if said := _find(lines, _BAD_SETTINGS):
        return SshError(f"ssh does not start: {said}", is_final=True)
    said = _find(lines, _UNREACHABLE) or (lines[-1] if lines else "ssh did not say why")
    return SshError(f"{host} cannot be reached ({said}).", is_final=False)


def _find(lines: Sequence[str], signs: Sequence[str]) -> str | None:
    """Return the last line that holds one of the signs."""
    for line in reversed(lines):
        if any(sign in line.lower() for sign in signs):
            return line
    return None


MAX_NOISE_BYTES: Final = 1 << 20
"""Most that a login may write to stdout before the frames."""
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
        """End ssh, which ends the thread that reads from it; from any thread."""
        self._signal(signal.SIGTERM)

    def close(self) -> None:
        """End ssh and let go of it; for the thread that reads."""
        self._alarm.cancel()
        with contextlib.suppress(OSError):
            self._stdin.close()  # by which the other side ends
        self.end()
        if self._wait(_END_S) is None:
            self._signal(signal.SIGKILL)
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
        """Keep the end of ssh's output."""
        with contextlib.suppress(OSError, ValueError):
            while part := os.read(self._errors.fileno(), 4096):
                self._stderr = (self._stderr + part)[-_MAX_STDERR_BYTES:]

    def _give_up(self) -> None:
        self._is_late = True
        self._signal(signal.SIGKILL)

    def _signal(self, number: signal.Signals) -> None:
        """Signal the command's session: a program around ssh leaves it behind with the pipes."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, number)

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
