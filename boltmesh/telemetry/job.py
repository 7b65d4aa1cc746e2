"""The folder of one job: who runs it, whether its ranks live, and how they ended.

::

    RUN_DIR/            0700   BOLTMESH_RUN_DIR, else boltmesh-UID in the temporary directory
        JOB_ID/         0700
            job.json    0600   JobInfo, written once
            rank-0.bin  0600   one file a rank, see layout.py
            rank-0.log  0600   the newest lines that a rank has printed, see writer/output.py
            plan.json   0600   PipelinePlan, where the job has a pipeline, see plan_files.py
            tensor.json 0600   TensorPlanTable, where the job divides its layers
            end.json    0600   how the first rank died, where a supervisor saw it
            nodes.msgpack 0600 what was heard of the ranks of other hosts, see nodes.py

The folder is on a local disk on purpose: a mapped file on a network disk is neither coherent
nor lockable, and the home directory often is one.
"""

import contextlib
import getpass
import os
import platform
import re
import secrets
import socket
import stat
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from boltmesh.errors import TelemetryError
from boltmesh.process import ProcessId, encodable
from boltmesh.telemetry.redaction import redact_command, redact_mapping
from boltmesh.telemetry.snapshot import AlertThresholds

if TYPE_CHECKING:
    from typing_extensions import Self


SWITCH_VARIABLE: Final = "BOLTMESH_TELEMETRY"


def is_switched_off() -> bool:
    """Tell whether the environment says that nothing is to be recorded."""
    return os.environ.get(SWITCH_VARIABLE, "").strip().lower() in {"0", "false", "off", "no"}


JOB_FILE = "job.json"
END_FILE = "end.json"
ID_VARIABLE = "BOLTMESH_JOB_ID"
NAME_VARIABLE = "BOLTMESH_JOB_NAME"
RUN_DIR_VARIABLE = "BOLTMESH_RUN_DIR"
RESTARTED_BY_VARIABLE = "BOLTMESH_RESTARTED_BY"
"""Pid of the process that starts the ranks again after a failure."""

_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
MAX_JSON_BYTES = 1 << 20
UNREADABLE = (TelemetryError, msgspec.MsgspecError, RecursionError, UnicodeDecodeError)
"""Errors of reading a JSON file that is not as it was written."""

_KEPT_ENVIRONMENT = re.compile(
    r"(CUDA_VISIBLE_DEVICES|OMP_NUM_THREADS|(SLURM|PBS|LSB)_JOB_?ID|TORCHELASTIC_RUN_ID"
    r"|(NCCL|GLOO|TORCH_NCCL|BOLTMESH)_\w+)"
)


class JobInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Facts of a job that hold from its start to its end."""

    id: str
    name: str
    user: str
    host: str
    command: tuple[str, ...]
    """Secrets removed."""
    python: str
    """The interpreter, with which a reader on this host can import boltmesh."""
    folder: str
    """Working directory."""
    started: float
    """Wall clock, seconds since 1970."""
    strategy: str
    """Class name."""
    mesh: dict[str, int]
    """Axis name to size, outermost first."""
    world_size: int
    versions: dict[str, str]
    hyperparameters: dict[str, str]
    environment: dict[str, str]
    """The few variables that explain a run, secrets removed."""
    max_steps: int | None = None
    recipe: str | None = None
    """The config that ``boltmesh fit`` was given; None for a script."""
    alerts: AlertThresholds | None = None
    """From the config's section of that name; None: a reader's defaults."""
    restarted_by: ProcessId | None = None
    """The process that starts the ranks again after a failure, and ends when it no longer does."""

    @classmethod
    def create(
        cls,
        *,
        strategy: str,
        mesh: Mapping[str, int],
        world_size: int,
        name: str | None = None,
        id: str | None = None,  # noqa: A002 - the field's name
        hyperparameters: Mapping[str, object] | None = None,
        max_steps: int | None = None,
        recipe: str | None = None,
        alerts: AlertThresholds | None = None,
    ) -> "Self":
        """Describe this process's job.

        Every rank of a job has to end up with the same ``id``: give it, or set BOLTMESH_JOB_ID
        for all of them. Without either a new one is drawn.
        """
        command = [Path(sys.argv[0]).name, *sys.argv[1:]] if sys.argv else []
        pid = os.environ.get(RESTARTED_BY_VARIABLE, "")
        return cls(
            id=check_job_id(id or os.environ.get(ID_VARIABLE) or new_job_id()),
            name=name or os.environ.get(NAME_VARIABLE) or _program(command),
            user=_user(),
            host=socket.gethostname(),
            command=tuple(map(encodable, redact_command(command))),
            python=sys.executable,
            folder=_working_directory(),
            started=time.time(),
            strategy=strategy,
            mesh=dict(mesh),
            world_size=world_size,
            versions=_versions(),
            hyperparameters=redact_mapping(hyperparameters or {}),
            environment=redact_mapping(
                {
                    key: value
                    for key, value in os.environ.items()
                    if _KEPT_ENVIRONMENT.fullmatch(key)
                }
            ),
            max_steps=max_steps if max_steps is None or max_steps >= 0 else None,
            recipe=recipe,
            alerts=alerts,
            restarted_by=ProcessId.of(int(pid)) if pid.isdecimal() else None,
        )


class RankEnd(msgspec.Struct, frozen=True, kw_only=True):
    """How a rank ended, as its supervisor saw it."""

    rank: int
    signal: int | None = None
    exit_code: int | None = None
    time: float


def new_job_id() -> str:
    """Return an unused name: eight hexadecimal digits, so that two or three identify it."""
    return secrets.token_hex(4)


def is_job_id(text: str) -> bool:
    """Tell whether a text can be a job's id, and so the name of a folder or a file."""
    return _ID.fullmatch(text) is not None


