"""The ranks that a stuck collective waits for, their places, and the first to fail, in words."""

from collections.abc import Iterable, Mapping, Sequence

import msgspec

from boltmesh.telemetry.reader.cause import is_consequence
from boltmesh.telemetry.snapshot import GroupProgress, JobSnapshot, RankSnapshot, operator_name
from boltmesh.tui import units
from boltmesh.tui.metrics.memo import remember_last
from boltmesh.tui.metrics.sequences import GroupRow, Status, group_rows, has_ended
from boltmesh.tui.state import State

MAX_PLACES = 3
"""Places of missing ranks that a sentence names; the rarest first."""


class Hang(msgspec.Struct, frozen=True, kw_only=True):
    """One group in which ranks wait."""

    row: GroupRow
    is_first: bool
    """Began here: a rank that it waits for waits in no other such group, or is gone."""
    since: float | None
    """Wall clock of the last advance in the group."""
    text: str
    """One sentence: the ranks that never entered it, where they are, and the ranks that wait."""


@remember_last
def hangs(state: State) -> tuple[Hang, ...]:
    """Return the groups that are stuck: where it began first, then those that wait for these."""
    return _describe(state, "stuck")


@remember_last
def waits(state: State) -> tuple[Hang, ...]:
    """Return the groups that wait for a rank in a phase that may take long."""
    return _describe(state, "waiting")


def _describe(state: State, status: Status) -> tuple[Hang, ...]:
    rows = [row for row in group_rows(state) if row.status == status]
    if not rows:
        return ()
    ranks = {rank.rank: rank for rank in state.job.ranks}
    waits_in = _waits_in(rows)
    several = _axes_of_several_groups(state)
    found = []
    for row in rows:
        times = [each.time for each in row.progress.values() if each.time is not None]
        others = [rank for rank in row.progress if rank not in row.waiting]
        cause = row.missing or others
        is_first = not cause or any(
            waits_in.get(rank, row) is row or _is_gone(ranks.get(rank)) for rank in cause
        )
        text = _text(row, state, ranks, waits_in, several)
        since = max(times) if times else None
        found.append(Hang(row=row, is_first=is_first, since=since, text=text))
    return tuple(sorted(found, key=lambda hang: (not hang.is_first, -len(hang.row.waiting))))


def first_to_go(job: JobSnapshot) -> RankSnapshot | None:
    """Return the rank that took a failed or crashed job down, as far as the ranks tell.

    The first to fall silent among the dead ranks and those whose error is not a consequence of
    another rank's end. ``JobSnapshot.cause`` uses the same order.
    """
    if job.state not in {"failed", "crashed"}:
        return None
    named = next((rank for rank in job.ranks if is_named(rank, job.cause)), None)
    if named is not None:
        return named
    gone = [rank for rank in job.ranks if rank.state in {"dead", "failed"}]
    causes = [rank for rank in gone if rank.error is None or not is_consequence(rank.error)]
    return min(causes or gone, key=lambda rank: rank.last_seen, default=None)


def is_named(rank: RankSnapshot, cause: str | None) -> bool:
    """Say whether the job's cause names ``rank`` as the first to fail."""
    return cause is not None and cause.startswith(f"rank {rank.rank} ")


def last_collective(rank: RankSnapshot, state: State) -> str | None:
    """Say which collective the rank was in, or had completed last."""
    newest = max(
        (group for group in rank.groups if group.sequence),
        key=lambda group: (group.is_done is False, group.time or 0.0),
        default=None,
    )
    if newest is None:
        return None
    name = _collective(newest.operator, newest.sequence)
    name = f"{name} of {_group_name(newest.axis, newest.ranks, _axes_of_several_groups(state))}"
    if newest.is_done is None:
        return f"the last that it entered is {name}"
    return f"it was inside {name}" if newest.is_done is False else f"it had completed {name}"


def group_name(row: GroupRow, state: State) -> str:
    """Return the axis, and the ranks where the axis has several groups."""
    return _group_name(row.axis, row.members, _axes_of_several_groups(state))


def whereabouts(rank: RankSnapshot | None, state: State) -> str:
    """Return where a rank is now and for how long, as the end of a sentence: ``it ...``."""
    if rank is None or rank.state == "missing":
        return "cannot be seen from here"
    for_s = units.duration(max(0.0, _now(state) - rank.last_seen))
    phase = rank.phase or "an unknown phase"
    if rank.state == "dead":
        return f"died in {phase} at step {units.count(rank.global_step)}"
    if rank.state == "failed":
        return f"failed in {phase} at step {units.count(rank.global_step)}"
    if rank.state == "finished":
        return "has finished"
    if has_ended(state.job):
        return f"was in {phase}"
    return f"has been in {phase} for {for_s}"


def plural(place: str) -> str:
    """Return the end of a sentence about one rank for several: ``has been``, ``have been``."""
    verb, _, rest = place.partition(" ")
    verbs = {"has": "have", "was": "were", "waits": "wait"}
    return f"{verbs.get(verb, verb)} {rest}"


