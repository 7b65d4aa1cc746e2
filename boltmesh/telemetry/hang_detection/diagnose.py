"""Finds from the progress of several ranks where a hang began: plain functions.

The members of a group enter the same collectives in the same order, so the sequence numbers show
which rank has not entered the one in which another rank waits. A missing rank may wait itself, in
another group: then the search goes on there, until a rank that does not wait or around a cycle.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Final, NamedTuple

import msgspec

from boltmesh.telemetry.rank_ranges import unpack_ranks
from boltmesh.telemetry.snapshot import operator_name
from boltmesh.telemetry.stall import LONG_PHASES

POINT_TO_POINT: Final = frozenset({"send", "recv", "recv_any_source"})


class GroupPosition(msgspec.Struct, frozen=True, kw_only=True):
    """How far a rank has come in one process group."""

    name: str
    axis: str
    members: list[tuple[int, int, int]]
    """As runs, see ``rank_ranges.pack_ranks``; empty if unknown."""
    sequence: int
    """Number of the newest collective that it entered, from 1."""
    operator: str | None
    is_done: bool | None
    """None if the backend does not report it."""
    for_s: float
    """Seconds since it was entered or, if that is known, done."""
    peer: int | None = None
    """Global rank of the other side of a point-to-point call."""
    is_paired: bool = False
    """The group also has point-to-point calls, so sequence numbers of two ranks do not compare."""

    @property
    def key(self) -> tuple[str, int]:
        """Name and first member: a name may be that of all groups of an axis."""
        return self.name, self.members[0][0] if self.members else -1

    def ranks(self, world_size: int) -> tuple[int, ...]:
        """Return the members; all ranks if they are unknown."""
        return unpack_ranks(self.members, world_size) or tuple(range(world_size))


class RankProgress(msgspec.Struct, frozen=True, kw_only=True):
    """How far one rank has come: its collectives, and where its code is."""

    rank: int
    phase: str | None = None
    global_step: int = 0
    place: str = ""
    """Source line of its code, see ``CodeLocation``; empty if unknown."""
    stack: tuple[str, ...] = ()
    """Lines of its stack that are user code, the innermost last."""
    is_in_library: bool = True
    """The innermost frame is not user code, so it may be a wait."""
    silence: str = ""
    """Why it published nothing; empty if it did."""
    groups: tuple[GroupPosition, ...] = ()
    has_stepped: bool = True
    """It has made a step, so loading is over."""


MAX_NAMED: Final = 4
"""Missing ranks that are described one by one."""

_ADVICE: Final = "All ranks of a group have to make the same calls in the same order."


class Wait(NamedTuple):
    """One collective that does not advance."""

    group: GroupPosition
    """Position of a rank that waits."""
    blocked: int
    """Number of the collective."""
    operator: str | None
    missing: tuple[int, ...]
    """Ranks that have not entered it."""
    waiting: tuple[int, ...]
    others: tuple[tuple[str, tuple[int, ...]], ...] = ()
    """Operators that were entered under the same number, with their ranks."""


class Explanation(NamedTuple):
    """Why a rank waits."""

    key: str
    """Equal for all ranks and collectives that wait for the same missing ranks, until one moves."""
    text: str
    """One or two sentences."""
    stacks: tuple[str, ...]
    """Lines with the stacks of the missing."""
    takes_long: bool
    """The missing ranks validate, write a checkpoint or load, which may take long."""


def explain(
    progress: Mapping[int, RankProgress], start: int, world_size: int
) -> Explanation | None:
    """Return why rank ``start`` waits; None if it does not wait or no rank is known to be behind.

    Args:
        progress: By rank, for the ranks whose progress is known.
        start: The rank to explain.
        world_size: Ranks of the job.
    """
    wait, waiter, is_cycle = find_root(progress, start, world_size)
    if wait is None:
        return None
    name, group = _call(wait), _group(wait.group, world_size)
    text = _what(wait, name, group)
    named = sorted(
        {*wait.missing}
        or {rank for _, ranks in wait.others[1:] for rank in ranks}
        # All have entered it: a rank that was stopped in it takes no further part.
        or {rank for rank in wait.waiting if rank in progress and progress[rank].silence}
    )
    sentences = [_where(rank, progress, world_size) for rank in named[:MAX_NAMED]]
    if len(named) > MAX_NAMED:
        sentences.append(f"So are {len(named) - MAX_NAMED} more")
    if is_cycle or wait.others:
        sentences += [_where(waiter, progress, world_size), _ADVICE.rstrip(".")]
    known = [progress[rank] for rank in wait.missing if rank in progress]
    takes_long = len(known) == len(wait.missing) > 0 and all(
        not rank.silence and (rank.phase in LONG_PHASES or not rank.has_stepped) for rank in known
    )
    return Explanation(
        key=" ".join(_mark(progress, rank) for rank in (named or wait.waiting)),
        text=f"{text}. {'. '.join(sentences)}." if sentences else f"{text}.",
        stacks=tuple(_stacks([*named[:MAX_NAMED], *([waiter] if is_cycle else [])], progress)),
        takes_long=takes_long and not is_cycle,
    )


def find_root(
    progress: Mapping[int, RankProgress], start: int, world_size: int
) -> tuple[Wait | None, int, bool]:
    """Return where the hang began, a rank that waits there, and whether it is a cycle."""
    rank, path = start, {start: find_wait(progress, start, world_size)}
    while (wait := path[rank]) is not None:
        waits = {missing: find_wait(progress, missing, world_size) for missing in wait.missing}
        stuck = [missing for missing, found in waits.items() if found is not None and found.missing]
        if not stuck or len(stuck) < len(waits):
            return wait, rank, False  # some do not wait: here it began
        if again := [missing for missing in stuck if missing in path]:
            order = list(path)
            first = min(order[order.index(again[0]) :])  # the same from every rank of the cycle
            return path[first], first, True
        rank = stuck[0]
        path[rank] = waits[rank]
    return None, start, False


def find_wait(progress: Mapping[int, RankProgress], rank: int, world_size: int) -> Wait | None:
    """Return the collective that a rank has waited in for longest."""
    own = progress.get(rank)
    if own is None:
        return None
    newest = min((group.for_s for group in own.groups), default=0.0)
    found: Wait | None = None
    for group in sorted(own.groups, key=lambda group: -group.for_s):
        if group.is_done is True:
            continue
        is_peer = group.operator in POINT_TO_POINT
        if is_peer and (group.for_s > newest or not own.is_in_library):
            continue  # it has advanced since, or runs user code
        wait = _compare(group, rank, progress, world_size)
        if wait.missing or wait.others:
            return wait
        if group.is_done is False:
            found = found or wait
    return found


def _compare(
    group: GroupPosition, rank: int, progress: Mapping[int, RankProgress], world_size: int
) -> Wait:
    """Compare the positions of a group with that of ``rank``, which waits."""
    members = group.ranks(world_size)
    if group.operator in POINT_TO_POINT:
        peers = tuple(member for member in members if member != rank)
        missing = peers if group.peer is None else (group.peer,)
        return Wait(group, group.sequence, group.operator, missing, (rank,))
    positions = {member: _position(progress.get(member), group) for member in members}
    if group.is_paired:
        waiting = tuple(
            member
            for member, found in positions.items()
            if found is not None and found.operator == group.operator and found.is_done is False
        )
        missing = tuple(member for member in members if member not in waiting)
        return Wait(group, group.sequence, group.operator, missing, waiting or (rank,))
    known = {member: found for member, found in positions.items() if found is not None}
    oldest = min(found.sequence for found in known.values())
    blocked = min(oldest + 1, group.sequence)
    entered = {member: found for member, found in known.items() if found.sequence >= blocked}
    operators: dict[str, list[int]] = {}
    for member, found in entered.items():
        if found.sequence == blocked and found.operator is not None:
            operators.setdefault(found.operator, []).append(member)
    others = sorted(operators.items(), key=lambda item: (-len(item[1]), item[1]))
    behind = tuple(member for member in known if member not in entered)
    unknown = tuple(member for member in members if member not in known)
    is_behind = group.sequence > oldest
    return Wait(
        group,
        blocked,
        others[0][0] if others else None,
        behind if is_behind else unknown,
        tuple(sorted(entered)),
        tuple((name, tuple(ranks)) for name, ranks in others) if len(others) > 1 else (),
    )


def _position(own: RankProgress | None, group: GroupPosition) -> GroupPosition | None:
    """Return a rank's position in a group; a rank that never used it has entered nothing."""
    if own is None:
        return None
    found = next((known for known in own.groups if known.key == group.key), None)
    if found is None:
        return GroupPosition(
            name=group.name,
            axis=group.axis,
            members=group.members,
            sequence=0,
            operator=None,
            is_done=None,
            for_s=0.0,
        )
    return found


