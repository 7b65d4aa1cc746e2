"""Works out from what ranks say of themselves where a standstill began: plain functions.

The members of a group enter the same collectives in the same order, so the sequence numbers tell
who has not entered the one in which a rank waits. A missing rank may wait itself, in another
group: then the question goes on there, to whoever waits for nobody, or around a circle.

What one rank says of itself when it stands still: its collectives, and where its code is.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Final, NamedTuple

import msgspec

from boltmesh.telemetry.writer.rank_ranges import unpack_ranks

POINT_TO_POINT: Final = frozenset({"send", "recv", "recv_any_source"})


class GroupPosition(msgspec.Struct, frozen=True, kw_only=True):
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


class RankProgress(msgspec.Struct, frozen=True, kw_only=True):
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
    groups: tuple[GroupPosition, ...] = ()
    has_stepped: bool = True
    """It has made a step, so that nothing has to be loaded any more."""


MAX_NAMED: Final = 4
"""Missing ranks that are told of one by one."""

_LONG_PHASES: Final = frozenset({"validation", "checkpoint"})

_ADVICE: Final = "All ranks of a group have to make the same calls in the same order."


class Wait(NamedTuple):
    """One collective that does not advance."""

    group: GroupPosition
    """As one who waits has it."""
    blocked: int
    """The number of the collective."""
    operator: str | None
    missing: tuple[int, ...]
    """Who has not entered it."""
    waiting: tuple[int, ...]
    others: tuple[tuple[str, tuple[int, ...]], ...] = ()
    """Who has entered something else under the same number."""


class Explanation(NamedTuple):
    """Why a rank waits."""

    key: str
    """The same whoever asks, and of whichever collective, as long as the missing do not move."""
    text: str
    """One or two sentences."""
    stacks: tuple[str, ...]
    """Lines with the stacks of the missing."""
    takes_long: bool
    """The missing do what may well take long: a validation, a checkpoint, loading."""


def explain(
    standings: Mapping[int, RankProgress], start: int, world_size: int
) -> Explanation | None:
    """Return why rank ``start`` waits; None where it does not, or nobody is known to be behind.

    Args:
        standings: By rank, of those that are known of.
        start: The rank that asks.
        world_size: Ranks of the job.
    """
    wait, asker, is_circle = find_root(standings, start, world_size)
    if wait is None:
        return None
    name, group = _call(wait), _group(wait.group, world_size)
    text = _what(wait, name, group)
    told = sorted({*wait.missing} or {rank for _, ranks in wait.others[1:] for rank in ranks})
    sentences = [_where(rank, standings, world_size) for rank in told[:MAX_NAMED]]
    if len(told) > MAX_NAMED:
        sentences.append(f"So are {len(told) - MAX_NAMED} more")
    if is_circle or wait.others:
        sentences += [_where(asker, standings, world_size), _ADVICE.rstrip(".")]
    known = [standings[rank] for rank in wait.missing if rank in standings]
    takes_long = len(known) == len(wait.missing) > 0 and all(
        not each.silence and (each.phase in _LONG_PHASES or not each.has_stepped) for each in known
    )
    return Explanation(
        key=" ".join(_mark(standings, rank) for rank in (told or wait.waiting)),
        text=f"{text}. {'. '.join(sentences)}." if sentences else f"{text}.",
        stacks=tuple(_stacks([*told[:MAX_NAMED], *([asker] if is_circle else [])], standings)),
        takes_long=takes_long and not is_circle,
    )


def find_root(
    standings: Mapping[int, RankProgress], start: int, world_size: int
) -> tuple[Wait | None, int, bool]:
    """Return where the standstill began, a rank that waits there, and whether it is a circle."""
    rank, path = start, {start: find_wait(standings, start, world_size)}
    while (wait := path[rank]) is not None:
        waits = {each: find_wait(standings, each, world_size) for each in wait.missing}
        stuck = [each for each, found in waits.items() if found is not None and found.missing]
        if not stuck or len(stuck) < len(waits):
            return wait, rank, False  # some wait for nobody: here it began
        if again := [each for each in stuck if each in path]:
            order = list(path)
            first = min(order[order.index(again[0]) :])  # the same whoever of the circle asks
            return path[first], first, True
        rank = stuck[0]
        path[rank] = waits[rank]
    return None, start, False


def find_wait(standings: Mapping[int, RankProgress], rank: int, world_size: int) -> Wait | None:
    """Return what a rank waits in, the collective that it has waited in for longest first."""
    own = standings.get(rank)
    if own is None:
        return None
    newest = min((each.for_s for each in own.groups), default=0.0)
    found: Wait | None = None
    for group in sorted(own.groups, key=lambda each: -each.for_s):
        if group.is_done is True:
            continue
        is_peer = group.operator in POINT_TO_POINT
        if is_peer and (group.for_s > newest or not own.is_in_library):
            continue  # it has gone on since, or does something of its own
        wait = _compare(group, rank, standings, world_size)
        if wait.missing or wait.others:
            return wait
        if group.is_done is False:
            found = found or wait
    return found


def _compare(
    group: GroupPosition, rank: int, standings: Mapping[int, RankProgress], world_size: int
) -> Wait:
    """Look who of a group is where ``rank`` waits."""
    members = group.ranks(world_size)
    if group.operator in POINT_TO_POINT:
        peers = tuple(each for each in members if each != rank)
        missing = peers if group.peer is None else (group.peer,)
        return Wait(group, group.sequence, group.operator, missing, (rank,))
    progress = {each: _progress(standings.get(each), group) for each in members}
    if group.is_paired:
        waiting = tuple(
            each
            for each, found in progress.items()
            if found is not None and found.operator == group.operator and found.is_done is False
        )
        missing = tuple(each for each in members if each not in waiting)
        return Wait(group, group.sequence, group.operator, missing, waiting or (rank,))
    known = {each: found.sequence for each, found in progress.items() if found is not None}
    oldest = min(known.values())
    blocked = min(oldest + 1, group.sequence)
    entered = {each: found for each, found in progress.items() if found and known[each] >= blocked}
    operators: dict[str, list[int]] = {}
    for each, found in entered.items():
        if found.sequence == blocked and found.operator is not None:
            operators.setdefault(found.operator, []).append(each)
    others = sorted(operators.items(), key=lambda item: (-len(item[1]), item[1]))
    behind = tuple(each for each in known if known[each] < blocked)
    unknown = tuple(each for each, found in progress.items() if found is None)
    is_behind = group.sequence > oldest
    return Wait(
        group,
        blocked,
        others[0][0] if others else None,
        behind if is_behind else unknown,
        tuple(sorted(entered)),
        tuple((name, tuple(ranks)) for name, ranks in others) if len(others) > 1 else (),
    )


def _progress(standing: RankProgress | None, group: GroupPosition) -> GroupPosition | None:
    """Return how far a rank is in a group; one that never used the group has entered nothing."""
    if standing is None:
        return None
    found = next((each for each in standing.groups if each.key == group.key), None)
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
            f"{name_ranks(ranks)} {operator.strip('_')}" for operator, ranks in wait.others
        )
        return f"the ranks of {group} entered different calls as #{wait.blocked:,}: {parts}"
    return f"all ranks entered {name} of {group}, and it does not complete"


def _who_waits(wait: Wait) -> str:
    verb = "waits" if len(wait.waiting) == 1 else "wait"
    return f"{name_ranks(wait.waiting)} {verb}"


def _where(rank: int, standings: Mapping[int, RankProgress], world_size: int) -> str:
    """Say what a rank does: one sentence without its full stop."""
    standing = standings.get(rank)
    if standing is None:
        return f"Rank {rank} does not answer, and its host cannot be looked at from here"
    at = f"in {standing.phase or 'an unknown phase'} after step {standing.global_step:,}"
    if standing.silence:
        return f"Rank {rank} {standing.silence}, {at}"
    place = f", at {standing.place}" if standing.place else ""
    wait = find_wait(standings, rank, world_size)
    if wait is not None and wait.missing:
        call = f"{_call(wait)} of {_group(wait.group, world_size)}"
        return f"Rank {rank} waits for {name_ranks(wait.missing)} in {call}, {at}{place}"
    return f"Rank {rank} is {at}{place}"


def _call(wait: Wait) -> str:
    return f"{(wait.operator or 'collective').strip('_')} #{wait.blocked:,}"


def _group(group: GroupPosition, world_size: int) -> str:
    members = group.ranks(world_size)
    of = "" if group.axis == "other" else f"{group.axis} "
    return f"{of}({name_ranks(members)})"


def _mark(standings: Mapping[int, RankProgress], rank: int) -> str:
    """Return what changes when a rank moves on."""
    standing = standings.get(rank)
    return f"{rank}:{sum(group.sequence for group in standing.groups) if standing else '-'}"


def _stacks(ranks: Iterable[int], standings: Mapping[int, RankProgress]) -> Iterable[str]:
    for rank in ranks:
        standing = standings.get(rank)
        if standing is not None and standing.stack:
            yield f"rank {rank}:"
            yield from (f"  {line}" for line in standing.stack)


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
