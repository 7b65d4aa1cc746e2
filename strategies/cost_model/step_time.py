"""Least time of a step on a machine with measured speeds.

At best, computation, communication, steps on the host and disk transfers overlap completely, so the
slowest of them is a lower bound of the step's time. Without a measured speed there is no
prediction.

Bytes per parameter of a step on the host: 4 come in, Adam reads four tensors and writes three, 4 go
out (ZeRO-Offload's count without its casts, which run on the device here).
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from boltmesh.errors import ConfigError
from boltmesh.strategies.cost_model.model import Bytes, JobShape, ModelShape, ShardingLayout
from boltmesh.strategies.cost_model.offload import FP32, offloaded_state, parameter_copies
from boltmesh.strategies.cost_model.traffic import estimate_traffic

GIGA = 1e9


@dataclass(frozen=True)
class Machine:
    """Measured speeds and sizes of one rank; None if unknown."""

    device_gib: float | None = None
    """Available memory of the device."""
    host_gib: float | None = None
    """Host memory available to a rank."""
    disk_gib: float | None = None
    """Free space on the disk for a rank."""
    device_tflops: float | None = None
    """Speed of matrix products of the model's sizes and precision."""
    network_gb_s: float | None = None
    """Bytes sent to other ranks while receiving as many, in 10^9 per second."""
    link_gb_s: float | None = None
    """``network_gb_s`` for ranks of the same node, if it differs."""
    collective_us: float | None = None
    """Time of a collective of a few bytes."""
    memory_gb_s: float | None = None
    """Bytes read and written in the device's memory by elementwise operators, 10^9 per second."""
    operator_us: float | None = None
    """Time of an operator of a few elements."""
    step_ms: float | None = None
    """Time of a step apart from operators and collectives."""
    bus_gb_s: float | None = None
    """Bytes copied between device and host in one direction, 10^9 per second."""
    host_gb_s: float | None = None
    """Bytes read and written in host memory by Adam, 10^9 per second."""
    disk_read_gb_s: float | None = None
    disk_write_gb_s: float | None = None
    ranks_per_core: float | None = None
    """Ranks on the CPU per core, if there are more ranks than cores."""
    allreduce_s: Mapping[int, Mapping[int, float]] | None = None
    """Seconds of an all-reduce, by number of ranks and by bytes of the message."""

    @classmethod
    def of(cls, given: Mapping[str, Any], *, source: str) -> "Machine":
        """Read measured numbers from a mapping.

        Raises:
            ConfigError: If a key is unknown, or a value is no positive number.
        """
        known = [each.name for each in fields(cls)]
        given = dict(given)
        table = _table_of(given.pop("allreduce_s", None), source)
        for key, value in given.items():
            if key not in known:
                raise ConfigError(f"{source}: unknown key '{key}'. Use {', '.join(known)}.")
            if isinstance(value, bool) or not isinstance(value, (int, float)) or value <= 0:
                raise ConfigError(
                    f"{source}: {key}={value} is no measured number. Write one above 0, or leave "
                    f"the key out."
                )
        numbers = {str(key): float(value) for key, value in given.items()}
        return cls(**numbers, allreduce_s=table)

    def allreduce_seconds(self, ranks: int, num_bytes: float) -> float | None:
        """Return the time of an all-reduce, from measurements of groups of this size.

        Between two measured sizes, and above the largest one, it is on the line through the two
        nearest.

        Returns:
            Seconds; None if no group of so many ranks was measured.
        """
        table = (self.allreduce_s or {}).get(ranks)
        if table is None:
            return None
        sizes = sorted(table)
        if num_bytes <= sizes[0]:
            return table[sizes[0]]
        above = next((at for at, each in enumerate(sizes) if each >= num_bytes), len(sizes) - 1)
        low, high = sizes[above - 1], sizes[above]
        slope = max(0.0, table[high] - table[low]) / (high - low)
        return table[low] + slope * (num_bytes - low)

    def with_faster_links(self, factor: float) -> "Machine":
        """Return the machine with ``factor`` times the bandwidth of links, and equal latencies."""
        table = None
        if self.allreduce_s is not None:
            table = {
                ranks: {
                    size: least + (seconds - least) / factor for size, seconds in of_group.items()
                }
                for ranks, of_group in self.allreduce_s.items()
                for least in (min(of_group.values()),)
            }
        rates = {
            name: None if (rate := getattr(self, name)) is None else factor * rate
            for name in ("network_gb_s", "link_gb_s")
        }
        return replace(self, allreduce_s=table, **rates)

    def size_of(self, place: str) -> float | None:
        """Return the bytes available in a place, None if unknown."""
        gib: float | None = getattr(self, f"{place}_gib")
        return None if gib is None else gib * 2**30

    def places_too_small_for(self, needed: Bytes) -> tuple[str, ...]:
        """Return the places that are known to be smaller than ``needed``."""
        return tuple(
            place
            for place, num_bytes in needed.items()
            if (room := self.size_of(place)) is not None and num_bytes > room
        )


