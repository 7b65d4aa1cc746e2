"""A job as families of metrics, in base units.

No sample has a time: Prometheus takes the time at which it reads, and node_exporter refuses others.
What is not known has no sample.

Source: https://prometheus.io/docs/practices/naming/
"""

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Final, get_args

from boltmesh.axes import AXES
from boltmesh.telemetry.snapshot import JobSnapshot, JobState, RankSnapshot
from boltmesh.telemetry.stall import RECENT_STEPS
from boltmesh.tui.alerts.watch import AlertWatch
from boltmesh.tui.devices import DeviceReading
from boltmesh.tui.devices.reading import NO_LIMIT
from boltmesh.tui.export.exposition import Family, Form, Labels, Sample, counter, gauge, text_of
from boltmesh.tui.metrics.experts import layer_loads
from boltmesh.tui.metrics.figures import figures
from boltmesh.tui.metrics.findings.diagnose import diagnose
from boltmesh.tui.metrics.findings.finding import Kind
from boltmesh.tui.metrics.status import job_stalled_seconds, rates_are_current
from boltmesh.tui.sources.live import Observation
from boltmesh.tui.state import State, fold
from boltmesh.tui.units import mean


def device_families(devices: Iterable[DeviceReading]) -> Iterator[Family]:
    """Yield the metrics of one reading of the devices."""
    read = list(devices)
    gpus = [(_labels(each), each) for each in read if each.kind == "gpu"]
    for name, text, value in _GPU_GAUGES:
        yield gauge(f"device_{name}", text, [(labels, value(each)) for labels, each in gpus])
    for name, text, value in _GPU_COUNTERS:
        yield counter(f"device_{name}", text, [(labels, value(each)) for labels, each in gpus])
    for kind, gauges in (("process", _PROCESS_GAUGES), ("host", _HOST_GAUGES)):
        found = [(_labels(each), each) for each in read if each.kind == kind]
        for name, text, value in gauges:
            yield gauge(f"{kind}_{name}", text, [(labels, value(each)) for labels, each in found])


def _labels(device: DeviceReading) -> Labels:
    if device.kind == "gpu":
        return {"device": device.uuid or device.name}
    if device.kind == "host":
        return {"host": device.name}
    return {"rank": min(device.ranks, default=-1), "host": device.name}


def _ratio(field: str, device: DeviceReading) -> float | None:
    percent: float | None = getattr(device, field)
    return None if percent is None else percent / 100


def _million(megahertz: int | None) -> float | None:
    return None if megahertz is None else megahertz * 1e6


def _is_throttled(reasons: tuple[str, ...] | None) -> int | None:
    return None if reasons is None else int(not set(reasons).issubset(NO_LIMIT))


_Gauges = tuple[tuple[str, str, Callable[[DeviceReading], float | None]], ...]

_GPU_RATIOS: Final = (
    ("utilization", "Share of the last sampling period in which any kernel ran."),
    ("memory_utilization", "Share of that period in which the memory was read or written."),
    ("sm_active", "Mean share of the SMs that were busy."),
    ("sm_occupancy", "Resident warps over those that the SMs have room for."),
    ("tensor_active", "Share of the time in which the SMs computed on tensor cores."),
    ("memory_bandwidth", "Bandwidth of the memory that was used, of its peak."),
)