def check_job_id(job_id: str) -> str:
    """Return ``job_id`` when it can be a folder's name."""
    if not is_job_id(job_id):
        raise TelemetryError(
            f"{ID_VARIABLE}={job_id!r} cannot name a folder. Use up to 64 letters, digits, '.', "
            f"'_' and '-', for example {ID_VARIABLE}={new_job_id()}."
        )
    return job_id


def run_dir() -> Path:
    """Return where the jobs of this user on this host are, whether or not it exists."""
    chosen = os.environ.get(RUN_DIR_VARIABLE)
    if chosen:
        return Path(chosen).resolve()
    return Path(tempfile.gettempdir(), f"boltmesh-{os.getuid()}")


def job_path(job_id: str) -> Path:
    """Return the folder of a job."""
    return run_dir() / check_job_id(job_id)


def rank_file(path: Path, rank: int) -> Path:
    """Return where a rank's telemetry is, within its job's folder."""
    return path / f"rank-{rank}.bin"


def make_private_folder(path: Path) -> None:
    """Create a folder that only this user can enter, or check that an existing one is such."""
    with contextlib.suppress(FileExistsError):
        path.mkdir(mode=0o700, parents=True)
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode):
        raise TelemetryError(f"{path} is not a folder. Remove it, or set {RUN_DIR_VARIABLE}.")
    if found.st_uid != os.geteuid():
        raise TelemetryError(
            f"{path} belongs to user {found.st_uid}, and this is user {os.geteuid()}. "
            f"Set {RUN_DIR_VARIABLE} to a folder of your own."
        )
    if found.st_mode & 0o022:
        raise TelemetryError(f"{path} can be written by others. Run: chmod 700 {path}")


def write_job(info: JobInfo, path: Path) -> None:
    """Write ``job.json`` into the job's folder, whole or not at all."""
    write_whole(path / JOB_FILE, msgspec.json.encode(info))


def read_job(path: Path) -> JobInfo:
    """Read ``job.json`` of a job's folder."""
    where = path / JOB_FILE
    try:
        return msgspec.json.decode(read_private(where), type=JobInfo)
    except OSError as error:
        raise TelemetryError(f"{where} cannot be read: {error.strerror}.") from error
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise TelemetryError(f"{where} cannot be read: it is damaged: {error}.") from error


def record_end(path: Path, *, rank: int, exit_code: int | None) -> None:
    """Record how a rank died. Called by the process that started the ranks.

    Call it for the rank that went first, not for those that the caller then ends itself: the
    first note of a run stays. ``exit_code`` may be negative as ``subprocess`` has it; it then
    means a signal. Never raises, for it runs while a job is being torn down.
    """
    signal = None
    if exit_code is not None and exit_code < 0:
        signal, exit_code = -exit_code, None
    end = RankEnd(rank=rank, signal=signal, exit_code=exit_code, time=time.time())
    with contextlib.suppress(OSError, TelemetryError):
        earlier = read_end(path)
        if earlier is None or earlier.time < read_job(path).started:
            write_whole(path / END_FILE, msgspec.json.encode(end))


def read_end(path: Path) -> RankEnd | None:
    """Return the supervisor's record, if there is one."""
    try:
        return msgspec.json.decode(read_private(path / END_FILE), type=RankEnd)
    except (OSError, *UNREADABLE):
        return None


def pid_namespace() -> int:
    """Return the number of this process's pid namespace; 0 if there is none."""
    try:
        return Path("/proc/self/ns/pid").stat().st_ino
    except OSError:
        return 0


def write_whole(path: Path, content: bytes) -> None:
    """Replace a private file atomically."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(temporary, flags, 0o600)
    try:
        with open(descriptor, "wb") as file:
            file.write(content)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def open_private(path: Path) -> int:
    """Open a file of this user for reading; refuse links, devices and files of others."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        _check_private(path, os.fstat(descriptor))
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _check_private(path: Path, found: os.stat_result) -> None:
    if not stat.S_ISREG(found.st_mode):
        raise TelemetryError(f"{path} is not a plain file.")
    if found.st_uid != os.geteuid():
        raise TelemetryError(
            f"{path} belongs to user {found.st_uid}, and this is user {os.geteuid()}. "
            f"Read it as its owner."
        )
    if found.st_mode & 0o077:
        raise TelemetryError(f"{path} can be read or written by others. Run: chmod 600 {path}")


def read_private(path: Path) -> bytes:
    """Return the content of a small file of this user."""
    with open(open_private(path), "rb") as file:
        return file.read(MAX_JSON_BYTES)


Stamp = tuple[int, int, int]


def stamp_of(path: Path) -> Stamp | None:
    """Return a stamp that changes with a file's content, for files that are only ever replaced."""
    try:
        found = os.lstat(path)
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size


def _program(command: Sequence[str]) -> str:
    return Path(command[0]).stem if command and command[0] else "python"


def _user() -> str:
    try:
        return getpass.getuser()
    except (OSError, KeyError):  # a container's user may have no name
        return str(os.getuid())


def _working_directory() -> str:
    try:
        return encodable(str(Path.cwd()))
    except OSError:  # it was removed
        return ""


def _versions() -> dict[str, str]:
    versions = {"python": platform.python_version()}
    for package in ("boltmesh", "torch", "lightning"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[package] = metadata.version(package)
    return versions
