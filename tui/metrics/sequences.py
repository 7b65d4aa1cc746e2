"""How far every rank has come in the collectives of each process group.

The members of a group enter the same collectives in the same order, so the sequence numbers alone
show which ranks have not entered the one that others wait in. For a moment they differ in every
job: only a group in which no member has advanced for long is called stuck.

Calls from rank to rank are numbered too where they run on a group. Ranks then count differently by
nature, and their numbers are shown without being compared.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

import msgspec

from boltmesh.telemetry.snapshot import GroupProgress, JobSnapshot, RankSnapshot
from boltmesh.telemetry.stall import LONG_LIMIT_S, LONG_PHASES, STALL_AT_LEAST_S
from boltmesh.tui.metrics.memo import remember_last
from boltmesh.tui.metrics.step_time import optimizer_step_seconds
from boltmesh.tui.metrics.traffic import is_point_to_point
from boltmesh.tui.state import State

STUCK_IN_STEPS = 5.0
"""A group is called stuck when a rank waits in it and none has advanced for this many steps of
the job, and for STALL_AT_LEAST_S. After the end of the job none will, and there is nothing to wait
for."""

Status = Literal["even", "apart", "waiting", "stuck", "paired", "unknown"]
"""``apart``: the numbers differ, as they do for a moment. ``waiting``: for a rank that validates,
writes a checkpoint or loads what its first step needs. ``paired``: numbers that cannot be compared.
``unknown``: no rank records it."""


class GroupRow(msgspec.Struct, frozen=True, kw_only=True):
    """One process group."""

    axis: str
    group: str
    members: tuple[int, ...]
    progress: Mapping[int, GroupProgress]
    """By rank; members that this host cannot see are left out."""
    newest: int | None
    """The highest number that a member has entered."""
    blocked: int
    """The collective that does not advance: the first that not all visible members have entered;
    that which is not complete where all have."""
    operator: str | None
    """Number of the blocked collective, where a member was last seen in it; else of the newest."""
    missing: tuple[int, ...]
    """Members that have not entered the blocked collective."""
    waiting: tuple[int, ...]
    """Members that have entered it and not left it, as far as is known."""
    unseen: tuple[int, ...]
    """Members whose progress is unknown."""
    operators: tuple[str, ...]
    """Operators that the members entered under the blocked number, the most common first. More than
    one: they issued different collectives."""
    silent_s: float | None
    """Since a member entered or completed a collective of the group; None before the first."""
    is_paired: bool
    """Ranks talk to one other here, so their numbers cannot be compared."""
    status: Status

    @property
    def oldest(self) -> int | None:
        """The lowest number that a visible member has entered."""
        return min((each.sequence for each in self.progress.values()), default=None)


@remember_last
def group_rows(state: State) -> tuple[GroupRow, ...]:
    """Return the groups: stuck ones first, then by axis, the outermost first."""
    job = state.job
    paired = _paired_groups(job)
    ranks = {rank.rank: rank for rank in job.ranks}
    patience_s = max(STALL_AT_LEAST_S, STUCK_IN_STEPS * (optimizer_step_seconds(job) or 0.0))
    rows = [
        _row(key, found, state, ranks, is_paired=key[:2] in paired, patience_s=patience_s)
        for key, found in _by_group(job).items()
    ]
    axes = [*job.mesh, "world"]
    order: dict[Status, int] = {"stuck": 0, "waiting": 1}
    return tuple(
        sorted(
            rows,
            key=lambda row: (
                order.get(row.status, 2),
                axes.index(row.axis) if row.axis in axes else len(axes),
                row.members,
            ),
        )
    )


def has_ended(job: JobSnapshot) -> bool:
    """Say whether no rank will enter anything any more."""
    return job.state != "running"


Key = tuple[str, str, int]
"""Axis and name of a group, and its first member: a name may be that of all groups of an axis."""


def _by_group(job: JobSnapshot) -> dict[Key, dict[int, GroupProgress]]:
    found: dict[Key, dict[int, GroupProgress]] = {}
    for rank in job.ranks:
        number = rank.rank
        for group in rank.groups:
            key = (group.axis, group.group, group.ranks[0] if group.ranks else -1)
            members = found.get(key)
            if members is None:
                members = found[key] = {}
            members[number] = group
    return found


def _paired_groups(job: JobSnapshot) -> set[tuple[str, str]]:
    """Return the axis and the name of the groups on which ranks talk to one other."""
    return {
        (total.axis, total.group)
        for rank in job.ranks
        for total in rank.collectives
        if total.calls and is_point_to_point(total.operator)
    } | {
        (group.axis, group.group)
        for rank in job.ranks
        for group in rank.groups
        if group.operator is not None and is_point_to_point(group.operator)
    }


def _row(
    key: Key,
    progress: dict[int, GroupProgress],
    state: State,
    ranks: Mapping[int, RankSnapshot],
    *,
    is_paired: bool,
    patience_s: float,
) -> GroupRow:
    axis, group, _ = key
    members = max((each.ranks for each in progress.values()), key=len) or tuple(sorted(progress))
    progress = _with_those_that_entered_nothing(progress, members, ranks, axis, group)
    newest = max((each.sequence for each in progress.values()), default=0)
    oldest = min((each.sequence for each in progress.values()), default=0)
    blocked = oldest + 1 if newest > oldest and not is_paired else newest
    missing = tuple(
        rank for rank, each in progress.items() if each.sequence < blocked and not is_paired
    )
    is_torn = bool(missing) and state.job.state in {"failed", "crashed"}
    waiting = tuple(
        rank
        for rank, each in progress.items()
        if _waits(each, blocked, is_paired=is_paired, is_torn=is_torn)
    )
    silent_s = _silent_s(progress, state)
    status = _status(
        progress, missing, waiting, state, ranks,
        is_paired=is_paired, silent_s=silent_s, patience_s=patience_s,
    )  # fmt: skip
    operators = _operators(progress, blocked)
    newest_operator = next(
        (each.operator for each in progress.values() if each.sequence == newest), None
    )
    return GroupRow(
        axis=axis,
        group=group,
        members=members,
        progress=progress,
        newest=newest if progress else None,
        blocked=blocked,
        operator=operators[0] if operators else newest_operator,
        missing=missing,
        waiting=waiting,
        unseen=tuple(rank for rank in members if rank not in progress),
        operators=operators,
        silent_s=silent_s,
        is_paired=is_paired,
        status=status,
    )


def _with_those_that_entered_nothing(
    progress: dict[int, GroupProgress],
    members: Sequence[int],
    ranks: Mapping[int, RankSnapshot],
    axis: str,
    group: str,
) -> dict[int, GroupProgress]:
    """Add the visible members that do not know the group yet: they have entered nothing in it."""
    if len(progress) == len(members):
        return progress
    known = dict(progress)
    for member in members:
        rank = ranks.get(member)
        if member in known or rank is None or rank.state == "missing" or rank.is_summary:
            continue
        if rank.groups or rank.state != "running":  # else it may be of a version without groups
            known[member] = GroupProgress(axis, group, tuple(members), 0, None, None, None)
    return known


def _waits(progress: GroupProgress, blocked: int, *, is_paired: bool, is_torn: bool) -> bool:
    """Say whether a rank is in the blocked collective.

    That it is done means that it needed no others, as the source of a broadcast does not; or that
    it was given up (``is_torn``): for the backend a lost peer ends a collective as well.
    """
    if progress.sequence == 0 or (progress.is_done is True and not is_torn):
        return False
    return progress.is_done is False if is_paired else progress.sequence >= blocked


def _silent_s(progress: Mapping[int, GroupProgress], state: State) -> float | None:
    times = [each.time for each in progress.values() if each.time is not None]
    now = state.job.updated if has_ended(state.job) else state.time
    return max(0.0, now - max(times)) if times else None


def _operators(progress: Mapping[int, GroupProgress], blocked: int) -> tuple[str, ...]:
    counts = Counter(
        each.operator
        for each in progress.values()
        if each.sequence == blocked and each.operator is not None
    )
    return tuple(operator for operator, _ in counts.most_common())


def _status(
    progress: Mapping[int, GroupProgress],
    missing: Sequence[int],
    waiting: Sequence[int],
    state: State,
    ranks: Mapping[int, RankSnapshot],
    *,
    is_paired: bool,
    silent_s: float | None,
    patience_s: float,
) -> Status:
    if not progress:
        return "unknown"
    quiet: Status = "paired" if is_paired else "apart" if missing else "even"
    # If all have entered it, only some backends report whether it is complete.
    is_waited_in = bool(waiting) and (
        bool(missing) or any(progress[rank].is_done is False for rank in waiting)
    )
    if not is_waited_in or state.job.state == "finished":
        return quiet
    if has_ended(state.job):
        return "stuck"
    if silent_s is None or silent_s < patience_s:
        return quiet
    if silent_s < LONG_LIMIT_S and _takes_long(missing, ranks):
        return "waiting"
    return "stuck"


def _takes_long(missing: Iterable[int], ranks: Mapping[int, RankSnapshot]) -> bool:
    found = [ranks[rank] for rank in missing if rank in ranks]
    return bool(found) and all(
        rank.is_alive and (rank.phase in LONG_PHASES or not rank.steps) for rank in found
    )