def _what(wait: Wait, name: str, group: str) -> str:
    if wait.group.operator in POINT_TO_POINT:
        return f"{_who_waits(wait)} for {name_ranks(wait.missing)} in {name} of {group}"
    if wait.missing:
        missing = name_ranks(wait.missing)
        return f"{missing} never entered {name} of {group}, in which {_who_waits(wait)}"
    if wait.others:
        parts = ", ".join(
            f"{name_ranks(ranks)} {operator_name(operator)}" for operator, ranks in wait.others
        )
        return f"the ranks of {group} entered different calls as #{wait.blocked:,}: {parts}"
    return f"all ranks entered {name} of {group}, and it does not complete"


def _who_waits(wait: Wait) -> str:
    verb = "waits" if len(wait.waiting) == 1 else "wait"
    return f"{name_ranks(wait.waiting)} {verb}"


def _where(rank: int, progress: Mapping[int, RankProgress], world_size: int) -> str:
    """Describe the activity of a rank in one sentence without its full stop."""
    own = progress.get(rank)
    if own is None:
        return f"Rank {rank} does not answer, and this host has no telemetry file of it"
    at = f"in {own.phase or 'an unknown phase'} after step {own.global_step:,}"
    if own.silence:
        return f"Rank {rank} {own.silence}, {at}"
    place = f", at {own.place}" if own.place else ""
    wait = find_wait(progress, rank, world_size)
    if wait is not None and wait.missing:
        call = f"{_call(wait)} of {_group(wait.group, world_size)}"
        return f"Rank {rank} waits for {name_ranks(wait.missing)} in {call}, {at}{place}"
    return f"Rank {rank} is {at}{place}"


