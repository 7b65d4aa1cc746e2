"""The phases of one rank beside those of the ranks that do the same work."""

import msgspec

from boltmesh.telemetry.snapshot import PHASES, JobSnapshot
from boltmesh.tui.figures.profile import middle, rank_profiles


class PhaseBeside(msgspec.Struct, frozen=True):
    """One phase of an ordinary step, medians."""

    name: str
    seconds: float
    peers_s: float | None
    """Median of the others of its stage; None where there are none."""


def phases_beside_peers(job: JobSnapshot, number: int) -> list[PhaseBeside]:
    """Return the phases of a rank in the order of PHASES, those that nobody has left out."""
    profiles = rank_profiles(job)
    own = profiles.get(number)
    rank = next((rank for rank in job.ranks if rank.rank == number), None)
    if own is None or rank is None:
        return []
    stage = rank.coordinates.get("pipeline", 0)
    peers = [
        profiles[other.rank]
        for other in job.ranks
        if other.rank != number
        and other.rank in profiles
        and other.coordinates.get("pipeline", 0) == stage
    ]
    found = []
    for name in PHASES:
        others = [peer.typical.get(name, 0.0) for peer in peers]
        seconds = own.typical.get(name, 0.0)
        if seconds or any(others):
            found.append(PhaseBeside(name, seconds, middle(others) if others else None))
    return found
