"""An arena gives out what is free, and nothing twice."""

import random

import pytest
import torch
from torch import Tensor

from boltmesh.strategies.offload.host_memory import RangeAllocator


@pytest.mark.parametrize("seed", range(5))
def test_parts_never_overlap_and_all_of_it_comes_back(seed: int) -> None:
    chance = random.Random(seed)
    memory = torch.zeros(997, dtype=torch.uint8)
    arena = RangeAllocator(memory)
    taken: list[tuple[int, Tensor]] = []
    for number in range(1, 200):
        part = arena.take(chance.randint(1, 300))
        if part is not None:
            assert not part.any()
            part.fill_(number)
            taken.append((number, part))
        while taken and (part is None or chance.random() < 0.4):
            mark, old = taken.pop(chance.randrange(len(taken)))
            assert (old == mark).all()
            old.zero_()
            arena.give_back(old)
            part = old
    for _, part in taken:
        arena.give_back(part)
    whole = arena.take(997)
    assert whole is not None
    assert whole.data_ptr() == memory.data_ptr()


def test_what_does_not_fit_is_none() -> None:
    arena = RangeAllocator(torch.zeros(10, dtype=torch.uint8))
    assert arena.take(11) is None
    assert arena.take(10) is not None
    assert arena.take(1) is None


def test_an_arena_knows_its_own_parts() -> None:
    arena = RangeAllocator(torch.zeros(10, dtype=torch.uint8))
    part = arena.take(4)
    assert part is not None
    assert arena.owns(part)
    assert not arena.owns(torch.zeros(4, dtype=torch.uint8))


def test_an_arena_of_nothing_gives_nothing() -> None:
    assert RangeAllocator(torch.zeros(0, dtype=torch.uint8)).take(1) is None
