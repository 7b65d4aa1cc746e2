"""What the ranks wait for in a collective: the transfer itself, or whoever comes last."""

import msgspec

from boltmesh.telemetry.snapshot import JobSnapshot
from boltmesh.tui.metrics.memo import remember_last
from boltmesh.tui.metrics.step_time import RankProfile, middle, rank_profiles
from boltmesh.tui.metrics.stragglers import STEPS_TO_JUDGE, lateness


class Balance(msgspec.Struct, frozen=True):
    """A typical step of the job: its ranks together, the late ones left out of the middle."""

    step_s: float
    phases: dict[str, float]
    """Seconds of each phase on a middle rank."""
    transfer_s: float
    """Exposed communication that even the last rank to arrive pays, a step."""
    uneven_s: float
    """What the ranks wait beyond that, on average: for whoever comes last in a step."""

    def share(self, *names: str) -> float:
        """Return the share of the step that these phases take."""
        return sum(self.phases.get(name, 0.0) for name in names) / self.step_s


@remember_last
def balance(job: JobSnapshot) -> Balance | None:
    """Return where a typical step goes, or None before there are enough to tell."""
    profiles = [
        profile for profile in rank_profiles(job).values() if profile.num_steps >= STEPS_TO_JUDGE
    ]
    if not profiles:
        return None
    late = {found.rank for found in lateness(job).values() if found.is_late}
    normal = [profile for profile in profiles if profile.rank not in late] or profiles
    names = {name for profile in normal for name in profile.phases}
    transfer_s, waits_s = _waits(profiles)
    return Balance(
        step_s=middle(profile.step_s for profile in normal),
        phases={
            name: middle(profile.phases.get(name, 0.0) for profile in normal) for name in names
        },
        transfer_s=transfer_s,
        uneven_s=max(0.0, waits_s - transfer_s),
    )


def _waits(profiles: list[RankProfile]) -> tuple[float, float]:
    """Return the mean over the steps of the shortest wait of any rank, and of the mean wait.

    Step by step, for it may be another rank each time that is waited for.
    """
    common = set(profiles[0].waits).intersection(*(profile.waits for profile in profiles))
    if not common:  # ranks that are too far apart to share a step
        means = [profile.phases.get("communication", 0.0) for profile in profiles]
        return min(means), sum(means) / len(means)
    by_step = [[profile.waits[index] for profile in profiles] for index in common]
    shortest = sum(map(min, by_step)) / len(by_step)
    mean = sum(sum(waits) / len(waits) for waits in by_step) / len(by_step)
    return shortest, mean