def _now(state: State) -> float:
    return state.job.updated if has_ended(state.job) else state.time


def _waits_in(stuck: Sequence[GroupRow]) -> dict[int, GroupRow]:
    """Return the stuck group in which each rank waits: of several, where it came last."""
    found: dict[int, tuple[float, GroupRow]] = {}
    for row in stuck:
        for rank in row.waiting:
            time = row.progress[rank].time or 0.0
            if rank not in found or time > found[rank][0]:
                found[rank] = (time, row)
    return {rank: row for rank, (_, row) in found.items()}


def _is_gone(rank: RankSnapshot | None) -> bool:
    return rank is not None and rank.state in {"dead", "failed", "finished"}


def _axes_of_several_groups(state: State) -> frozenset[str]:
    seen: set[str] = set()
    several: set[str] = set()
    for row in group_rows(state):
        (several if row.axis in seen else seen).add(row.axis)
    return frozenset(several)


def _group_name(axis: str, members: Sequence[int], several: frozenset[str]) -> str:
    return f"{axis} ({units.ranks(members)})" if axis in several and members else axis


def _collective(operator: str | None, sequence: int) -> str:
    return f"{operator_name(operator) if operator else 'collective'} #{sequence:,}"


def _text(
    row: GroupRow,
    state: State,
    ranks: Mapping[int, RankSnapshot],
    waits_in: Mapping[int, GroupRow],
    several: frozenset[str],
) -> str:
    group = _group_name(row.axis, row.members, several)
    who_waits = _waiting(row, state)
    name = _collective(row.operators[0] if row.operators else None, row.blocked)
    if row.missing:
        places = _places(row.missing, row, state, ranks, waits_in, several)
        verb = "never entered"
        if row.status == "waiting":
            verb = "has not entered" if len(row.missing) == 1 else "have not entered"
        return f"{units.ranks(row.missing)} {verb} {name} of {group}; {places}; {who_waits}"
    if row.is_paired:
        others = tuple(rank for rank in row.progress if rank not in row.waiting)
        if not others:
            return f"all ranks of {group} wait for one another in {_calls(row)}; {who_waits}"
        places = _places(others, row, state, ranks, waits_in, several, is_named=True)
        return f"{who_waits} in {_calls(row)} of {group}; {places}"
    if len(row.operators) > 1:
        parts = ", ".join(
            f"{units.ranks(_in_operator(row.progress, each, row.blocked))} {operator_name(each)}"
            for each in row.operators
        )
        number = f"#{row.blocked:,}"
        return f"ranks of {group} entered different collectives as {number}: {parts}; {who_waits}"
    return f"all ranks of {group} entered {name}, and it is not complete; {who_waits}"


def _waiting(row: GroupRow, state: State) -> str:
    who = units.ranks(row.waiting)
    if has_ended(state.job):
        return f"{who} had entered it"
    verb = "waits" if len(row.waiting) == 1 else "wait"
    return f"{who} {verb}" + (f" for {units.duration(row.silent_s)}" if row.silent_s else "")


def _calls(row: GroupRow) -> str:
    names = {operator_name(row.progress[rank].operator or "a call") for rank in row.waiting}
    return " or ".join(sorted(names))


def _in_operator(
    progress: Mapping[int, GroupProgress], operator: str, sequence: int
) -> Iterable[int]:
    return [
        rank
        for rank, each in progress.items()
        if each.sequence == sequence and each.operator == operator
    ]


def _places(
    missing: Sequence[int],
    row: GroupRow,
    state: State,
    ranks: Mapping[int, RankSnapshot],
    waits_in: Mapping[int, GroupRow],
    several: frozenset[str],
    *,
    is_named: bool = False,
) -> str:
    """Say where ranks are, those at the same place together; ``it`` where there is one place."""
    by_place: dict[str, list[int]] = {}
    for number in missing:
        rank = ranks.get(number)
        other = waits_in.get(number)
        if other is not None and other is not row and not _is_gone(rank):
            name = _collective(other.progress[number].operator, other.progress[number].sequence)
            verb = "waited" if has_ended(state.job) else "waits"
            place = f"{verb} in {name} of {_group_name(other.axis, other.members, several)}"
        else:
            place = whereabouts(rank, state)
        by_place.setdefault(place, []).append(number)
    if len(by_place) == 1 and not is_named:
        place, numbers = next(iter(by_place.items()))
        if len(numbers) == 1:
            return f"it {place}"
        return f"they {plural(place)}"
    ordered = sorted(by_place.items(), key=lambda item: (len(item[1]), item[1]))
    parts = [
        f"{units.ranks(numbers)} {place if len(numbers) == 1 else plural(place)}"
        for place, numbers in ordered[:MAX_PLACES]
    ]
    rest = sum(len(numbers) for _, numbers in ordered[MAX_PLACES:])
    return ", ".join(parts) + (f", and {rest} elsewhere" if rest else "")
