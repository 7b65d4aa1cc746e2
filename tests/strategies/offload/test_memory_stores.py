"""State and parameters in memory are what was stored, and are counted where they are."""

import random
from collections.abc import Callable

import pytest
import torch

from boltmesh.strategies.offload.host_memory import HostArena
from boltmesh.strategies.offload.memory_stores import (
    DeviceParameterStore,
    DeviceStore,
    HostParameterStore,
    HostStore,
    MemoryParameterStore,
)
from boltmesh.strategies.offload.store_api import StateStore

CPU = torch.device("cpu")


def reserved(num_bytes: int) -> HostStore:
    store = HostStore(CPU)
    store.reserve(num_bytes)
    return store


def state_stores() -> list[StateStore]:
    return [HostStore(CPU), reserved(HostStore.bytes_of(7, 3) * 2), DeviceStore(CPU)]


@pytest.mark.parametrize("store", state_stores(), ids=["grown", "sized", "device"])
def test_chunks_keep_what_is_written_to_them(store: StateStore) -> None:
    torch.manual_seed(0)
    given = {chunk: [torch.randn(7) for _ in range(3)] for chunk in (4, 9)}
    for chunk, tensors in given.items():
        store.create(chunk, tensors)
        tensors[0] = tensors[0].clone()
    store.prefetch(4)
    first = store.acquire(4)
    first[1].mul_(2)
    store.release(4, is_dirty=True)
    store.flush()
    for chunk, tensors in given.items():
        kept = store.acquire(chunk)
        assert torch.equal(kept[0], tensors[0])
        assert torch.equal(kept[1], tensors[1] * (2 if chunk == 4 else 1))
        store.release(chunk, is_dirty=False)
    store.close()


def test_a_sized_store_takes_what_it_was_sized_for_and_no_more() -> None:
    store = reserved(sum(HostStore.bytes_of(n, 3) for n in (7, 100)))
    before = store.bytes_by_place()
    for chunk, numel in enumerate((7, 100)):
        store.create(chunk, [torch.zeros(numel)] * 3)
    assert store.bytes_by_place() == before
    store.create(2, [torch.zeros(5)])
    assert store.bytes_by_place()["host"] > before["host"]
    store.close()
    assert store.bytes_by_place() == {"host": 0}


def test_parts_of_an_arena_are_zero_apart_and_aligned() -> None:
    generator = random.Random(0)
    sizes = [generator.randint(0, 50) for _ in range(40)]
    arena = HostArena(CPU)
    arena.reserve(sum(HostArena.bytes_of(2 * n) for n in sizes))
    parts = [arena.take(n, torch.bfloat16) for n in sizes]
    for number, part in enumerate(parts):
        assert part.dtype == torch.bfloat16
        assert part.data_ptr() % 64 == 0
        assert not part.any()
        part.fill_(number)
    assert all(bool((part == number).all()) for number, part in enumerate(parts))


@pytest.mark.parametrize("kind", [DeviceParameterStore, HostParameterStore])
def test_shards_are_replaced_whole_or_in_parts_and_cast(
    kind: Callable[[torch.device], MemoryParameterStore],
) -> None:
    store = kind(CPU)
    store.create(3, torch.arange(6).bfloat16())
    store.create(5, torch.zeros(2))
    store.begin_step()
    assert torch.equal(store.get(3), torch.arange(6).bfloat16())
    store.release(3)
    store.put_part(3, 4, torch.tensor([1 / 3, 2.0]))
    store.put(5, torch.tensor([7.0, 8.0]))
    store.flush()
    expected = torch.tensor([0, 1, 2, 3, 1 / 3, 2]).bfloat16()
    assert torch.equal(store.get(3), expected)
    assert torch.equal(store.get(5), torch.tensor([7.0, 8.0]))
    assert sum(store.bytes_by_place().values()) >= 6 * 2 + 2 * 4
    store.close()


@pytest.mark.parametrize("kind", [DeviceParameterStore, HostParameterStore])
def test_a_shard_is_a_copy_of_what_was_given(
    kind: Callable[[torch.device], MemoryParameterStore],
) -> None:
    store = kind(CPU)
    value = torch.ones(4)
    store.create(0, value)
    value.zero_()
    assert torch.equal(store.get(0), torch.ones(4))
    store.close()
