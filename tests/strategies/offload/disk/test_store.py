"""Chunks on disk are what was released last, and the disk works while the chunk is stepped."""

import random
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from boltmesh.strategies.offload.disk.state_store import DiskStateStore
from boltmesh.strategies.offload.disk.swap_file import Swap, block_sum
from tests.support.faulty_disk import FaultyCalls

CPU = torch.device("cpu")
NUMEL = 1500
"""Not a whole number of pages."""

CHUNK_BYTES = 3 * 8192


@pytest.fixture
def calls() -> FaultyCalls:
    return FaultyCalls()


@pytest.fixture
def make(tmp_path: Path, calls: FaultyCalls) -> Iterator[Callable[..., DiskStateStore]]:
    stores: list[DiskStateStore] = []

    def build(num_chunks: int = 0, num_buffers: int = 4) -> DiskStateStore:
        swap = Swap(tmp_path, max(1, num_chunks) * CHUNK_BYTES, calls=calls)
        store = DiskStateStore(swap, device=CPU, num_buffers=num_buffers)
        stores.append(store)
        for chunk in range(num_chunks):
            store.create(chunk, values(chunk))
        store.flush()
        store._held.clear()  # what creating left in memory depends on which write was over first
        calls.reads.clear()
        calls.writes.clear()
        return store

    yield build
    calls.before_read = calls.before_write = None
    for store in stores:
        store.close()


def values(chunk: int, numel: int = NUMEL) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(chunk)
    return tuple(torch.randn(numel, generator=generator) for _ in range(3))


def assert_equal(store: DiskStateStore, chunk: int, expected: tuple[Tensor, ...]) -> None:
    got = store.acquire(chunk)
    assert len(got) == len(expected)
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
    store.release(chunk, is_dirty=False)


def test_chunks_of_any_shape_come_back(make: Callable[..., DiskStateStore]) -> None:
    store = make()
    shapes = [(1, 3), (1024, 3), (1025, 2), (70_001, 1), (1_400_003, 3), (5, 4)]
    kept = {n: values(n, numel)[:1] * count for n, (numel, count) in enumerate(shapes)}
    for chunk, tensors in kept.items():
        store.create(chunk, tensors)
    for chunk, tensors in reversed(kept.items()):
        assert_equal(store, chunk, tensors)


@pytest.mark.parametrize("num_buffers", [2, 3, 4])
@pytest.mark.parametrize("seed", range(3))
def test_any_order_of_hints_and_changes_equals_memory(
    make: Callable[..., DiskStateStore], seed: int, num_buffers: int
) -> None:
    chance = random.Random(seed)
    store = make(11, num_buffers)
    kept = [values(chunk) for chunk in range(11)]
    for _ in range(20):
        order = [chance.randrange(11) for _ in range(11)]
        hints = chance.sample(order, chance.randint(0, 11))
        for chunk in hints:
            store.prefetch(chunk)
        for chunk in order:
            tensors = store.acquire(chunk)
            assert all(torch.equal(a, b) for a, b in zip(tensors, kept[chunk], strict=True))
            is_dirty = chance.random() < 0.6
            if is_dirty:
                for here, there in zip(tensors, kept[chunk], strict=True):
                    here.mul_(0.5)
                    there.mul_(0.5)
            store.release(chunk, is_dirty=is_dirty)
    store.flush()
    for chunk in range(11):
        assert_equal(store, chunk, kept[chunk])


def test_many_threads_in_turn_see_what_the_last_one_released(
    make: Callable[..., DiskStateStore],
) -> None:
    store = make(9)
    turn = threading.Lock()
    count = [0] * 9

    def work(seed: int) -> None:
        chance = random.Random(seed)
        for _ in range(60):
            chunk = chance.randrange(9)
            store.prefetch(chance.randrange(9))
            with turn:
                master, *_ = store.acquire(chunk)
                master.add_(1)
                count[chunk] += 1
                store.release(chunk, is_dirty=True)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(count) == 180
    for chunk in range(9):
        expected = values(chunk)[0]
        for _ in range(count[chunk]):
            expected += 1
        assert torch.equal(store.acquire(chunk)[0], expected)
        store.release(chunk, is_dirty=False)


