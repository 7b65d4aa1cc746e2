"""One row of figures for each rank."""

import msgspec

from boltmesh.telemetry.snapshot import RankSnapshot, RankState
from boltmesh.tui.devices import DeviceReading
from boltmesh.tui.figures.phases import recent_step_seconds
from boltmesh.tui.state import State


class RankRow(msgspec.Struct, frozen=True):
    """``None`` where it is not known."""

    rank: int
    coordinates: dict[str, int]
    device: str
    state: RankState
    phase: str | None
    global_step: int
    step_s: float | None
    loss: float | None
    utilization_percent: float | None
    """Of the GPU, or of one core by the rank's process."""
    memory_used_bytes: int | None
    """Of the GPU, or resident in the host's memory."""
    memory_total_bytes: int | None
    """Of the GPU; None on a CPU, where the host's memory is no limit of the rank's own."""
    error: str | None


def rank_rows(state: State) -> list[RankRow]:
    """Return the ranks in order, each with the readings of its device."""
    gpus = {device.uuid: device for device in state.devices if device.kind == "gpu"}
    processes = {
        rank: device
        for device in state.devices
        if device.kind == "process"
        for rank in device.ranks
    }
    return [
        _row(rank, gpus.get(rank.device_uuid) if rank.device_uuid else None, processes)
        for rank in state.job.ranks
    ]


def _row(
    rank: RankSnapshot, gpu: DeviceReading | None, processes: dict[int, DeviceReading]
) -> RankRow:
    is_on_cpu = rank.device_uuid is None and rank.device.startswith("cpu")
    reading = processes.get(rank.rank) if is_on_cpu else gpu
    used = None if reading is None else reading.memory_used_bytes
    if used is None:
        # Without a reading from outside, what the rank itself noted last.
        used = rank.memory.host_rss_bytes if is_on_cpu else rank.memory.device_reserved_bytes
    return RankRow(
        rank=rank.rank,
        coordinates=rank.coordinates,
        device=rank.device,
        state=rank.state,
        phase=rank.phase,
        global_step=rank.global_step,
        step_s=recent_step_seconds(rank),
        loss=next((step.loss for step in reversed(rank.steps) if step.loss is not None), None),
        utilization_percent=None if reading is None else reading.utilization_percent,
        memory_used_bytes=used,
        memory_total_bytes=None if is_on_cpu or reading is None else reading.memory_total_bytes,
        error=rank.error,
    )
