"""What one rank says of itself when it stands still: its collectives, and where its code is."""

from typing import Final

import msgspec

from boltmesh.telemetry.recording.members import unpack_ranks

POINT_TO_POINT: Final = frozenset({"send", "recv", "recv_any_source"})


class GroupStanding(msgspec.Struct, frozen=True, kw_only=True):
    """How far a rank has come in one process group."""

    name: str
    axis: str
    members: list[tuple[int, int, int]]
    """As runs, see ``members.pack_ranks``; empty where they are not known."""
    sequence: int
    """The newest collective that it entered, counted from 1."""
    operator: str | None
    is_done: bool | None
    """None where the backend does not tell."""
    for_s: float
    """Since it was entered or, where that is known, done."""
    peer: int | None = None
    """The other side of a call from rank to rank, by global rank."""
    is_paired: bool = False
    """Ranks talk to one other here too, so the numbers of two ranks cannot be compared."""

    @property
    def key(self) -> tuple[str, int]:
        """Name and first member: a name may be that of all groups of an axis."""
        return self.name, self.members[0][0] if self.members else -1

    def ranks(self, world_size: int) -> tuple[int, ...]:
        """The members; all ranks where they are not known."""
        return unpack_ranks(self.members, world_size) or tuple(range(world_size))


class Standing(msgspec.Struct, frozen=True, kw_only=True):
    """One rank that makes no progress, or of which that is asked."""

    rank: int
    phase: str | None = None
    global_step: int = 0
    place: str = ""
    """Where its code stands, in words; empty where that is not known."""
    stack: tuple[str, ...] = ()
    """The lines of its stack that are the user's, the innermost last."""
    is_in_library: bool = True
    """The innermost frame is not the user's, so that it may be a wait."""
    silence: str = ""
    """Why it did not answer; empty where it did."""
    groups: tuple[GroupStanding, ...] = ()
    has_stepped: bool = True
    """It has made a step, so that nothing has to be loaded any more."""