def _table_of(given: Any, source: str) -> Mapping[int, Mapping[int, float]] | None:
    """Return seconds by ranks and bytes, checked.

    Raises:
        ConfigError: If it is no such table, or has fewer than two sizes of a group.
    """
    if given is None:
        return None
    try:
        table = {
            int(ranks): {int(size): float(seconds) for size, seconds in of_group.items()}
            for ranks, of_group in given.items()
        }
    except (AttributeError, TypeError, ValueError):
        table = {}
    if not table or any(
        len(of_group) < 2 or min(of_group.values()) <= 0 for of_group in table.values()
    ):
        raise ConfigError(
            f"{source}: allreduce_s has no measured numbers. Write seconds by ranks and bytes, at "
            f"least two sizes of each group, as in {{2: {{4: 2.0e-5, 1048576: 8.0e-5}}}}, or leave "
            f"the key out."
        )
    return table


@dataclass(frozen=True)
class StepTime:
    """Seconds of each part of a step; None if a speed is missing."""

    computing_s: float | None
    network_s: float | None
    bus_s: float | None
    host_s: float | None
    disk_s: float | None

    @property
    def least_s(self) -> float | None:
        """Time of the slowest part, a lower bound of the step; None unless all are known."""
        parts = [getattr(self, each.name) for each in fields(self)]
        return None if any(each is None for each in parts) else max(parts)

    @property
    def slowest(self) -> str | None:
        """Name of the slowest part."""
        if self.least_s is None:
            return None
        names = {each.name: getattr(self, each.name) for each in fields(self)}
        return max(names, key=lambda name: names[name]).removesuffix("_s")


def estimate_step_time(
    model: ModelShape, sharing: ShardingLayout, job: JobShape, machine: Machine
) -> StepTime:
    """Return the least time of each part."""
    model = model.in_tiles(sharing.tile_bytes)
    flops = model.step_flops(job.num_microbatches)
    sent = sum(each.wire_bytes for each in estimate_traffic(model, sharing, job))
    moved = _moved(model, sharing, job)
    reading = _seconds(moved.read, machine.disk_read_gb_s)
    writing = _seconds(moved.written, machine.disk_write_gb_s)
    return StepTime(
        computing_s=None if flops is None else _seconds(flops / 1e3, machine.device_tflops),
        network_s=_seconds(sent, machine.network_gb_s),
        bus_s=_seconds(0 if job.is_on_host else max(moved.up, moved.down), machine.bus_gb_s),
        host_s=_seconds(moved.host, machine.host_gb_s),
        disk_s=None if reading is None or writing is None else max(reading, writing),
    )


@dataclass(frozen=True)
class _OffloadBytes:
    """Bytes moved by offload in a step of one rank."""

    up: int = 0
    """From the device to the host: gradients in fp32."""
    down: int = 0
    """To the device: new fp32 parameters if they stay there, else the shards to be gathered."""
    host: int = 0
    """Read and written in host memory."""
    read: int = 0
    """From a disk."""
    written: int = 0


def _moved(model: ModelShape, sharing: ShardingLayout, job: JobShape) -> _OffloadBytes:
    if not sharing.has_engine:
        return _OffloadBytes()
    numels = offloaded_state(model, sharing, job).numels
    outside = numels["host"] + numels["disk"]
    chunk_bytes = FP32 * (1 + job.state_copies)
    # In and out over the bus, and Adam: it reads the gradient and the chunk, and writes the chunk.
    host = outside * (FP32 + FP32 + chunk_bytes + chunk_bytes + FP32)
    read = written = numels["disk"] * chunk_bytes
    down = outside * FP32
    if sharing.parameter_place != "device":
        copies = parameter_copies(model, sharing, job)
        shards = copies.disk or copies.host
        down = 2 * job.num_microbatches * shards
        if sharing.parameter_place == "disk":
            read, written = read + down, written + shards
    return _OffloadBytes(outside * FP32, down, host, read, written)


def _seconds(num_bytes: float, gb_s: float | None) -> float | None:
    if num_bytes == 0:
        return 0.0
    return None if gb_s is None else num_bytes / (gb_s * GIGA)
