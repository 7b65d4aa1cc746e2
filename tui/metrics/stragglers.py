"""Which rank slows the others down, by how much, and in which phase of its step.

In synchronous training every rank takes as long as the slowest, so the length of a step does not
differ between ranks. What differs is a rank's compute time, the step without waiting for others: it
is longest on the straggler, which waits the shortest. It is compared with the ranks that do the
same work, those of its pipeline stage, by their median and the median absolute deviation, so that a
few stragglers do not shift the reference. Stages of one rank each are compared with one another.

``balance`` divides the waiting in collectives into transfer and waiting for the last rank.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from boltmesh.telemetry.snapshot import JobSnapshot
from boltmesh.tui.metrics.memo import remember_last
from boltmesh.tui.metrics.step_time import (
    BUBBLE,
    DEVIATION,
    SPLIT_PHASES,
    RankProfile,
    batches_per_step,
    judged_profiles,
    middle,
)

LATE_SHARE = 0.1
"""Share of a step. Below a tenth, moving the work would gain less than the search for the reason
costs; ranks on equal machines stay within a few percent of each other."""

LATE_DEVIATIONS = 5.0
"""Scaled median deviations of the other ranks, or standard errors of a rank's own time. Ranks may
differ much by nature, as with texts of unequal length: then only an outlier is one rank's fault.
In a normal distribution less than one value in a million is beyond five."""

LATE_AT_LEAST_S = 0.001
"""Delay that a busy host adds to any step."""

PHASE_SHARE = 0.3
"""Share of the excess. A slow device loses time in each phase, most in the backward pass; a
process that is stopped at times loses it in another phase each time, and in no typical one."""

FEW_PEERS = 16
"""Up to here a rank is left out of the spread that it is judged by: of few, one is much."""

BATCHES_TO_JUDGE = 5
"""Fewer batches may all be of one kind by chance."""

_WAITING = ("communication", BUBBLE)


class Lateness(msgspec.Struct, frozen=True):
    """One rank beside the others of its stage."""

    rank: int
    own_s: float
    """Time of a typical step without waiting for others."""
    peers_s: float
    """The same of the others, their median."""
    step_s: float
    """The whole step."""
    phase: str | None
    """Where it loses the most time; None where no single phase explains the excess."""
    phase_s: float
    phase_peers_s: float
    wait_s: float
    """Time in a step that it waits for the others."""
    peers_wait_s: float
    is_late: bool
    stage: int | None = None
    """Pipeline stage, where each stage has one rank and is compared with the other stages."""

    @property
    def excess_s(self) -> float:
        """Seconds a step beyond the others; negative where it is ahead of them."""
        return self.own_s - self.peers_s

    @property
    def share(self) -> float:
        """Excess over the time of the others: 0.31 is 31% slower."""
        return self.excess_s / self.peers_s if self.peers_s > 0 else 0.0


@remember_last
def lateness(job: JobSnapshot) -> dict[int, Lateness]:
    """Return every rank that has peers and enough batches to be judged."""
    profiles = judged_profiles(job)
    stages: dict[int, list[RankProfile]] = defaultdict(list)
    for rank in job.ranks:
        profile = profiles.get(rank.rank)
        if profile is not None and profile.num_batches >= BATCHES_TO_JUDGE:
            stages[rank.coordinates.get("pipeline", 0)].append(profile)
    if len(stages) > 1 and all(len(peers) == 1 for peers in stages.values()):
        return _compare_stages({stage: peers[0] for stage, peers in stages.items()})
    found: dict[int, Lateness] = {}
    for peers in stages.values():
        if len(peers) > 1:
            found.update((late.rank, late) for late in _compare(peers))
    return found


def _compare_stages(profiles: Mapping[int, RankProfile]) -> dict[int, Lateness]:
    """Compare stages of one rank each, whose waiting is known only from their chunks."""
    if not all(BUBBLE in profile.phases for profile in profiles.values()):
        return {}
    stages = {profile.rank: stage for stage, profile in profiles.items()}
    return {
        late.rank: msgspec.structs.replace(late, stage=stages[late.rank])
        for late in _compare(list(profiles.values()))
    }


def stragglers(job: JobSnapshot) -> list[Lateness]:
    """Return the late ranks, the latest first."""
    late = [found for found in lateness(job).values() if found.is_late]
    return sorted(late, key=lambda found: (-found.excess_s, found.rank))


class _Others:
    """The median of all values but one, for each of them, from one sorting."""

    def __init__(self, values: Iterable[float]) -> None:
        self._ordered = sorted(values)

    def middle_without(self, value: float) -> float:
        ordered = self._ordered
        half, is_odd = divmod(len(ordered) - 1, 2)
        # Leaving one out moves what lies above it down by one place.
        upper = ordered[half + (value <= ordered[half])]
        if is_odd:
            return upper
        lower = ordered[half - 1 + (value <= ordered[half - 1])]
        return (lower + upper) / 2


def _compare(peers: Sequence[RankProfile]) -> Iterable[Lateness]:
    times = [peer.own_s for peer in peers]
    own = _Others(times)
    names = [name for name in SPLIT_PHASES if any(name in peer.typical for peer in peers)]
    phases = {name: _Others(peer.typical.get(name, 0.0) for peer in peers) for name in names}
    spread = _spread(times)
    for place, peer in enumerate(peers):
        if len(peers) <= FEW_PEERS:
            spread = _spread(times[:place] + times[place + 1 :])
        yield _judge(peer, own.middle_without(peer.own_s), spread, phases)


def _spread(times: Sequence[float]) -> float:
    """Return the median deviation, scaled."""
    center = middle(times)
    return DEVIATION * middle(abs(time - center) for time in times)


def _judge(
    peer: RankProfile, peers_s: float, spread: float, phases: Mapping[str, _Others]
) -> Lateness:
    excess_s = peer.own_s - peers_s
    typical = {name: peer.typical.get(name, 0.0) for name in phases}
    waits = {name for name in _WAITING if name in phases}
    others = {name: phases[name].middle_without(typical[name]) for name in phases}
    losses = {name: typical[name] - others[name] for name in phases if name not in _WAITING}
    worst = max(losses, key=lambda name: losses[name], default=None)
    if worst is not None and losses[worst] <= max(0.0, PHASE_SHARE * excess_s):
        worst = None
    needed_s = max(
        LATE_AT_LEAST_S, LATE_SHARE * peer.step_s, LATE_DEVIATIONS * max(spread, peer.own_error_s)
    )
    return Lateness(
        rank=peer.rank,
        own_s=peer.own_s,
        peers_s=peers_s,
        step_s=peer.step_s,
        phase=worst,
        phase_s=typical[worst] if worst is not None else 0.0,
        phase_peers_s=others[worst] if worst is not None else 0.0,
        wait_s=sum(typical[name] for name in waits),
        peers_wait_s=sum(others[name] for name in waits),
        is_late=excess_s >= needed_s,
    )


class Balance(msgspec.Struct, frozen=True):
    """A typical step of the job: its ranks together, the late ones left out of the middle."""

    step_s: float
    phases: dict[str, float]
    """Seconds of each phase on a middle rank."""
    transfer_s: float
    """Exposed communication that even the last rank to arrive pays, a step."""
    uneven_s: float
    """Mean time that the ranks wait beyond that: for the last rank of a step."""

    def share(self, *names: str) -> float:
        """Return the share of the step that these phases take."""
        return sum(self.phases.get(name, 0.0) for name in names) / self.step_s


@remember_last
def balance(job: JobSnapshot) -> Balance | None:
    """Return where a typical step goes, or None before there are enough to tell."""
    profiles = [
        profile
        for profile in judged_profiles(job).values()
        if profile.num_batches >= BATCHES_TO_JUDGE
    ]
    if not profiles:
        return None
    late = {found.rank for found in lateness(job).values() if found.is_late}
    normal = [profile for profile in profiles if profile.rank not in late] or profiles
    names = {name for profile in normal for name in profile.phases}
    batches = batches_per_step(job)
    transfer_s, waits_s = (batches * wait_s for wait_s in _waits(profiles))
    return Balance(
        step_s=middle(profile.step_s for profile in normal),
        phases={
            name: middle(profile.phases.get(name, 0.0) for profile in normal) for name in names
        },
        transfer_s=transfer_s,
        uneven_s=max(0.0, waits_s - transfer_s),
    )


def _waits(profiles: list[RankProfile]) -> tuple[float, float]:
    """Return the mean over the batches of the shortest wait of any rank, and of the mean wait.

    Batch by batch, for it may be another rank each time that is waited for.
    """
    common = set(profiles[0].waits).intersection(*(profile.waits for profile in profiles))
    if not common:  # ranks that are too far apart to share a batch
        means = [sum(profile.waits.values()) / len(profile.waits) for profile in profiles]
        return min(means), sum(means) / len(means)
    by_batch = [[profile.waits[index] for profile in profiles] for index in common]
    shortest = sum(map(min, by_batch)) / len(by_batch)
    mean = sum(sum(waits) / len(waits) for waits in by_batch) / len(by_batch)
    return shortest, mean
