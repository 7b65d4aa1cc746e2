"""What is submitted to which stream of a GPU, by recorded fakes of streams and events."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest.mock import create_autospec

import pytest
import torch
from torch.nn import Parameter

from boltmesh.strategies.offload import memory_stores, stepper
from boltmesh.strategies.offload.buckets import Bucket, Slot
from boltmesh.strategies.offload.host_memory import copy_to_host
from boltmesh.strategies.offload.memory_stores import (
    HostParameterStore,
    MemoryParameterStore,
    ParameterCopies,
)
from boltmesh.strategies.offload.stepper import BucketGradients, Worker, WorkerTask
from boltmesh.strategies.offload.streams import CopyMeter, DeviceRing, aligned
from boltmesh.strategies.offload.update_rule import PieceGradient

CPU = torch.device("cpu")


class FakeEvent:
    def __init__(self, log: list[Any] | None = None) -> None:
        self.has_passed = False
        self._log = [] if log is None else log

    def query(self) -> bool:
        return self.has_passed

    def synchronize(self) -> None:
        self.has_passed = True
        self._log.append(self)


class FakeLane:
    """Records what each copy waits for."""

    def __init__(self) -> None:
        self.awaited: list[tuple[FakeEvent, ...]] = []
        self.meter = self

    @contextmanager
    def after(self, *events: FakeEvent) -> Iterator[None]:
        self.awaited.append(events)
        yield

    @contextmanager
    def copy(self, direction: str, num_bytes: int) -> Iterator[None]:
        yield


def test_a_part_of_a_ring_is_given_out_with_the_reads_that_a_copy_has_to_wait_for():
    ring: Any = DeviceRing(torch.zeros(4 * 512, dtype=torch.uint8))
    first, events = ring.take(700)
    assert first.numel() == aligned(700) == 1024
    assert events == []
    second, _ = ring.take(1024)
    assert ring.take(1) is None, "the ring does not grow"
    read = FakeEvent()
    ring.give_back(first, read)
    again, events = ring.take(100)
    assert events == [read]
    assert again.data_ptr() == first.data_ptr()
    _rest, events = ring.take(512)
    assert events == [read]
    read.has_passed = True
    ring.give_back(second, None)
    _, events = ring.take(1024)
    assert events == []


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """A store that works as on a GPU, whose memory is the host's."""
    monkeypatch.setattr(memory_stores, "event_on_stream", lambda _: FakeEvent())
    monkeypatch.setattr(memory_stores, "wait_on_stream", lambda *_: None)

    def make(num_shards: int, ring_shards: int, **options: Any) -> Any:
        ring_bytes = ring_shards * 1024
        store: Any = HostParameterStore(CPU, ring_bytes=ring_bytes, **options)
        store._is_on_host = False
        store._lane = FakeLane()
        for index in range(num_shards):
            store.create(index, torch.full((256,), float(index)))
        return store

    return make


def walk(store: HostParameterStore, num_shards: int) -> list[int]:
    """A step; return the device bytes after each shard."""
    store.begin_step()
    taken = []
    for index in range(num_shards):
        value = store.get(index)
        assert bool((value == index).all())
        taken.append(store.bytes_by_place()["device"])
        store.release(index)
    return taken


def test_reading_ahead_takes_the_ring_and_no_more_however_far_the_host_is_ahead(on_gpu):
    store = on_gpu(12, 6)
    for _ in range(3):
        assert set(walk(store, 12)) == {6 * 1024}
    # Not one of the fake events has passed: the device has done nothing yet.
    awaited = [events for events in store._lane.awaited if any(events)]
    assert len(awaited) > 12, "copies into parts that are read wait for the reads on their stream"


def test_a_whole_unit_is_read_ahead_and_not_a_number_of_shards(on_gpu):
    store = on_gpu(12, 9)
    walk(store, 12)
    store.begin_step()
    store.get(0)
    assert set(store._ahead) == set(range(9)), "seven large shards of a block, and then some"


def test_shards_that_no_step_has_reached_are_not_read_ahead(on_gpu):
    store = on_gpu(4, 4, is_current=lambda index: index < 2)
    walk(store, 4)
    store.begin_step()
    store.get(0)
    assert set(store._ahead) == {0, 1}


def test_what_does_not_fit_into_the_ring_has_memory_of_its_own_for_a_while(
    on_gpu, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda *_: None)
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda *_: None)
    store = on_gpu(5, 2)
    store.begin_step()
    for index in range(5):
        store.get(index)
    assert store.bytes_by_place()["device"] == 5 * 1024
    for index in range(5):
        store.release(index)
    assert store.bytes_by_place()["device"] == 2 * 1024


