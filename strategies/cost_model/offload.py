"""Places of offloaded data: state in flat fp32 chunks, gradients, copies of parameters.

The engine keeps a master parameter and the optimizer's moments in fp32, whatever the precision, and
a second copy of each parameter in the dtype of the computation, for all-gathers.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate

from boltmesh.strategies.cost_model.model import (
    Bytes,
    JobShape,
    ModelShape,
    ShardingLayout,
    TensorShape,
    UnitShape,
    Widths,
)
from boltmesh.strategies.offload.chunk_placement import plan_places

FP32 = 4

CHUNK_NUMEL = 8 << 20
"""Most elements in a chunk."""

RING_CHUNKS = 4
"""Number of disk chunks in host memory at a time: read ahead, stepped, written back."""

SMALL_NUMEL = 1 << 16
"""A shard with fewer elements stays on the device."""

WINDOW_BYTES = 64 << 20
"""Least host memory for parameters on a disk, in use and read ahead ..."""
WINDOW_UNITS = 3
"""... but at least that of this many units."""

RING_UNITS = 3
"""Number of units in the device's buffer for shards that are copied from the host."""
RING_ALIGNMENT_BYTES = 512
"""The size of each shard there is rounded up to a multiple of this."""

ALIGNMENT = {"device": 1, "host": 64, "disk": 4096}
"""The length of a stored tensor is rounded up to a multiple of this, in bytes."""


@dataclass(frozen=True)
class BucketShape:
    """The parameters of a unit that are stepped together, or that no optimizer steps."""

    unit: UnitShape
    tensors: tuple[TensorShape, ...]
    num_states: int
    """Number of flat fp32 tensors: the master parameter, and the optimizer's state."""


@dataclass(frozen=True)
class OffloadEstimate:
    """Memory that the engine uses for one rank's shard."""

    state: Bytes
    """Master parameters and moments; for a disk also the ring in host memory."""
    gradients: Bytes
    """Gradients, which are kept from the backward pass until the step is committed."""
    numels: dict[str, int]
    """Number of elements that are stepped, by place."""


def keeps_fp32(model: ModelShape, widths: Widths) -> bool:
    """Whether all trained parameters are stored in fp32, as offload needs them."""
    return all(
        widths.store(each.element_bytes) == FP32
        for unit in model.units
        for each in unit.tensors
        if each.is_trained
    )


def build_buckets(model: ModelShape, sharing: ShardingLayout, job: JobShape) -> list[BucketShape]:
    """Return the buckets of the engine: roots first, then blocks, then tiled weights.

    Frozen parameters are included only if shards leave the device.
    """
    made = []
    order = sorted(
        model.units, key=lambda each: (each.tile_bytes is not None, not each.stays_gathered)
    )
    for unit in order:
        trained = tuple(each for each in unit.tensors if each.is_trained)
        frozen = tuple(each for each in unit.tensors if not each.is_trained)
        if trained:
            made.append(BucketShape(unit, trained, 1 + job.state_copies))
        if frozen and sharing.parameter_place != "device":
            made.append(BucketShape(unit, frozen, 1))
    return made


def offloaded_state(model: ModelShape, sharing: ShardingLayout, job: JobShape) -> OffloadEstimate:
    """Place chunks as the engine does: those whose gradients come last stay on the device."""
    buckets = build_buckets(model, sharing, job)
    chunks = [(bucket, numel) for bucket in buckets for numel in cut_chunks(bucket, job.num_shards)]
    arriving = chunks[::-1]
    sizes = [numel * bucket.num_states for bucket, numel in arriving]
    places = plan_places(sizes, sharing.state_shares)
    state, numels = Bytes(), dict.fromkeys(ALIGNMENT, 0)
    on_disk = []
    for (bucket, numel), place in zip(arriving, places, strict=True):
        num_bytes = bucket.num_states * _stored(numel * FP32, place)
        state += Bytes.at(place, num_bytes)
        if place == "disk":
            on_disk.append(num_bytes)
        if bucket.num_states > 1:
            numels[place] += numel
    state += Bytes.at("host", _ring(on_disk[::-1]))
    if job.is_on_host:
        # Gradients stay where they were reduced until their step, which ends within the step:
        # none of them is kept.
        return OffloadEstimate(state, Bytes(), numels)
    # A gradient waits where its step happens.
    waiting = numels["host"] + numels["disk"]
    gradients = Bytes(device=FP32 * numels["device"], host=FP32 * waiting)
    return OffloadEstimate(state, gradients, numels)


