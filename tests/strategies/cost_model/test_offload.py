"""Where offloading puts things: as the engine cuts, rounds and places them."""

import pytest
import torch
from torch.nn import Parameter

from boltmesh.strategies.cost_model import offload
from boltmesh.strategies.cost_model.model import (
    Bytes,
    JobShape,
    ModelShape,
    ShardingLayout,
    TensorShape,
    UnitShape,
    widths_of,
)
from boltmesh.strategies.offload import buckets
from boltmesh.strategies.offload.disk import param_store, state_store
from boltmesh.strategies.offload.disk.param_store import DiskParameterStore
from boltmesh.strategies.offload.disk.state_store import DiskStateStore
from boltmesh.strategies.offload.host_memory import HostArena
from boltmesh.strategies.offload.memory_stores import RING_UNITS, HostStore
from boltmesh.strategies.offload.store_api import CHUNK_NUMEL
from boltmesh.strategies.offload.stores import SMALL_NUMEL, OffloadPlan, place_chunks
from boltmesh.strategies.offload.streams import aligned

MILLION = 1 << 20


def unit(name: str, *rows: int, columns: int = 1024) -> UnitShape:
    return UnitShape(
        name, tuple(TensorShape(f"{name}.{at}", (each, columns)) for at, each in enumerate(rows))
    )


def a_model() -> ModelShape:
    """Two blocks, of which one is several chunks, and a root, with sizes that divide by nothing."""
    frozen = TensorShape("frozen", (33, 1024), is_trained=False)
    first = UnitShape("first", (*unit("first", 5001, 9001, 3).tensors, frozen))
    root = UnitShape("", unit("", 17).tensors, stays_gathered=True)
    return ModelShape("three", (first, unit("second", 30011), root))


def trained_numel(model: ModelShape, num_shards: int) -> int:
    """Elements of one rank's padded shards of the trained parameters."""
    tensors = (each for unit in model.units for each in unit.tensors)
    return sum(each.padded_numel(num_shards) for each in tensors if each.is_trained)


