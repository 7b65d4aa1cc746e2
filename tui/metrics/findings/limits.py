"""Findings about limits and predictions: memory that is nearly full, bytes that differ."""

import math
from collections import defaultdict
from collections.abc import Iterable

from boltmesh.telemetry.snapshot import JobSnapshot, RankSnapshot, operator_name
from boltmesh.tui import units
from boltmesh.tui.devices import DeviceReading
from boltmesh.tui.metrics.findings.finding import KEPT, Finding
from boltmesh.tui.metrics.step_time import batches_per_step
from boltmesh.tui.metrics.traffic import TrafficRow, traffic_rows
from boltmesh.tui.state import State

DEVICE_NEARLY_FULL = 0.95
"""Share of a GPU's memory. One more workspace or a longer batch takes the rest at once."""

HOST_NEARLY_FULL = 0.9
"""Share of a host's memory that the job alone uses: the kernel needs some, and kills at none."""


HOST_BUSY = 0.95
OTHERS_BUSY = 0.2
"""Shares of a host's CPUs: in use in all, and in use by other processes than the ranks. Above both,
the times of ranks on CPUs depend more on the other processes than on the job."""


def find_busy_host(state: State) -> Finding | None:
    """Say that other processes take the CPUs on which the ranks compute."""
    if state.job.state != "running" or not _computes_on_cpu(state.job):
        return None
    kept = KEPT if "host" in state.standing else 1.0
    for host in state.devices:
        if host.kind != "host" or host.utilization_percent is None or not host.num_cores:
            continue
        used = host.utilization_percent / 100
        ranks = sum(
            (each.utilization_percent or 0.0) / 100 / host.num_cores
            for each in state.devices
            if each.kind == "process" and set(each.ranks) <= set(host.ranks)
        )
        others = max(0.0, used - ranks)
        if used < kept * HOST_BUSY or others < kept * OTHERS_BUSY:
            continue
        return Finding(
            kind="host",
            severity="warn",
            headline=f"the CPUs of {host.name} are full: {used:.0%} of {host.num_cores} cores",
            evidence=(
                f"ranks {min(ranks, used):.0%}",
                f"other processes {others:.0%}",
                "times of the ranks vary with them",
            ),
            advice="stop or move the other processes; loader workers count as such",
            ranks=host.ranks,
        )
    return None


def _computes_on_cpu(job: JobSnapshot) -> bool:
    """Say whether all ranks compute on CPUs."""
    return all(rank.device.startswith("cpu") for rank in job.ranks if rank.device)


def find_memory(state: State) -> Finding | None:
    """Name the device or the host that is closest to its limit."""
    if state.job.state != "running":
        return None
    return _full_device(state) or _full_host(state)


def _full_device(state: State) -> Finding | None:
    ranks = {rank.rank: rank for rank in state.job.ranks}
    full = [
        (need / total, need, total, reading)
        for reading in state.devices
        if reading.kind == "gpu"
        and (total := reading.memory_total_bytes)
        and (need := needed_bytes(reading, ranks)) is not None
        and need / total >= DEVICE_NEARLY_FULL
    ]
    if not full:
        return None
    share, need, total, worst = max(full, key=lambda item: item[0])
    which = tuple(sorted({rank for _, _, _, reading in full for rank in reading.ranks}))
    return Finding(
        kind="memory",
        severity="warn",
        headline=f"memory near its limit: {units.ranks(worst.ranks)} at {share:.0%}",
        evidence=(
            f"{units.memory(need)} of {units.memory(total)} on {worst.name}",
            "without what torch's cache could give back",
            *([f"{len(full)} devices are as full"] if len(full) > 1 else []),
        ),
        advice="use a smaller batch on each rank, activation checkpointing, or a strategy that "
        "shards more",
        ranks=which,
    )


def needed_bytes(reading: DeviceReading, ranks: dict[int, RankSnapshot]) -> int | None:
    """Return the GPU memory in use without the unused part of torch's allocators.

    The allocator keeps what it has got, so a device may look full for days with room to spare. What
    a rank had given out at most may come again, and counts as used.
    """
    used = reading.memory_used_bytes
    if used is None:
        return None
    for number in reading.ranks:
        rank = ranks.get(number)
        if rank is None:
            continue
        held, peak = rank.memory.device_reserved_bytes, rank.memory.device_peak_bytes
        if held is not None and peak is not None:
            used -= max(0, held - peak)
    return used


def _full_host(state: State) -> Finding | None:
    hosts: dict[str, list[DeviceReading]] = defaultdict(list)
    for reading in state.devices:
        if reading.kind == "process":
            hosts[reading.name].append(reading)
    for host, processes in hosts.items():
        total = max((reading.memory_total_bytes or 0 for reading in processes), default=0)
        used = sum(reading.memory_used_bytes or 0 for reading in processes)
        if total and used / total >= HOST_NEARLY_FULL:
            return Finding(
                kind="memory",
                severity="warn",
                headline=f"host memory near its limit: the ranks on {host} hold {used / total:.0%}",
                evidence=(f"{units.memory(used)} of {units.memory(total)} resident",),
                advice="use fewer loader workers or ranks on this host, or offload less to it",
                ranks=_ranks_of(processes),
            )
    return None


def _ranks_of(readings: Iterable[DeviceReading]) -> tuple[int, ...]:
    return tuple(sorted({rank for reading in readings for rank in reading.ranks}))


def find_traffic(state: State) -> Finding | None:
    """Report bytes that differ from the strategy's expectation; the largest difference."""
    job = state.job
    if job.state != "running":
        return None
    wrong = [row for row in traffic_rows(job) if row.is_wrong]
    if not wrong:
        return None
    worst = max(wrong, key=_difference)
    name = operator_name(worst.operator)
    ratio = worst.ratio
    if ratio is None:
        headline = f"{worst.axis} axis: {name} does not run as the strategy expects"
    else:
        digits = 1 if abs(ratio - 1) >= 0.1 else 3
        headline = f"{worst.axis} axis moves {ratio:.{digits}f}x the expected bytes"
    if worst.reason is not None:
        headline += f": {worst.reason}"
    formula = f": {worst.why}" if worst.why else ""
    return Finding(
        kind="traffic",
        severity="warn",
        headline=headline,
        evidence=(
            f"{name} {units.traffic(worst.payload_bytes)} a step",
            f"expected {units.traffic(worst.expected_bytes)}{formula}",
            *([f"{len(wrong)} operators differ"] if len(wrong) > 1 else []),
        ),
        advice=_mend_traffic(job, ratio),
    )


def _difference(row: TrafficRow) -> float:
    return abs((row.payload_bytes or 0.0) - (row.expected_bytes or 0.0))


def _mend_traffic(job: JobSnapshot, ratio: float | None) -> str:
    batches = batches_per_step(job)
    if not ratio:
        return "ranks that do not reduce train apart from each other: compare their losses"
    if batches > 1 and math.isfinite(ratio) and round(ratio) == batches:
        return "let the strategy skip the reduction until the last batch of a step"
    if ratio > 1:
        return "look for a second reduction or gather of the same parameters in the model"
    return "look for parameters that take no part in the loss, or for compressed gradients"
