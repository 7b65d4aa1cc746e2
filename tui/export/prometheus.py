"""A job as Prometheus text: format 0.0.4, base units, one family after the other.

No sample has a time: Prometheus takes the time at which it reads, and node_exporter refuses others.
What is not known has no sample.

Source: https://prometheus.io/docs/practices/naming/
"""

from collections.abc import Iterable, Iterator
from typing import get_args

from boltmesh.telemetry.snapshot import JobSnapshot, JobState, RankSnapshot
from boltmesh.tui.export.prometheus_devices import device_families
from boltmesh.tui.export.prometheus_text import Family, Sample, counter, family_text, gauge
from boltmesh.tui.sources.live import Observation

RECENT_STEPS = 20
"""Batches whose mean is a rank's step and phase time."""


def prometheus_text(seen: Observation) -> str:
    """Return the whole document; it ends with a line feed."""
    return "".join(family_text(family, {"job": seen.job.id}) for family in families(seen))


def families(seen: Observation) -> Iterator[Family]:
    """Yield every metric, those without a sample too."""
    yield from _of_job(seen.job)
    yield from _of_metrics(seen.job)
    yield from _of_ranks(seen.job)
    yield from _of_communication(seen.job)
    yield from _of_memory(seen.job)
    yield from _of_offload(seen.job)
    yield from device_families(seen.devices)


def _of_job(job: JobSnapshot) -> Iterator[Family]:
    about = {"name": job.name, "strategy": job.strategy, "recipe": job.recipe or ""}
    sizes = {
        axis: size for axis, size in job.mesh.items() if axis in {"pipeline", "data", "tensor"}
    }
    yield gauge("job_info", "What the job is; always 1.", [({**about, **sizes}, 1)])
    states = [({"state": state}, int(state == job.state)) for state in get_args(JobState)]
    yield gauge("job_state", "1 for the state that the job is in, 0 for the others.", states)
    yield gauge("job_start_time_seconds", "When the job began, since 1970.", [({}, job.started)])
    yield gauge(
        "job_updated_time_seconds", "When the job last recorded anything.", [({}, job.updated)]
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
    rates = {"samples": job.samples_per_second, "tokens": job.tokens_per_second}
    for unit, rate in rates.items():
        yield gauge(f"job_{unit}_per_second", f"{unit.title()} a second, recently.", [({}, rate)])


def _of_ranks(job: JobSnapshot) -> Iterator[Family]:
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
    alive = {"starting", "running"}
    yield gauge(
        "rank_up", "Whether a rank runs.", [(_of(rank), int(rank.state in alive)) for rank in ranks]
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
        "Samples a second, recently.",
        [(_of(rank), rank.samples_per_second) for rank in ranks],
    )
    recent = f"mean of the newest {RECENT_STEPS} batches."
    yield gauge(
        "rank_batch_seconds",
        f"Time of a batch, {recent}",
        [
            (_of(rank), _mean([step.seconds for step in rank.steps[-RECENT_STEPS:]]))
            for rank in ranks
        ],
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
        "What the strategy says that one optimizer step moves on one rank.",
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


def _mean(values: list[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _summed(samples: Iterable[tuple[dict[str, str | int], float]]) -> list[Sample]:
    """Add up what has the same labels, which may stand only once in a family."""
    sums: dict[tuple[tuple[str, str | int], ...], float] = {}
    for labels, value in samples:
        key = tuple(labels.items())
        sums[key] = sums.get(key, 0.0) + value
    return [(dict(key), value) for key, value in sums.items()]