_GPU_GAUGES: Final[_Gauges] = (
    *((f"{name}_ratio", text, partial(_ratio, f"{name}_percent")) for name, text in _GPU_RATIOS),
    (
        "memory_used_bytes",
        "Memory in use by all processes on a GPU.",
        lambda each: each.memory_used_bytes,
    ),
    ("memory_size_bytes", "Memory of a GPU.", lambda each: each.memory_total_bytes),
    ("power_watts", "Power that a GPU draws.", lambda each: each.power_watts),
    ("power_limit_watts", "Power that it may draw.", lambda each: each.power_limit_watts),
    ("temperature_celsius", "Temperature of a GPU.", lambda each: each.temperature_celsius),
    (
        "temperature_limit_celsius",
        "Temperature at which it slows down.",
        lambda each: each.temperature_limit_celsius,
    ),
    ("sm_clock_hertz", "Clock of its processors.", lambda each: _million(each.sm_clock_mhz)),
    ("memory_clock_hertz", "Clock of its memory.", lambda each: _million(each.memory_clock_mhz)),
    (
        "is_throttled",
        "Whether anything but idleness holds its clocks down.",
        lambda each: _is_throttled(each.throttle_reasons),
    ),
    (
        "nvlink_sent_bytes_per_second",
        "Sent over all NVLinks since the last look.",
        lambda each: each.nvlink_sent_bytes_per_second,
    ),
    (
        "nvlink_received_bytes_per_second",
        "Received over all NVLinks since the last look.",
        lambda each: each.nvlink_received_bytes_per_second,
    ),
    (
        "pcie_sent_bytes_per_second",
        "Sent over PCIe, recently.",
        lambda each: each.pcie_sent_bytes_per_second,
    ),
    (
        "pcie_received_bytes_per_second",
        "Received over PCIe, recently.",
        lambda each: each.pcie_received_bytes_per_second,
    ),
)
_GPU_COUNTERS: Final[_Gauges] = (
    (
        "ecc_corrected_errors",
        "Corrected memory errors since the driver was loaded.",
        lambda each: each.ecc_corrected_errors,
    ),
    (
        "ecc_uncorrected_errors",
        "Uncorrected memory errors since the driver was loaded.",
        lambda each: each.ecc_uncorrected_errors,
    ),
)
_PROCESS_GAUGES: Final[_Gauges] = (
    (
        "cpu_ratio",
        "CPU time of a rank's process since the last look; 1 is one core.",
        partial(_ratio, "utilization_percent"),
    ),
    (
        "resident_memory_bytes",
        "Resident memory of a rank's process.",
        lambda each: each.memory_used_bytes,
    ),
    ("threads", "Threads of a rank's process.", lambda each: each.num_threads),
    (
        "disk_read_bytes_per_second",
        "Rate at which a rank's process reads from disks.",
        lambda each: each.disk_read_bytes_per_second,
    ),
    (
        "disk_written_bytes_per_second",
        "Rate at which a rank's process writes to disks.",
        lambda each: each.disk_written_bytes_per_second,
    ),
)
_HOST_GAUGES: Final[_Gauges] = (
    (
        "cpu_ratio",
        "Mean use of a host's cores since the last look.",
        partial(_ratio, "utilization_percent"),
    ),
    ("cores", "Cores that programs may use.", lambda each: each.num_cores),
    ("memory_used_bytes", "Memory in use on a host.", lambda each: each.memory_used_bytes),
    ("memory_size_bytes", "Memory of a host.", lambda each: each.memory_total_bytes),
    ("swap_used_bytes", "Swap in use on a host.", lambda each: each.swap_used_bytes),
    (
        "run_disk_free_bytes",
        "Free space on the disk of the run directory.",
        lambda each: each.disk_free_bytes,
    ),
)


_ALERTS: Final = ("loss", "memory", "temperature", "stall", "failed")
"""Kinds of alerts that one look can raise; a fall of throughput needs many."""


def prometheus_text(seen: Observation, form: Form = "prometheus") -> str:
    """Return the whole document; it ends with a line feed."""
    return text_of(families(seen), {"job": seen.job.id}, form)


def families(seen: Observation) -> Iterator[Family]:
    """Yield every metric, those without a sample too."""
    state = fold(None, seen)
    yield from _of_job(seen.job, job_stalled_seconds(state))
    yield from _of_metrics(seen.job)
    yield from _of_figures(state)
    yield from _of_ranks(seen.job, is_current=rates_are_current(state))
    yield from _of_experts(seen.job)
    yield from _of_communication(seen.job)
    yield from _of_memory(seen.job)
    yield from _of_offload(seen.job)
    yield from device_families(seen.devices)


def _of_job(job: JobSnapshot, stalled_s: float | None) -> Iterator[Family]:
    about = {"name": job.name, "strategy": job.strategy, "recipe": job.recipe or ""}
    sizes = {axis: size for axis, size in job.mesh.items() if axis in AXES}
    yield gauge("job_info", "Properties of the job; always 1.", [({**about, **sizes}, 1)])
    states = [({"state": state}, int(state == job.state)) for state in get_args(JobState)]
    yield gauge("job_state", "1 for the state that the job is in, 0 for the others.", states)
    yield gauge("job_start_time_seconds", "When the job began, since 1970.", [({}, job.started)])
    yield gauge(
        "job_updated_time_seconds", "When the job last recorded anything.", [({}, job.updated)]
    )
    yield gauge(
        "job_stalled_seconds",
        "How long a running job has made no progress; 0 while it is not stalled.",
        [({}, None if job.state != "running" else stalled_s or 0.0)],
    )
    yield gauge(
        "job_stopped",
        "Whether a signal or a time limit ended the job before its last step.",
        [({}, int(job.stop_reason is not None))],
    )
    yield gauge("job_ranks", "Ranks of the whole job.", [({}, job.world_size)])
    yield gauge("job_epoch", "Epoch of the furthest rank.", [({}, job.epoch)])
    yield gauge("job_max_steps", "Optimizer steps that it will do.", [({}, job.max_steps)])
    yield counter("job_steps", "Optimizer steps of the furthest rank.", [({}, job.global_step)])