def cut_chunks(bucket: BucketShape, num_shards: int) -> Iterator[int]:
    """Yield the number of elements of each chunk of a bucket.

    Parameters are contiguous with their padding; a chunk ends between two of them if possible.
    """
    start = end = 0
    for each in bucket.tensors:
        before, end = end, end + each.padded_numel(num_shards)
        if end - start <= CHUNK_NUMEL:
            continue
        if before > start:
            yield before - start
            start = before
        while end - start > CHUNK_NUMEL:
            yield CHUNK_NUMEL
            start += CHUNK_NUMEL
    if end > start:
        yield end - start


def parameter_copies(model: ModelShape, sharing: ShardingLayout, job: JobShape) -> Bytes:
    """Return the bytes, by place, of the shards that all-gathers read."""
    buckets = build_buckets(model, sharing, job)
    copies, on_disk = Bytes(), [0]
    for bucket in buckets:
        of_bucket = 0
        for each in bucket.tensors:
            numel = each.padded_numel(job.num_shards)
            place = sharing.parameter_place if numel >= SMALL_NUMEL else "device"
            num_bytes = _stored(_copy_bytes(each, bucket.unit, job), place)
            copies += Bytes.at(place, num_bytes)
            of_bucket += num_bytes if place == "disk" else 0
        on_disk.append(of_bucket)
    copies += Bytes.at("host", min(sum(on_disk), _window(max(on_disk))))
    taken = {each.name for bucket in buckets for each in bucket.tensors}
    others = sum(
        each.padded_numel(job.num_shards) * job.widths.store(each.element_bytes)
        for unit in model.units
        for each in unit.tensors
        if each.name not in taken
    )
    return copies + Bytes(others)


def fetched_ahead(model: ModelShape, sharing: ShardingLayout, job: JobShape) -> int:
    """Return the bytes on the device of shards copied there for the next all-gathers."""
    if sharing.parameter_place == "device" or job.is_on_host:
        return 0
    sizes = [
        [
            _copy_bytes(each, unit, job)
            for each in unit.tensors
            if each.padded_numel(job.num_shards) >= SMALL_NUMEL
        ]
        for unit in model.units
    ]
    if sharing.parameter_place == "disk":
        of_units = list(map(sum, sizes))
        return min(sum(of_units), _window(max(of_units, default=0)))
    unit_bytes = RING_ALIGNMENT_BYTES
    rings = [sum(-(-each // unit_bytes) * unit_bytes for each in unit) for unit in sizes]
    return min(sum(rings), RING_UNITS * max(rings, default=0))


def _ring(sizes: list[int]) -> int:
    """Return the bytes of a ring of buffers, each as large as the largest chunk before it."""
    if len(sizes) > RING_CHUNKS:
        return RING_CHUNKS * max(sizes)
    return sum(accumulate(sizes, max))


def _window(largest_bytes: int) -> int:
    return max(WINDOW_BYTES, WINDOW_UNITS * largest_bytes)


def _copy_bytes(tensor: TensorShape, unit: UnitShape, job: JobShape) -> int:
    is_autocast = unit.is_autocast
    if unit.tile_bytes is not None:
        is_autocast = "lookup" not in tensor.layers  # kept as stored if one layer reads it uncast
    width = job.widths.compute(tensor.element_bytes, is_autocast=is_autocast)
    return tensor.padded_numel(job.num_shards) * width


def _stored(num_bytes: int, place: str) -> int:
    unit = ALIGNMENT[place]
    return -(-max(1, num_bytes) // unit) * unit
