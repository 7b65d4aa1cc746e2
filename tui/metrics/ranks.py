"""One row of figures for each rank."""

from typing import Literal

import msgspec

from boltmesh.telemetry.snapshot import RankSnapshot, RankState
from boltmesh.telemetry.stall import recent_step_seconds
from boltmesh.tui.devices import DeviceReading
from boltmesh.tui.metrics.memo import remember_last
from boltmesh.tui.metrics.status import job_stalled_seconds, rates_are_current
from boltmesh.tui.metrics.step_time import RankProfile, batches_per_step, rank_profiles
from boltmesh.tui.metrics.stragglers import Lateness, lateness
from boltmesh.tui.state import State

ShownState = RankState | Literal["stalled", "stopped"]
"""``stalled``: the rank runs, and the job makes no progress. ``stopped``: a signal or a
time limit ended it before its last step."""


class RankRow(msgspec.Struct, frozen=True):
    """``None`` where it is not known."""

    rank: int
    coordinates: dict[str, int]
    host: str
    device: str
    state: ShownState
    phase: str | None
    global_step: int
    behind: int
    """Optimizer steps after the rank that is furthest."""
    step_s: float | None
    """An optimizer step: the mean of the recent ordinary ones; of all before there are any."""
    compute_s: float | None
    """Step time without waits."""
    profile: RankProfile | None
    """An ordinary optimizer step."""
    lateness: Lateness | None
    """Comparison with the ranks that do the same work."""
    loss: float | None
    samples_per_second: float | None
    tokens_per_second: float | None
    utilization_percent: float | None
    """Utilization of the GPU, or of one core by the rank's process."""
    memory_used_bytes: int | None
    """In use on the GPU, or resident in the host's memory."""
    memory_total_bytes: int | None
    """Size of the GPU's memory; None on a CPU: the host's memory is no limit of the rank's own."""
    temperature_celsius: float | None
    power_watts: float | None
    error: str | None

    @property
    def memory_share(self) -> float | None:
        """Used memory as a share of the total; None if either is not known."""
        if self.memory_used_bytes is None or not self.memory_total_bytes:
            return None
        return self.memory_used_bytes / self.memory_total_bytes

    def phase_share(self, *names: str) -> float | None:
        """Return the share of an ordinary step that these phases take together."""
        if self.profile is None:
            return None
        return sum(self.profile.phases.get(name, 0.0) for name in names) / self.profile.step_s


@remember_last
def rank_rows(state: State) -> list[RankRow]:
    """Return the ranks in order, each with the readings of its device."""
    gpus = {device.uuid: device for device in state.devices if device.kind == "gpu"}
    processes = {
        rank: device
        for device in state.devices
        if device.kind == "process"
        for rank in device.ranks
    }
    profiles, late = rank_profiles(state.job), lateness(state.job)
    is_current = rates_are_current(state)
    batches = batches_per_step(state.job)
    furthest = max((rank.global_step for rank in state.job.ranks), default=0)
    return [
        _row(
            rank,
            gpus.get(rank.device_uuid) if rank.device_uuid else None,
            processes.get(rank.rank),
            profiles.get(rank.rank),
            late.get(rank.rank),
            furthest,
            shown_state(rank, state),
            batches=batches,
            is_current=is_current,
        )
        for rank in state.job.ranks
    ]


def shown_state(rank: RankSnapshot, state: State) -> ShownState:
    """Return the rank's state as the screens show it."""
    if rank.is_alive and job_stalled_seconds(state) is not None:
        return "stalled"
    if rank.state in {"finished", "failed"} and state.job.stop_reason is not None:
        return "stopped"
    return rank.state


def _row(
    rank: RankSnapshot,
    gpu: DeviceReading | None,
    process: DeviceReading | None,
    profile: RankProfile | None,
    late: Lateness | None,
    furthest: int,
    shown: ShownState,
    *,
    batches: int,
    is_current: bool,
) -> RankRow:
    is_on_cpu = rank.device_uuid is None and rank.device.startswith("cpu")
    step_s = None if profile is None else profile.step_s
    if profile is None and (batch_s := recent_step_seconds(rank)) is not None:
        step_s = batches * batch_s
    # The GPU of a rank that has ended may be another's by now.
    reading = None if not rank.is_alive else process if is_on_cpu else gpu
    used = None if reading is None else reading.memory_used_bytes
    if used is None:
        # Without a reading from outside, the rank's own newest sample.
        used = rank.memory.host_rss_bytes if is_on_cpu else rank.memory.device_reserved_bytes
    return RankRow(
        rank=rank.rank,
        coordinates=rank.coordinates,
        host=rank.host,
        device=rank.device,
        state=shown,
        phase=rank.phase,
        global_step=rank.global_step,
        behind=furthest - rank.global_step,
        step_s=step_s,
        compute_s=None if profile is None else profile.own_s,
        profile=profile,
        lateness=late,
        loss=next((step.loss for step in reversed(rank.steps) if step.loss is not None), None),
        samples_per_second=rank.samples_per_second if is_current else None,
        tokens_per_second=rank.tokens_per_second if is_current else None,
        utilization_percent=None if reading is None else reading.utilization_percent,
        memory_used_bytes=used,
        memory_total_bytes=(
            None if is_on_cpu or reading is None else reading.memory_total_bytes or None
        ),
        temperature_celsius=None if reading is None else reading.temperature_celsius,
        power_watts=None if reading is None else reading.power_watts,
        error=rank.error,
    )
