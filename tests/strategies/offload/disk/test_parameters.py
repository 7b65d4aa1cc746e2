"""Shards on disk: the right values always, read before they are asked for from the second step."""

import random
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from boltmesh.strategies.offload.disk.param_store import DiskParameterStore
from boltmesh.strategies.offload.disk.swap_file import Swap
from tests.support.faulty_disk import FaultyCalls

CPU = torch.device("cpu")
UNITS = 6
PER_UNIT = 3
FORWARD = list(range(UNITS))
PASS = FORWARD + FORWARD[::-1]
PAGE = 4096


@pytest.fixture
def calls() -> FaultyCalls:
    return FaultyCalls()


@pytest.fixture
def make(tmp_path: Path, calls: FaultyCalls) -> Iterator[Callable[..., DiskParameterStore]]:
    stores: list[DiskParameterStore] = []

    def build(
        window_bytes: int, shards: list[Tensor], is_current: Callable[[int], bool] = lambda _: True
    ) -> DiskParameterStore:
        swap = Swap(tmp_path, calls=calls)
        store = DiskParameterStore(
            swap, device=CPU, window_bytes=window_bytes, is_current=is_current
        )
        stores.append(store)
        for index, value in enumerate(shards):
            store.create(index, value)
        return store

    yield build
    for store in stores:
        store.close()


def some_shards() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    dtypes = [torch.bfloat16, torch.float32, torch.float16]
    return [
        torch.randn(1000 + 137 * n, generator=generator).to(dtypes[n % 3])
        for n in range(UNITS * PER_UNIT)
    ]


def run(store: DiskParameterStore, shards: list[Tensor], units: list[int]) -> int:
    """Gather units as fully_shard does; returns how many shards were not there in time."""
    before = store.misses
    for unit in units:
        indices = range(PER_UNIT * unit, PER_UNIT * (unit + 1))
        got = [store.get(index) for index in indices]
        for index, value in zip(indices, got, strict=True):
            assert value.dtype == shards[index].dtype
            assert torch.equal(value, shards[index])
        for index in indices:
            store.release(index)
    return store.misses - before


def put_all(store: DiskParameterStore, shards: list[Tensor]) -> None:
    for index in reversed(range(len(shards))):
        newer = shards[index].float() * 1.25 - 0.5
        store.put(index, newer)
        shards[index] = newer.to(shards[index].dtype)


def test_from_the_second_step_on_every_read_was_ahead(
    make: Callable[..., DiskParameterStore],
) -> None:
    shards = some_shards()
    store = make(8 * PER_UNIT * PAGE, shards)
    store.begin_step()
    assert run(store, shards, PASS) > UNITS
    for _ in range(4):
        put_all(store, shards)
        store.flush()  # there is no computation here for the writes to run beside
        store.begin_step()
        assert run(store, shards, PASS) == 0


@pytest.mark.each_choice
@pytest.mark.parametrize("window_pages", [0, 1, 5, 17, 1000])
@pytest.mark.parametrize("seed", range(3))
def test_values_are_right_whatever_the_window_and_the_order(
    make: Callable[..., DiskParameterStore], window_pages: int, seed: int
) -> None:
    chance = random.Random(seed)
    shards = some_shards()
    store = make(window_pages * PAGE, shards)
    for step in range(8):
        store.begin_step()
        run(store, shards, PASS * chance.randint(1, 2))
        if step % 3 == 1:
            run(store, shards, [chance.randrange(UNITS) for _ in range(9)])
        put_all(store, shards)
        if step % 4 == 2:  # validation, before the next step begins
            run(store, shards, FORWARD * 2)