def engine_buckets(model: ModelShape, num_shards: int, *, frozen: bool) -> list[buckets.Bucket]:
    made = []
    first, second, root = model.units
    for owner in (root, first, second):
        for is_trained in (True, False) if frozen else (True,):
            slots = []
            for tensor in owner.tensors:
                padded = (-(-tensor.shape[0] // num_shards), 1024)
                slot = buckets.Slot(
                    0, tensor.name, Parameter(torch.empty(0)), padded, padded, torch.float32
                )
                if tensor.is_trained == is_trained:
                    slots.append(slot)
            if slots:
                made.append(buckets.Bucket(owner.name, slots))
    return made


@pytest.mark.parametrize("num_shards", [1, 2, 3])
@pytest.mark.parametrize("place", ["device", "host"])
def test_chunks_are_cut_and_placed_as_the_engine_does(num_shards, place):
    model, job = a_model(), JobShape(num_shards, widths_of("32-true"))
    shares = {"host": 0.3, "disk": 0.4}
    sharing = ShardingLayout("zero", 3, shares, place)
    planned = offload.build_buckets(model, sharing, job)
    real = engine_buckets(model, num_shards, frozen=place == "host")
    counts = {
        bucket: 1 if "frozen" in {slot.name for slot in bucket.slots} else 3 for bucket in real
    }
    place_chunks(real, counts, OffloadPlan(shares))
    assert [list(offload.cut_chunks(each, num_shards)) for each in planned] == [
        [chunk.numel for chunk in each.chunks] for each in real
    ]
    found = offload.offloaded_state(model, sharing, job)
    for where, numel in found.numels.items():
        assert numel == sum(
            chunk.numel
            for bucket, count in counts.items()
            for chunk in bucket.chunks
            if chunk.place == where and count == 3
        )
    waiting = [sum(c.numel for c in b.host_offsets()) for b, count in counts.items() if count == 3]
    assert found.gradients.host == 4 * sum(waiting)


def test_its_constants_are_those_of_the_engine():
    assert offload.CHUNK_NUMEL == CHUNK_NUMEL
    assert offload.SMALL_NUMEL == SMALL_NUMEL
    assert offload.RING_CHUNKS == state_store.NUM_BUFFERS
    assert offload.WINDOW_BYTES == param_store.WINDOW_BYTES
    assert offload.RING_UNITS == RING_UNITS
    assert aligned(1) == offload.RING_ALIGNMENT_BYTES


@pytest.mark.parametrize(("place", "stores"), [("host", HostStore), ("disk", DiskStateStore)])
def test_state_takes_what_the_stores_say(place, stores):
    model, job = a_model(), JobShape(3, widths_of("bf16-mixed"))
    planned = offload.offloaded_state(model, ShardingLayout("zero", 3, {place: 1.0}), job)
    made = engine_buckets(model, 3, frozen=False)
    for each in made:
        each.cut(0, CHUNK_NUMEL)
    chunks = [chunk.numel for each in made for chunk in each.chunks]
    expected = sum(stores.bytes_of(numel, 3) for numel in chunks)
    assert getattr(planned.state, place) == expected
    assert planned.state.device == planned.gradients.device == 0
    assert planned.gradients.host == 4 * sum(chunks)
    if place == "disk":
        largest = stores.bytes_of(max(chunks), 3)
        assert largest < planned.state.host <= state_store.NUM_BUFFERS * largest


def test_shares_are_met_to_within_a_chunk():
    model, job = a_model(), JobShape(2, widths_of("32-true"))
    shares = {"host": 0.3, "disk": 0.5}
    planned = offload.offloaded_state(model, ShardingLayout("zero", 3, shares), job)
    trained = trained_numel(model, 2)
    assert sum(planned.numels.values()) == trained
    for place, share in {**shares, "device": 0.2}.items():
        assert abs(planned.numels[place] - share * trained) <= CHUNK_NUMEL
    assert planned.state.device == 12 * planned.numels["device"]
    assert planned.gradients.device == 4 * planned.numels["device"]


@pytest.mark.parametrize(
    ("place", "bytes_of"),
    [
        ("host", lambda numel, dtype: HostArena.bytes_of(numel * dtype.itemsize)),
        ("disk", DiskParameterStore.bytes_of),
    ],
)
def test_copies_of_parameters_take_what_the_stores_say(place, bytes_of):
    model, job = a_model(), JobShape(3, widths_of("bf16-mixed"))
    sharing = ShardingLayout("zero", 3, {place: 1.0}, place)
    planned = offload.parameter_copies(model, sharing, job)
    expected = sum(
        bytes_of(each.padded_numel(3), torch.bfloat16)
        for owner in model.units
        for each in owner.tensors
        if each.padded_numel(3) >= SMALL_NUMEL
    )
    assert getattr(planned, place) == expected
    # The small ones: 1 row, 6 rows, and the frozen one of 11 rows for each rank.
    assert planned.device == 2 * (1 + 6 + 11) * 1024


def test_frozen_parameters_stay_as_they_are_where_shards_stay_on_the_device():
    model, job = a_model(), JobShape(3, widths_of("bf16-mixed"))
    planned = offload.parameter_copies(model, ShardingLayout("zero", 3, {"host": 1.0}), job)
    trained = trained_numel(model, 3)
    assert planned == Bytes(device=2 * trained + 4 * 11 * 1024)


def test_parameters_on_a_disk_pass_through_a_window_of_host_memory():
    sharing = ShardingLayout("zero", 3, {"disk": 1.0}, "disk")
    small = offload.parameter_copies(a_model(), sharing, JobShape(3, widths_of("bf16-mixed")))
    assert small.host == small.disk
    large = ModelShape("large", tuple(unit(f"{at}", 4096) for at in range(9)))
    planned = offload.parameter_copies(large, sharing, JobShape(1, widths_of("32-true")))
    assert planned.host == offload.WINDOW_BYTES < planned.disk == 9 * 16 * MILLION
    huge = ModelShape("huge", tuple(unit(f"{at}", 9000 - at) for at in range(5)))
    planned = offload.parameter_copies(huge, sharing, JobShape(1, widths_of("32-true")))
    assert planned.host == 3 * 4 * 9000 * 1024, "three of the largest unit"
