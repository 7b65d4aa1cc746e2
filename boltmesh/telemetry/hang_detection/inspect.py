"""Reads the progress of this rank, and of ranks on this host from their telemetry files.

The source line of a rank is that of its training thread, in the form of a traceback.
"""

import contextlib
import os
import site
import sys
import sysconfig
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from traceback import FrameSummary
from types import FrameType
from typing import Final, NamedTuple

import psutil

from boltmesh.errors import TelemetryError
from boltmesh.telemetry import layout, writer
from boltmesh.telemetry.hang_detection.diagnose import POINT_TO_POINT, GroupPosition, RankProgress
from boltmesh.telemetry.job import rank_file
from boltmesh.telemetry.rank_ranges import pack_ranks
from boltmesh.telemetry.reader.rank_reader import RankReader
from boltmesh.telemetry.reader.rank_view import RankView
from boltmesh.telemetry.snapshot import PHASES, RankSnapshot
from boltmesh.telemetry.writer.phases import PhaseClock
from boltmesh.telemetry.writer.rank_file import RankFile
from boltmesh.torch_compat import completed_on_gpus

MAX_FRAMES: Final = 8
MAX_LINE: Final = 100

_OWN: Final = "boltmesh"
_EXAMPLES: Final = "boltmesh.examples"
_COUNTING: Final = os.path.dirname(writer.__file__)
"""Frames of the hook that counts collectives."""


class CodeLocation(NamedTuple):
    """Source line of a thread."""

    text: str
    """``train.py:31 in training_step: time.sleep(600)``, and the line of the library within."""
    stack: tuple[str, ...]
    is_in_library: bool


def location_of(thread: int) -> CodeLocation | None:
    """Return the source line of a thread of this process; None if there is no such thread."""
    frame = sys._current_frames().get(thread)  # noqa: SLF001 - documented, and the only way
    if frame is None:
        return None
    innermost_first = list(traceback.walk_stack(frame))
    are_users = [_is_users(frame) for frame, _ in innermost_first]
    summary = traceback.StackSummary.extract(iter(innermost_first), lookup_lines=True)
    return describe(summary, are_users)


def describe(frames: Sequence[FrameSummary], are_users: Sequence[bool]) -> CodeLocation:
    """Return the source line of a stack, from its frames and which of them are user code.

    Args:
        frames: The innermost first.
        are_users: For each frame, whether it is user code.
    """
    users = [frame for frame, is_users in zip(frames, are_users, strict=True) if is_users]
    # Frames of the hook that counts collectives say nothing.
    innermost = next(
        (frame for frame in frames if not frame.filename.startswith(_COUNTING)), frames[0]
    )
    is_in_library = not are_users[0]
    if not users:
        return CodeLocation(_format(innermost), (_format(innermost),), is_in_library)
    text = _format(users[0])
    if is_in_library:
        text += f" (inside {_file(innermost.filename)}:{innermost.lineno} in {innermost.name})"
    stack = tuple(_format(frame) for frame in reversed(users[:MAX_FRAMES]))
    return CodeLocation(text, stack, is_in_library)


def _format(frame: FrameSummary) -> str:
    line = (frame.line or "").strip()
    line = line if len(line) <= MAX_LINE else f"{line[:MAX_LINE]}..."
    place = f"{_file(frame.filename)}:{frame.lineno} in {frame.name}"
    return f"{place}: {line}" if line else place


def _file(name: str) -> str:
    """Return the shortest path that identifies a file: for a library from its package on."""
    for folder in _LIBRARIES:
        if name.startswith(folder):
            return name[len(folder) :]
    return os.path.relpath(name) if name.startswith(os.getcwd() + os.sep) else name


def _is_users(frame: FrameType) -> bool:
    module = str(frame.f_globals.get("__name__", ""))
    if module.partition(".")[0] == _OWN and not module.startswith(_EXAMPLES):
        return False
    name = frame.f_code.co_filename
    return not name.startswith(("<", *_LIBRARIES))


