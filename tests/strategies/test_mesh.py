"""The mesh's arithmetic, by brute force over small sizes."""

import itertools

import pytest

from boltmesh.errors import LayoutError
from boltmesh.strategies.mesh import MeshLayout

LAYOUTS = [
    MeshLayout(pipeline=p, data=d, tensor=t)
    for p, d, t in itertools.product((1, 2, 3), (1, 2, 5), (1, 2, 4))
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_every_rank_has_its_own_coordinates(layout: MeshLayout) -> None:
    places = [layout.coordinates(rank) for rank in range(layout.world_size)]
    assert [layout.rank_at(**place) for place in places] == list(range(layout.world_size))


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_groups_cover_every_rank_once_and_differ_along_their_axis_alone(
    layout: MeshLayout,
) -> None:
    for axis in layout.sizes:
        groups = layout.groups(axis)
        assert sorted(rank for group in groups for rank in group) == list(range(layout.world_size))
        for group in groups:
            assert len(group) == layout.sizes[axis]
            places = [layout.coordinates(rank) for rank in group]
            assert [place[axis] for place in places] == list(range(layout.sizes[axis]))
            others = [{k: v for k, v in place.items() if k != axis} for place in places]
            assert all(other == others[0] for other in others)


def test_tensor_ranks_are_neighbours_and_pipeline_ranks_are_farthest() -> None:
    layout = MeshLayout(pipeline=2, data=2, tensor=2)
    assert layout.groups("tensor") == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert layout.groups("data") == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert layout.groups("pipeline") == [[0, 4], [1, 5], [2, 6], [3, 7]]


def test_the_data_axis_takes_the_ranks_that_are_left() -> None:
    assert MeshLayout.fill_data(world_size=12, pipeline=2, tensor=3).data == 2


def test_sizes_that_do_not_divide_are_refused_with_numbers_that_fit() -> None:
    with pytest.raises(LayoutError, match=r"needs a multiple of 6 ranks, .* 8; start 6 or 12\."):
        MeshLayout.fill_data(world_size=8, pipeline=2, tensor=3)
    with pytest.raises(LayoutError, match=r"a multiple of 4 ranks, but the job has 3; start 4\."):
        MeshLayout.fill_data(world_size=3, pipeline=4)


def test_an_empty_axis_is_refused() -> None:
    with pytest.raises(LayoutError, match="The tensor axis has size 0"):
        MeshLayout(tensor=0)


def test_an_optional_axis_is_named_only_where_it_has_ranks() -> None:
    assert MeshLayout(data=2).sizes == {"pipeline": 1, "data": 2, "tensor": 1}
    layout = MeshLayout(data=2, context=2)
    assert layout.sizes == {"pipeline": 1, "data": 2, "context": 2, "tensor": 1}
    assert layout.groups("context") == [[0, 1], [2, 3]]
    assert layout.groups("data", "context") == [[0, 1, 2, 3]]