def test_a_shard_that_is_replaced_is_copied_anew(on_gpu):
    store = on_gpu(3, 3)
    walk(store, 3)
    store.begin_step()
    held = store.get(0)
    store.put(0, torch.full((256,), 7.0))
    store.put(1, torch.full((256,), 8.0))
    assert bool((held == 0).all()), "as it was, for who has it"
    store.release(0)
    assert bool((store.get(0) == 7).all())
    assert bool((store.get(1) == 8).all())


def a_bucket(place: str) -> tuple[Bucket, Slot]:
    slot = Slot(0, "weight", Parameter(torch.zeros(())), (12,), (12,), torch.float32)
    bucket = Bucket("unit", [slot])
    bucket.cut(0, 12)
    bucket.chunks[0].place = place
    return bucket, slot


@pytest.mark.parametrize(("place", "is_awaited"), [("host", False), ("disk", True)])
def test_the_copy_of_a_stepped_chunk_is_awaited_where_its_memory_is_used_again(place, is_awaited):
    log: list[Any] = []
    bucket, slot = a_bucket(place)
    copied = FakeEvent(log)
    store = create_autospec(MemoryParameterStore, instance=True)
    store.put_part.return_value = copied
    copies = ParameterCopies()
    copies.stores[slot] = store
    [chunk] = bucket.chunks
    values = torch.arange(12.0)
    copies.update(chunk, values, [PieceGradient(each, values) for each in chunk.pieces()])
    assert bool(log) == is_awaited
    copies.wait(chunk)  # before the next step of the chunk
    assert log == [copied]
    copies.wait(chunk)
    copies.wait_for_all()
    assert log == [copied]


def test_a_worker_computes_on_a_stream_of_its_own_after_what_was_submitted(
    monkeypatch: pytest.MonkeyPatch,
):
    log: list[Any] = []
    submitted = FakeEvent()

    class FakeStream:
        def wait_event(self, event: FakeEvent) -> None:
            log.append(("after", event))

        def synchronize(self) -> None:
            log.append("done")

    @contextmanager
    def own_stream(_: torch.device) -> Iterator[FakeStream]:
        yield FakeStream()

    monkeypatch.setattr(stepper, "own_stream", own_stream)
    monkeypatch.setattr(stepper, "event_on_stream", lambda _: submitted)
    worker = Worker(num_threads=1)
    task = worker.submit(WorkerTask(lambda: log.append("step")))
    task.wait()
    worker.close()
    assert log == [("after", submitted), "step", "done"], "who waits for a task reads its result"


def test_gradients_of_chunks_that_stay_on_the_gpu_take_no_host_memory(monkeypatch):
    monkeypatch.setattr(stepper, "event_on_stream", lambda _: FakeEvent())
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *a, pin_memory, **k: empty(*a, **k))
    slots = [
        Slot(i, str(i), Parameter(torch.zeros(())), (n,), (n,), torch.float32)
        for i, n in enumerate((5, 3, 9))
    ]
    bucket = Bucket("unit", slots)
    bucket.cut(0, 6)
    assert [(each.start, each.stop) for each in bucket.chunks] == [
        (0, 5),
        (5, 8),
        (8, 14),
        (14, 17),
    ]
    for chunk, place in zip(bucket.chunks, ("device", "host", "device", "host"), strict=True):
        chunk.place = place
    assert list(bucket.host_offsets().values()) == [0, 3]
    host = torch.zeros(6)
    lane: Any = FakeLane()
    lane.meter = create_autospec(CopyMeter, instance=True)
    lane.meter.copy.return_value = nullcontext()
    gradients = BucketGradients(bucket, torch.device("cuda"), host, lane)
    for slot in slots:
        gradients.add(slot, torch.arange(slot.offset, slot.offset + slot.numel).float())
    gradients.send()
    lane.meter.copy.assert_called_once_with("write", 4 * 6)
    gradients.wait()
    assert host.tolist() == [5, 6, 7, 14, 15, 16]
    for chunk in bucket.chunks:
        parts = [each.gradient for each in gradients.pieces(chunk)]
        assert torch.cat(parts).tolist() == list(range(chunk.start, chunk.stop))
        is_in_host = {each.untyped_storage().data_ptr() == host.data_ptr() for each in parts}
        assert is_in_host == {chunk.place == "host"}


def test_a_copy_to_the_host_passes_page_locked_memory_part_by_part():
    value, into = torch.arange(11.0), torch.zeros(11)
    copy_to_host(value, into, torch.zeros(16, dtype=torch.uint8))
    assert torch.equal(value, into)