def test_threads_that_acquire_different_chunks_at_once_do_not_disturb_each_other(
    make: Callable[..., DiskStateStore],
) -> None:
    store = make(12)
    failed: list[BaseException] = []

    def work(own: int) -> None:
        chance = random.Random(own)
        try:
            for count in range(40):
                chunk = 3 * chance.randrange(4) + own
                store.prefetch(chance.randrange(12))
                master, first, _ = store.acquire(chunk)
                kept, before, _ = values(chunk)
                assert torch.equal(master, kept)
                assert ((first - before).round() == (first - before).round()[0]).all()
                first.copy_(before + count)
                store.release(chunk, is_dirty=True)
        except BaseException as error:  # noqa: BLE001 - shown by the test
            failed.append(error)

    threads = [threading.Thread(target=work, args=(own,)) for own in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []


def test_memory_holds_no_more_than_the_ring(make: Callable[..., DiskStateStore]) -> None:
    store = make(12, 3)
    for chunk in range(12):
        store.prefetch(chunk)
    for chunk in range(12):
        store.acquire(chunk)
        places = store.bytes_by_place()
        assert places == {"device": 0, "host": 3 * CHUNK_BYTES, "disk": 12 * CHUNK_BYTES}
        store.release(chunk, is_dirty=True)


def test_reads_run_ahead_and_the_next_begins_when_a_write_is_over(
    make: Callable[..., DiskStateStore], calls: FaultyCalls
) -> None:
    store = make(8)
    first_reads = threading.Semaphore(0)
    may_write = threading.Event()
    calls.before_read = lambda *_: first_reads.release()
    calls.before_write = lambda *_: may_write.wait(10) and None
    for chunk in range(8):
        store.prefetch(chunk)
    tensors = store.acquire(0)
    for _ in range(4):  # the ring is filled although nothing was released
        assert first_reads.acquire(timeout=120)
    assert len(calls.reads) == 4
    tensors[0].add_(1)
    store.release(0, is_dirty=True)
    store.acquire(1)  # is there already, while the write of 0 stands
    assert len(calls.reads) == 4
    may_write.set()
    assert first_reads.acquire(timeout=120)  # by itself, with no call to the store
    assert calls.reads[4] // CHUNK_BYTES == 4
    store.release(1, is_dirty=False)


def test_a_chunk_that_is_still_in_memory_is_not_read_again(
    make: Callable[..., DiskStateStore], calls: FaultyCalls
) -> None:
    store = make(6)
    for chunk in range(6):
        assert_equal(store, chunk, values(chunk))
    seen = len(calls.reads)
    for chunk in (5, 4, 3, 2):
        assert_equal(store, chunk, values(chunk))
    assert len(calls.reads) == seen
    assert_equal(store, 1, values(1))
    assert len(calls.reads) == seen + 1


def test_clean_chunks_are_not_written(
    make: Callable[..., DiskStateStore], calls: FaultyCalls
) -> None:
    store = make(6)
    for chunk in range(6):
        assert_equal(store, chunk, values(chunk))
    store.flush()
    assert calls.writes == []


def test_hints_that_nobody_follows_do_not_block(make: Callable[..., DiskStateStore]) -> None:
    store = make(10, 2)
    for chunk in range(10):
        store.prefetch(chunk)
    for chunk in reversed(range(10)):
        assert_equal(store, chunk, values(chunk))


def test_holding_more_chunks_than_buffers_is_a_mistake_that_is_named(
    make: Callable[..., DiskStateStore],
) -> None:
    store = make(5, 2)
    store.acquire(0)
    store.acquire(1)
    with pytest.raises(AssertionError, match="2 chunks are acquired"):
        store.acquire(2)


def test_flush_returns_when_the_writes_are_over(
    make: Callable[..., DiskStateStore], calls: FaultyCalls
) -> None:
    store = make(2)
    may_write = threading.Event()
    calls.before_write = lambda *_: may_write.wait(10) and None
    store.acquire(0)
    store.release(0, is_dirty=True)
    flushing = threading.Thread(target=store.flush)
    flushing.start()
    flushing.join(0.2)
    assert flushing.is_alive()
    may_write.set()
    flushing.join(10)
    assert not flushing.is_alive()


def test_the_thread_that_steps_takes_the_checksums_and_each_read_is_verified_once(
    make: Callable[..., DiskStateStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    store = make(9)
    summed: list[tuple[int, int]] = []
    threads: set[int] = set()

    def sum_and_note(block: Tensor) -> int:
        threads.add(threading.get_ident())
        summed.append((block.data_ptr(), block.numel()))
        return block_sum(block)

    monkeypatch.setattr("boltmesh.strategies.offload.disk.swap_file.block_sum", sum_and_note)
    for chunk in range(9):
        store.prefetch(chunk)
        store.acquire(chunk)[0].add_(1)
        store.release(chunk, is_dirty=True)
    store.flush()
    assert threads == {threading.get_ident()}
    assert len(summed) == 2 * 9  # once as it was read, once as it is written
    store.acquire(8)  # memory still has it
    store.release(8, is_dirty=False)
    assert len(summed) == 2 * 9


def test_what_is_written_later_has_checksums_too(make: Callable[..., DiskStateStore]) -> None:
    store = make(9)
    store.acquire(0)[0].fill_(7)
    store.release(0, is_dirty=True, defers_write=True)
    store.acquire(0)[1].fill_(8)
    store.release(0, is_dirty=True, defers_write=True)
    for chunk in range(1, 9):  # chunk 0 leaves the memory
        store.acquire(chunk)
        store.release(chunk, is_dirty=False)
        store.flush()  # what is still written stays, however many others come
    assert 0 not in store._held
    first, second, third = store.acquire(0)
    assert (first == 7).all()
    assert (second == 8).all()
    assert torch.equal(third, values(0)[2])


def test_closing_twice_and_with_hints_under_way_is_no_error(
    make: Callable[..., DiskStateStore],
) -> None:
    store = make(9)
    for chunk in range(9):
        store.prefetch(chunk)
    store.close()
    store.close()
    assert store.bytes_by_place()["host"] == 0


def test_the_file_is_closed_with_its_last_store(tmp_path: Path) -> None:
    swap = Swap(tmp_path)
    one, other = DiskStateStore(swap, device=CPU), DiskStateStore(swap, device=CPU)
    one.close()
    other.create(0, values(0))
    other.flush()
    other.close()
    assert swap.file._fd == -1