def _of_metrics(job: JobSnapshot) -> Iterator[Family]:
    yield gauge(
        "logged_metric",
        "Newest value of what the training logs.",
        [({"metric": name}, value) for name, value in job.metrics.items()],
    )


def _of_figures(state: State) -> Iterator[Family]:
    found = figures(state)
    for unit, figure in (("samples", found.samples_per_s), ("tokens", found.tokens_per_s)):
        text = f"{unit.title()} a second, recently; not of a job that is stalled or has ended."
        yield gauge(f"job_{unit}_per_second", text, [({}, figure.value)])
    for name, text, figure in (
        ("bubble_ratio", "Idle share of the pipeline's ranks.", found.bubble_ratio),
        ("mfu_ratio", "Model FLOPs over the peak of the devices.", found.mfu),
        ("hfu_ratio", "Hardware FLOPs over the peak of the devices.", found.hfu),
        ("step_seconds", "Time of an optimizer step.", found.step_s),
        (
            "exposed_communication_ratio",
            "Share of a step that waits for communication.",
            found.exposed_communication,
        ),
    ):
        yield gauge(f"job_{name}", f"{text} See figures in docs/json.md.", [({}, figure.value)])
    for name, text, figure in (
        ("model", "Model FLOPs", found.model_tflops),
        ("hardware", "Hardware FLOPs, which have recomputed activations,", found.hardware_tflops),
    ):
        value = None if figure.value is None else figure.value * 1e12
        yield gauge(f"job_{name}_flops_per_second", f"{text} of all ranks a second.", [({}, value)])
    kinds = {finding.kind for finding in diagnose(state)}
    yield gauge(
        "job_finding",
        "1 for each kind of finding that holds, 0 for the others; see docs/diagnosis.md.",
        [({"kind": kind}, int(kind in kinds)) for kind in get_args(Kind)],
    )
    raised = {alert.kind for alert in AlertWatch().update(state)}
    if state.job.state in {"failed", "crashed"}:
        raised.add("failed")  # the watch passes over a job that had ended before its first look
    yield gauge(
        "job_alert",
        "1 for each kind of alert whose condition holds, 0 for the others; see docs/alerts.md.",
        [({"kind": kind}, int(kind in raised)) for kind in _ALERTS],
    )


def _of_experts(job: JobSnapshot) -> Iterator[Family]:
    samples: list[Sample] = []
    for load in layer_loads(job):
        samples += [({"module": load.module, "expert": at}, n) for at, n in enumerate(load.rows)]
    yield counter("expert_rows", "Rows that the router has sent to an expert.", samples)
    samples = [({"module": load.module}, load.dropped) for load in layer_loads(job)]
    yield counter("expert_dropped_rows", "Rows that an expert had no place for.", samples)
    text = "Rows of the expert with most over the mean, in the last seconds."
    samples = [({"module": load.module}, load.imbalance) for load in layer_loads(job)]
    yield gauge("expert_imbalance_ratio", text, samples)


def _of_ranks(job: JobSnapshot, *, is_current: bool) -> Iterator[Family]:
    ranks = job.ranks
    yield gauge(
        "rank_info",
        "Where a rank runs; always 1.",
        [
            (
                {
                    "rank": rank.rank,
                    "host": rank.host,
                    "device": rank.device,
                    "uuid": rank.device_uuid or "",
                },
                1,
            )
            for rank in ranks
        ],
    )
    yield gauge(
        "rank_up", "Whether a rank runs.", [(_of(rank), int(rank.is_alive)) for rank in ranks]
    )
    yield gauge(
        "rank_seen_time_seconds",
        "When a rank last recorded anything.",
        [(_of(rank), rank.last_seen or None) for rank in ranks],
    )
    yield counter(
        "rank_steps", "Optimizer steps.", [(_of(rank), rank.global_step) for rank in ranks]
    )
    yield counter(
        "rank_skipped_records",
        "Records of a rank's file that could not be read.",
        [(_of(rank), rank.skipped_records) for rank in ranks],
    )
    yield gauge(
        "rank_samples_per_second",
        "Samples a second, recently; not of a job that is stalled or has ended.",
        [(_of(rank), rank.samples_per_second if is_current else None) for rank in ranks],
    )
    recent = f"mean of the newest {RECENT_STEPS} batches."
    yield gauge(
        "rank_batch_seconds",
        f"Time of a batch, {recent}",
        [(_of(rank), mean(step.seconds for step in rank.steps[-RECENT_STEPS:])) for rank in ranks],
    )
    yield gauge(
        "rank_phase_seconds",
        f"Time of one phase in a batch, {recent}",
        [sample for rank in ranks for sample in _phases(rank)],
    )


