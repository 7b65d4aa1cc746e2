"""Says in one line why there is no job to see from another host.

ssh says it in its own words on stderr, between banners and warnings; so do the shell and Python
there. Each cause that a user can mend has its line here, with what to do.
"""

from collections.abc import Sequence
from typing import Final

from boltmesh.errors import TelemetryError
from boltmesh.telemetry.sanitize import clean
from boltmesh.tui.sources.ssh.remote import MISSING

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
        exit_code: Of ssh; negative for a signal, None while it is unknown.
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
            f"the key of {host} is not the one that you know: it was installed anew, or somebody "
            f"is in between. Find out which; only then forget the old key with ssh-keygen -R.",
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
        return SshError(f"there is no host {host} ({said}).", is_final=True)
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
