"""How the data axis is cut into groups that shard and copies of them."""

import pytest

from boltmesh.errors import LayoutError
from boltmesh.strategies.data_parallel.shard_mesh import choose_shard_size

EIGHT = list(range(8))


@pytest.mark.parametrize(
    ("ranks", "asked", "ranks_per_node", "size"),
    [
        (EIGHT, None, 4, 8),
        (EIGHT, 2, 4, 2),
        (EIGHT, 8, 4, 8),
        (EIGHT, 1, 4, 1),
        (EIGHT, "node", 4, 4),
        (EIGHT, "node", 8, 8),
        ([0, 2, 4, 6], "node", 4, 2),  # every second rank: a tensor axis of 2 lies within
        ([3], "node", 4, 1),
    ],
)
def test_a_copy_is_sharded_over_what_was_asked(
    ranks: list[int], asked: int | str | None, ranks_per_node: int, size: int
) -> None:
    assert choose_shard_size(ranks, asked, ranks_per_node) == size


def test_groups_of_unequal_size_are_refused_with_sizes_that_fit() -> None:
    with pytest.raises(LayoutError, match=r"shard_size=3 cuts the 8 ranks .* Use 1 or 2 or 4 or 8"):
        choose_shard_size(EIGHT, 3, 4)


def test_nodes_with_different_numbers_of_ranks_are_refused() -> None:
    with pytest.raises(LayoutError, match=r"there are 3, 2\. Use a number that divides 5"):
        choose_shard_size(list(range(5)), "node", 3)