def _of_communication(job: JobSnapshot) -> Iterator[Family]:
    totals = [
        ({**_of(rank), "axis": each.axis, "group": each.group, "operator": each.operator}, each)
        for rank in job.ranks
        for each in rank.collectives
    ]
    yield counter(
        "collective_calls",
        "Calls of a collective operator.",
        [(labels, each.calls) for labels, each in totals],
    )
    yield counter(
        "collective_payload_bytes",
        "Payload of a collective operator.",
        [(labels, each.payload_bytes) for labels, each in totals],
    )
    yield gauge(
        "collective_step_payload_bytes",
        "Payload in one optimizer step, recently.",
        [(labels, each.bytes_per_step) for labels, each in totals],
    )
    yield gauge(
        "collective_step_seconds",
        "Time between enqueue and completion in one optimizer step, recently.",
        [(labels, each.seconds_per_step) for labels, each in totals],
    )
    yield gauge(
        "collective_expected_step_payload_bytes",
        "Payload of one optimizer step on one rank, as the strategy expects it.",
        _summed(
            ({"axis": each.axis, "operator": each.operator}, each.payload_bytes)
            for each in job.expected
        ),
    )
    peers = [
        ({**_of(rank), "axis": each.axis, "operator": each.operator, "peer": each.peer}, each)
        for rank in job.ranks
        for each in rank.peers
    ]
    yield counter(
        "peer_calls",
        "Point-to-point calls with one other rank.",
        [(labels, each.calls) for labels, each in peers],
    )
    yield counter(
        "peer_payload_bytes",
        "Payload sent to, or received from, one other rank.",
        [(labels, each.payload_bytes) for labels, each in peers],
    )


def _of_memory(job: JobSnapshot) -> Iterator[Family]:
    yield gauge(
        "rank_memory_bytes",
        "Memory as the rank sampled it: resident on the host; on the device allocated and "
        "reserved by torch, and the highest allocated.",
        [
            ({**_of(rank), "kind": kind}, value)
            for rank in job.ranks
            for kind, value in (
                ("host_resident", rank.memory.host_rss_bytes),
                ("device_allocated", rank.memory.device_allocated_bytes),
                ("device_reserved", rank.memory.device_reserved_bytes),
                ("device_peak", rank.memory.device_peak_bytes),
            )
        ],
    )
    for which in ("measured", "predicted"):
        yield gauge(
            f"rank_memory_{which}_bytes",
            f"Memory by what it is for, {which}.",
            [
                (
                    {**_of(rank), "kind": each.kind, "place": each.place},
                    getattr(each, f"{which}_bytes"),
                )
                for rank in job.ranks
                for each in rank.memory_kinds
            ],
        )


def _of_offload(job: JobSnapshot) -> Iterator[Family]:
    moved = [
        ({**_of(rank), "place": each.place, "direction": each.direction}, each)
        for rank in job.ranks
        for each in rank.offload
    ]
    yield counter(
        "offload_transfers",
        "Transfers between a rank's device and its host, or a disk.",
        [(labels, each.calls) for labels, each in moved],
    )
    yield counter(
        "offload_bytes",
        "Bytes moved between a rank's device and its host, or a disk.",
        [(labels, each.moved_bytes) for labels, each in moved],
    )
    yield gauge(
        "offload_bytes_per_second",
        "Recent bandwidth, over the time in which anything moves.",
        [(labels, each.bytes_per_second) for labels, each in moved],
    )
    yield gauge(
        "offload_seconds_per_step",
        "Time of a recent step in which anything moves.",
        [(labels, each.seconds_per_step) for labels, each in moved],
    )


def _of(rank: RankSnapshot) -> dict[str, str | int]:
    return {"rank": rank.rank}


def _phases(rank: RankSnapshot) -> Iterator[Sample]:
    steps = rank.steps[-RECENT_STEPS:]
    sums: dict[str, float] = {}
    for step in steps:
        for phase in step.phases:
            sums[phase.name] = sums.get(phase.name, 0.0) + phase.seconds
    for name, seconds in sums.items():
        yield {**_of(rank), "phase": name}, seconds / len(steps)


def _summed(samples: Iterable[tuple[dict[str, str | int], float]]) -> list[Sample]:
    """Add up samples with equal labels, which may appear only once in a family."""
    sums: dict[tuple[tuple[str, str | int], ...], float] = {}
    for labels, value in samples:
        key = tuple(labels.items())
        sums[key] = sums.get(key, 0.0) + value
    return [(dict(key), value) for key, value in sums.items()]
