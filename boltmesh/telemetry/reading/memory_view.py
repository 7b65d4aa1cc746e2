"""Says what a rank's memory is for, from what was walked, what torch gave out and the prediction.

Parameters, gradients, optimizer state and buffers are measured. Activations cannot be walked: on
CUDA they are what the allocator has given out at its peak beyond the kinds that are known, which
includes what libraries and communication borrow. On the host the rest of the process is ``other``.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from boltmesh.telemetry import layout
from boltmesh.telemetry.recording.file_records import MAX_NUMBER, Status
from boltmesh.telemetry.snapshot import MEMORY_KINDS, MEMORY_PLACES, Memory, MemoryKind

_Key = tuple[str, str]


def memory_totals(status: Status | None) -> Memory:
    """Return the totals as the rank sampled them."""
    if status is None:
        return Memory(None, None, None, None)
    totals = (status.rss, status.allocated, status.reserved, status.peak)
    return Memory(*(None if each == layout.UNKNOWN else each for each in totals))


def memory_kinds(
    walked: Sequence[int] | None, totals: Memory, predicted: Sequence[Mapping[str, Any]]
) -> tuple[MemoryKind, ...]:
    """Return each kind in each place of which anything is known."""
    measured = _measured(walked, totals)
    expected = _predicted(predicted)
    return tuple(
        MemoryKind(kind, place, measured.get((kind, place)), expected.get((kind, place)))  # type: ignore[arg-type]
        for kind in MEMORY_KINDS
        for place in MEMORY_PLACES
        if (kind, place) in measured or (kind, place) in expected
    )


def _measured(walked: Sequence[int] | None, totals: Memory) -> dict[_Key, int]:
    if walked is None:
        return {}
    keys = [(kind, place) for kind in MEMORY_KINDS for place in MEMORY_PLACES]
    found = {key: size for key, size in zip(keys, walked, strict=True) if 0 <= size <= MAX_NUMBER}
    known = {
        where: sum(size for (_, place), size in found.items() if place == where)
        for where in MEMORY_PLACES
    }
    allocated, reserved = totals.device_allocated_bytes, totals.device_reserved_bytes
    peak = totals.device_peak_bytes
    if peak is not None:
        found["activations", "device"] = max(0, peak - known["device"])
    if allocated is not None and reserved is not None:
        found["cache", "device"] = max(0, reserved - allocated)
    if totals.host_rss_bytes is not None:
        found["other", "host"] = max(0, totals.host_rss_bytes - known["host"])
    return found


def _predicted(predicted: Sequence[Mapping[str, Any]]) -> dict[_Key, int]:
    found: dict[_Key, int] = {}
    for each in predicted[: len(MEMORY_KINDS) * len(MEMORY_PLACES)]:
        kind, place, size = each.get("kind"), each.get("place"), each.get("predicted_bytes")
        is_known = kind in MEMORY_KINDS and place in MEMORY_PLACES
        if is_known and isinstance(size, int) and 0 <= size <= MAX_NUMBER:
            found[str(kind), str(place)] = size
    return found