def test_memory_stays_within_the_window(make: Callable[..., DiskParameterStore]) -> None:
    shards = some_shards()
    window = 16 * PAGE
    store = make(window, shards)
    for _ in range(3):
        store.begin_step()
        run(store, shards, PASS)
        put_all(store, shards)
        store.flush()
        places = store.bytes_by_place()
        assert places["host"] == window
        assert places["device"] == 0
        assert places["disk"] == sum(-(-s.numel() * s.itemsize // PAGE) * PAGE for s in shards)


def test_a_shard_larger_than_the_window_has_memory_only_while_it_is_used(
    make: Callable[..., DiskParameterStore],
) -> None:
    shards = [torch.arange(20_000.0), torch.arange(100.0)]
    store = make(4 * PAGE, shards)
    store.begin_step()
    assert torch.equal(store.get(0), shards[0])
    assert store.bytes_by_place()["host"] == 4 * PAGE + 20 * PAGE
    store.release(0)
    assert store.bytes_by_place()["host"] == 4 * PAGE


def test_nothing_is_read_past_the_end_of_a_step(
    make: Callable[..., DiskParameterStore], calls: FaultyCalls
) -> None:
    shards = some_shards()
    store = make(9 * PAGE, shards)
    for _ in range(2):
        store.begin_step()
        run(store, shards, PASS)
    seen = len(calls.reads)
    ahead = threading.Event()
    calls.before_read = lambda *_: ahead.set()
    assert not ahead.wait(0.1)
    assert len(calls.reads) == seen
    put_all(store, shards)
    store.flush()
    store.begin_step()
    assert run(store, shards, FORWARD) == 0


def test_a_shard_that_is_replaced_while_it_is_read_ahead_is_the_new_one(
    make: Callable[..., DiskParameterStore], calls: FaultyCalls
) -> None:
    shards = some_shards()
    store = make(64 * PAGE, shards)
    store.begin_step()
    run(store, shards, PASS)
    put_all(store, shards)
    store.flush()
    for index in range(len(shards)):  # nothing is left in memory that could be right by chance
        store._held.pop(index, None)
    store._arena = None
    may_read, reading = threading.Event(), threading.Event()

    def slow(*_: object) -> None:
        reading.set()
        may_read.wait(10)

    calls.before_read = slow
    store.begin_step()
    assert reading.wait(10)
    thread = threading.Thread(target=put_all, args=(store, shards))
    thread.start()
    may_read.set()
    thread.join()
    calls.before_read = None
    run(store, shards, PASS)


def test_a_pass_runs_behind_the_step_that_replaces_its_shards(
    make: Callable[..., DiskParameterStore], calls: FaultyCalls
) -> None:
    """As the engine does it: a unit is gathered once its own step is over, others are not yet."""
    shards = some_shards()
    done = [threading.Event() for _ in range(UNITS)]
    store = make(6 * PAGE, shards, lambda index: done[index // PER_UNIT].is_set())
    for each in done:
        each.set()
    for _ in range(6):
        store.begin_step()
        run(store, shards, PASS)
        newer = [(shard.float() + 1).to(shard.dtype) for shard in shards]
        for each in done:
            each.clear()

        def step(values: list[Tensor] = newer) -> None:
            for unit in FORWARD:
                for index in range(PER_UNIT * unit, PER_UNIT * (unit + 1)):
                    store.put(index, values[index].float())
                done[unit].set()

        stepping = threading.Thread(target=step)
        stepping.start()
        store.begin_step()
        for unit in FORWARD:
            assert done[unit].wait(10)
            run(store, newer, [unit])
        stepping.join()
        shards = newer


def test_shards_that_are_still_to_be_replaced_are_not_read_ahead(
    make: Callable[..., DiskParameterStore], calls: FaultyCalls
) -> None:
    shards = some_shards()
    current = set(range(len(shards)))
    store = make(5 * PAGE, shards, lambda index: index in current)
    store.begin_step()
    run(store, shards, PASS)
    current.clear()
    seen = len(calls.reads)
    store.begin_step()
    store.flush()
    assert len(calls.reads) == seen


def test_get_waits_for_a_replacement_under_way(
    make: Callable[..., DiskParameterStore], calls: FaultyCalls
) -> None:
    shards = [torch.zeros(5000)]
    store = make(64 * PAGE, shards)
    store.begin_step()
    store.get(0)
    putting = threading.Thread(target=store.put, args=(0, torch.ones(5000)))
    putting.start()  # waits for the user of the old value
    store.release(0)
    putting.join(10)
    assert torch.equal(store.get(0), torch.ones(5000))
    store.release(0)


def test_values_survive_the_way_to_the_disk_and_back(
    make: Callable[..., DiskParameterStore], calls: FaultyCalls
) -> None:
    shards = some_shards()
    store = make(4 * PAGE, shards)
    put_all(store, shards)
    store.flush()
    assert len(calls.writes) == 2 * len(shards)
    run(store, shards, PASS)
    assert len(calls.reads) >= len(shards) - 4


@pytest.mark.gpu
def test_shards_reach_a_gpu_ahead_of_their_use(tmp_path: Path) -> None:
    device = torch.device("cuda", 0)
    shards = [each.to(device) for each in some_shards()]
    store = DiskParameterStore(Swap(tmp_path), device=device, window_bytes=24 * PAGE)
    for index, value in enumerate(shards):
        store.create(index, value)
    for _ in range(4):
        store.begin_step()
        run(store, shards, PASS * 2)
        put_all(store, shards)
    store.begin_step()
    run(store, shards, FORWARD)
    assert 0 < store.bytes_by_place()["device"] <= 2 * store.bytes_by_place()["host"]
    store.close()
