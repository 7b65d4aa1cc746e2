"""A block that is not what was written has another sum."""

import pytest
import torch
from torch import Tensor

from boltmesh.strategies.offload.disk.swap_file import block_sum

PAGE = 4096


@pytest.fixture
def block() -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, 256, (16 * PAGE,), dtype=torch.uint8, generator=generator)


@pytest.mark.parametrize("bit", [1, 128])
@pytest.mark.parametrize("at", [0, 7, 12_345, 16 * PAGE - 1])
def test_a_flipped_bit_is_found(block: Tensor, at: int, bit: int) -> None:
    before = block_sum(block)
    block[at] ^= bit
    assert block_sum(block) != before


@pytest.mark.parametrize("page", range(16))
def test_a_zeroed_page_is_found(block: Tensor, page: int) -> None:
    before = block_sum(block)
    block[page * PAGE : (page + 1) * PAGE] = 0
    assert block_sum(block) != before


def test_swapped_pages_are_found(block: Tensor) -> None:
    before = block_sum(block)
    pages = block.view(16, PAGE)
    for one in range(16):
        for other in range(one):
            swapped = pages.clone()
            swapped[[one, other]] = pages[[other, one]]
            assert block_sum(swapped.view(-1)) != before


def test_a_torn_block_is_found_wherever_it_tears(block: Tensor) -> None:
    newer = block.flip(0)
    after = block_sum(newer)
    for at in range(512, 16 * PAGE, 512):
        torn = torch.cat([newer[:at], block[at:]])
        assert block_sum(torn) != after


def test_the_sum_is_the_same_for_the_same_bytes(block: Tensor) -> None:
    assert block_sum(block) == block_sum(block.clone())