def _call(wait: Wait) -> str:
    return f"{operator_name(wait.operator or 'collective')} #{wait.blocked:,}"


def _group(group: GroupPosition, world_size: int) -> str:
    members = group.ranks(world_size)
    of = "" if group.axis == "other" else f"{group.axis} "
    return f"{of}({name_ranks(members)})"


def _mark(progress: Mapping[int, RankProgress], rank: int) -> str:
    """Return a text that changes when a rank advances."""
    own = progress.get(rank)
    return f"{rank}:{sum(group.sequence for group in own.groups) if own else '-'}"


def _stacks(ranks: Iterable[int], progress: Mapping[int, RankProgress]) -> Iterable[str]:
    for rank in ranks:
        own = progress.get(rank)
        if own is not None and own.stack:
            yield f"rank {rank}:"
            yield from (f"  {line}" for line in own.stack)


def name_ranks(ranks: Sequence[int]) -> str:
    """Return ``rank 5`` or ``ranks 0-3, 8``; of very many their number."""
    ordered = sorted(set(ranks))
    if len(ordered) == 1:
        return f"rank {ordered[0]}"
    runs: list[list[int]] = []
    for rank in ordered:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    parts = [f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs]
    return f"ranks {', '.join(parts)}" if len(parts) <= 8 else f"{len(ordered)} ranks"
