"""Says which rank took a job down, and where it was.

A rank that loses a peer fails too, with an error of the network, which is a consequence.
The first cause is the earliest of the errors that are no consequence and of the deaths that a
supervisor saw; without either it is a rank that is gone and recorded nothing.
"""

import signal
from collections.abc import Sequence
from typing import Final, NamedTuple

from boltmesh.telemetry.job import RankEnd
from boltmesh.telemetry.snapshot import (
    CollectiveInFlight,
    Event,
    JobState,
    RankSnapshot,
    operator_name,
)

LOST_PEER: Final = (
    "connection closed by peer",
    "connection reset by peer",
    "connection was likely closed",
    "connection refused",
    "broken pipe",
    "socket closed",
    "recvvalue failed",
    "sendbytes failed",
    "failed to recv, got 0 bytes",
    "remote process exited",
    "remote process exiting prematurely",
    "communicator was aborted",
    "application timeout caused pair closure",
)
"""Texts of gloo, NCCL and the store about a peer that is gone, in lower case."""

CONSEQUENCES: Final = (
    *LOST_PEER,
    "timed out",
    "timeout",
    "distbackenderror",
    "distnetworkerror",
    "diststoreerror",
    "sigtermexception",
)
"""Parts of errors that a rank has because another one is gone, in lower case.

``SIGTERMException`` is Lightning's, of a rank that is to stop.
"""


STOPPED: Final = "stopped by "
"""First words of the event of a rank that ended before its last step."""

STOP_SIGNAL: Final = "SIGTERMException"
"""Lightning raises it in a rank that SIGTERM ends."""


class Failure(NamedTuple):
    """When a rank failed, in its own words."""

    rank: RankSnapshot
    time: float
    error: str


def is_consequence(error: str) -> bool:
    """Tell whether an error speaks of another rank's end."""
    text = error.lower()
    return any(sign in text for sign in CONSEQUENCES)


def stop_reason(events: Sequence[Event], failures: Sequence[Failure]) -> str | None:
    """Return the reason if a job ended early and well, else None."""
    reasons = [
        event.message
        for event in events
        if event.kind == "end" and event.message.startswith(STOPPED)
    ]
    if reasons:
        return reasons[-1]
    if failures:
        return f"{STOPPED}SIGTERM after step {max(each.rank.global_step for each in failures)}"
    return None


def describe_death(end: RankEnd) -> str:
    """Return how a process ended, in words."""
    if end.signal is not None:
        try:
            how = f"was killed by {signal.Signals(end.signal).name}"
        except ValueError:
            how = f"was killed by signal {end.signal}"
        if end.signal == signal.SIGKILL:
            how += " (by hand, or by the kernel for lack of memory)"
    elif end.exit_code is not None:
        how = f"left with exit code {end.exit_code}"
    else:
        how = "is gone"
    return how


def job_state(
    ranks: Sequence[RankSnapshot], failures: Sequence[Failure], end: RankEnd | None
) -> tuple[JobState, str | None]:
    """Return the job's state and, when it failed or crashed, the cause in one sentence."""
    seen = [rank for rank in ranks if rank.state != "missing"]
    is_sigterm = all(each.error.startswith(STOP_SIGNAL) for each in failures)
    if end is None and failures and len(failures) == len(seen) and is_sigterm:
        return "finished", None  # early, but no rank has failed
    dead = [rank for rank in seen if rank.state == "dead"]
    if not dead and not failures:
        is_over = bool(seen) and all(rank.state == "finished" for rank in seen)
        if end is not None and not any(rank.is_alive for rank in seen):
            return "crashed", f"rank {end.rank} {describe_death(end)}."
        return ("finished" if is_over else "running"), None
    errors = sorted(
        (each for each in failures if not is_consequence(each.error)), key=lambda each: each.time
    )
    died = next((rank for rank in dead if end is not None and rank.rank == end.rank), None)
    if died is not None and end is not None and not (errors and errors[0].time <= end.time):
        return "crashed", _death_text(died, describe_death(end))
    if errors:
        return "failed", _error_text(errors[0])
    if dead and len(dead) == len(seen) and len(dead) > 1:
        last = max(dead, key=lambda rank: rank.last_seen)
        return "crashed", (
            f"all {len(dead)} ranks that this host sees are gone and recorded no end, the last "
            f"in {_place(last)}."
        )
    if dead:
        first = min(dead, key=lambda rank: rank.last_seen)
        return "crashed", _death_text(first, "is gone without recording an end")
    return "failed", _error_text(min(failures, key=lambda each: each.time))


def _death_text(rank: RankSnapshot, how: str) -> str:
    return f"rank {rank.rank} {how}, in {_place(rank)}."


def _error_text(failure: Failure) -> str:
    return f"rank {failure.rank.rank} failed in {_place(failure.rank)}: {failure.error}"


def _place(rank: RankSnapshot) -> str:
    place = f"{rank.phase or 'an unknown phase'} after step {rank.global_step}"
    waiting = rank.in_flight
    if waiting is not None and waiting.is_done is False:
        place += f", inside {_collective(waiting)}"
    return place


def _collective(waiting: CollectiveInFlight) -> str:
    name = operator_name(waiting.operator)
    return f"{name} number {waiting.sequence} of the {waiting.axis} axis"