def _library_folders() -> tuple[str, ...]:
    """Return the folders of the standard library and of packages, the longest path first."""
    paths = sysconfig.get_paths()
    folders = {paths[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    folders |= {*site.getsitepackages(), site.getusersitepackages()}
    folders |= {os.path.realpath(folder) for folder in folders}
    return tuple(sorted((folder + os.sep for folder in folders), key=len, reverse=True))


_LIBRARIES: Final = _library_folders()


_STATES: Final = {
    psutil.STATUS_STOPPED: "is stopped by a signal (SIGSTOP, or Ctrl-Z) and cannot answer",
    psutil.STATUS_TRACING_STOP: "is stopped by a debugger and cannot answer",
    psutil.STATUS_DISK_SLEEP: "waits for a disk or a driver in the kernel and cannot answer",
    psutil.STATUS_ZOMBIE: "has died",
}


def idle_s(file: RankFile) -> float:
    """Return the seconds since this rank entered or left a collective. From any thread."""
    times = [max(ticket[11], done_ns) for ticket, done_ns, _ in file.newest()]
    newest = max(times, default=file.header.monotonic_ns)
    return (time.monotonic_ns() - newest) / 1e9


def own_progress(
    file: RankFile,
    clock: PhaseClock,
    *,
    rank: int,
    settle: Callable[[], None],
    progress: Callable[[], tuple[int, bool]],
) -> RankProgress:
    """Return the progress of this rank. From any thread; a few hundred microseconds.

    Args:
        file: Its telemetry.
        clock: Its phase, and the thread that trains.
        rank: Global rank.
        settle: Records which collectives are done.
        progress: Returns the newest optimizer step, and whether it was made in this run.
    """
    settle()
    now = time.monotonic_ns()
    groups, on_gpus = [], completed_on_gpus()
    for ticket, done_ns, is_paired in file.newest():
        number, operator, flags, peer, sequence, since_ns = *ticket[2:4], *ticket[5:8], ticket[11]
        name, axis, members = file.group_of(number)
        is_timed = bool(flags & layout.TRAFFIC_IS_TIMED)
        groups.append(
            GroupPosition(
                name=name,
                axis=axis,
                members=members,
                sequence=sequence,
                operator=file.operator_of(operator),
                is_done=done_ns > 0 if is_timed else on_gpus.get(name),
                for_s=(now - (done_ns or since_ns)) / 1e9,
                peer=peer - 1 if 0 < peer < layout.UNKNOWN_PEER else None,
                is_paired=is_paired,
            )
        )
    location = location_of(clock.thread)
    global_step, has_stepped = progress()
    return RankProgress(
        rank=rank,
        phase=PHASES[clock.phase],
        global_step=global_step,
        place=location.text if location is not None else "",
        stack=location.stack if location is not None else (),
        is_in_library=location is None or location.is_in_library,
        groups=tuple(groups),
        has_stepped=has_stepped,
    )


def progress_from_file(rank: int, folder: Path) -> RankProgress | None:
    """Return the progress of a rank from its telemetry file; None if this host has no such file."""
    path = rank_file(folder, rank)
    if not path.exists():
        return None
    reader = RankReader(path, keep_steps=32, keep_spans=1)
    try:
        return _progress_of(RankView(rank, reader).look())
    except (TelemetryError, OSError):
        return None
    finally:
        reader.close()


def _progress_of(seen: RankSnapshot) -> RankProgress:
    now = time.time()
    paired = {total.group for total in seen.collectives if total.operator in POINT_TO_POINT}
    return RankProgress(
        rank=seen.rank,
        phase=seen.phase,
        global_step=seen.global_step,
        silence=_silence(seen),
        groups=tuple(
            GroupPosition(
                name=group.group,
                axis=group.axis,
                members=pack_ranks(group.ranks),
                sequence=group.sequence,
                operator=group.operator,
                is_done=group.is_done,
                for_s=max(0.0, now - group.time) if group.time is not None else 0.0,
                is_paired=group.group in paired,
            )
            for group in seen.groups
            if group.sequence
        ),
        has_stepped=bool(seen.steps),
    )


def _silence(seen: RankSnapshot) -> str:
    if seen.state == "failed":
        return f"has failed ({seen.error})" if seen.error else "has failed"
    if seen.state == "finished":
        return "has ended its run"
    if seen.state == "dead" or seen.pid is None:
        return "has died"
    with contextlib.suppress(psutil.Error):
        found = _STATES.get(psutil.Process(seen.pid).status())
        if found is not None:
            return f"(pid {seen.pid}) {found}"
    return (
        f"(pid {seen.pid}) does not answer: it runs other code, or native code holds its "
        f"interpreter (`py-spy dump --native --pid {seen.pid}`)"
    )
