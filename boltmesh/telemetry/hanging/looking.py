"""Looks at this rank itself, and at ranks of this host that do not answer."""

import contextlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

import psutil

from boltmesh.errors import TelemetryError
from boltmesh.telemetry import layout
from boltmesh.telemetry.hanging.places import place_of
from boltmesh.telemetry.hanging.standing import POINT_TO_POINT, GroupStanding, Standing
from boltmesh.telemetry.job import rank_file
from boltmesh.telemetry.reading.rank_reader import RankReader
from boltmesh.telemetry.reading.rank_view import RankView
from boltmesh.telemetry.recording.members import pack_ranks
from boltmesh.telemetry.recording.phases import PhaseClock
from boltmesh.telemetry.recording.writer import RankFile
from boltmesh.telemetry.snapshot import PHASES, RankSnapshot

_STATES: Final = {
    psutil.STATUS_STOPPED: "is stopped by a signal (SIGSTOP, or Ctrl-Z) and cannot answer",
    psutil.STATUS_TRACING_STOP: "is stopped by a debugger and cannot answer",
    psutil.STATUS_DISK_SLEEP: "waits for a disk or a driver in the kernel and cannot answer",
    psutil.STATUS_ZOMBIE: "has died",
}


def idle_s(file: RankFile) -> float:
    """Return since when this rank has neither entered nor left a collective; from any thread."""
    times = [max(ticket[11], done_ns) for ticket, done_ns, _ in file.newest()]
    newest = max(times, default=file.header.monotonic_ns)
    return (time.monotonic_ns() - newest) / 1e9


def look_at_self(
    file: RankFile,
    clock: PhaseClock,
    *,
    rank: int,
    settle: Callable[[], None],
    progress: Callable[[], tuple[int, bool]],
) -> Standing:
    """Return where this rank stands. From any thread; a few hundred microseconds.

    Args:
        file: What it has recorded.
        clock: Its phase, and the thread that trains.
        rank: Its number.
        settle: Notes the collectives that are done.
        progress: Gives the newest optimizer step, and whether it has made one in this run.
    """
    settle()
    now = time.monotonic_ns()
    groups = []
    for ticket, done_ns, is_paired in file.newest():
        number, operator, flags, peer, sequence, since_ns = *ticket[2:4], *ticket[5:8], ticket[11]
        name, axis, members = file.group_of(number)
        is_timed = bool(flags & layout.TRAFFIC_IS_TIMED)
        groups.append(
            GroupStanding(
                name=name,
                axis=axis,
                members=members,
                sequence=sequence,
                operator=file.operator_of(operator),
                is_done=done_ns > 0 if is_timed else None,
                for_s=(now - (done_ns or since_ns)) / 1e9,
                peer=peer - 1 if 0 < peer < layout.UNKNOWN_PEER else None,
                is_paired=is_paired,
            )
        )
    place = place_of(clock.thread)
    global_step, has_stepped = progress()
    return Standing(
        rank=rank,
        phase=PHASES[clock.phase],
        global_step=global_step,
        place=place.text if place is not None else "",
        stack=place.stack if place is not None else (),
        is_in_library=place is None or place.is_in_library,
        groups=tuple(groups),
        has_stepped=has_stepped,
    )


def look_at(rank: int, folder: Path) -> Standing | None:
    """Return what the file of a rank of this host says; None for one that has none here."""
    path = rank_file(folder, rank)
    if not path.exists():
        return None
    reader = RankReader(path, keep_steps=32, keep_spans=1)
    try:
        return _standing(RankView(rank, reader).look())
    except (TelemetryError, OSError):
        return None
    finally:
        reader.close()


def _standing(seen: RankSnapshot) -> Standing:
    now = time.time()
    paired = {total.group for total in seen.collectives if total.operator in POINT_TO_POINT}
    return Standing(
        rank=seen.rank,
        phase=seen.phase,
        global_step=seen.global_step,
        silence=_silence(seen),
        groups=tuple(
            GroupStanding(
                name=each.group,
                axis=each.axis,
                members=pack_ranks(each.ranks),
                sequence=each.sequence,
                operator=each.operator,
                is_done=each.is_done,
                for_s=max(0.0, now - each.time) if each.time is not None else 0.0,
                is_paired=each.group in paired,
            )
            for each in seen.groups
            if each.sequence
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
        f"(pid {seen.pid}) does not answer: it goes on elsewhere, or native code holds its "
        f"interpreter (`py-spy dump --native --pid {seen.pid}`)"
    )
