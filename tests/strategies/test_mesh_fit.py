"""Layouts that do not fit are refused with some that do, by brute force over small jobs."""

import itertools
import math
import re
from typing import Any

import pytest

from boltmesh.errors import LayoutError
from boltmesh.strategies.mesh import NUM_NAMED, MeshLayout, fit_layout, nearest_layouts

JOBS = [(1, 1), (2, 2), (6, 6), (7, 7), (8, 4), (12, 6), (16, 8), (24, 8)]
SIZES = (1, 2, 3, 4, 5, 8)


def named(message: str) -> list[MeshLayout]:
    found = re.findall(r"pipeline=(\d+) x data=(\d+) x tensor=(\d+)", message.split("Set ")[1])
    return [MeshLayout(pipeline=int(p), data=int(d), tensor=int(t)) for p, d, t in found]


@pytest.mark.parametrize(("world", "per_host"), JOBS)
def test_what_fits_is_taken_and_what_does_not_is_refused_with_what_does(
    world: int, per_host: int
) -> None:
    for data, pipeline, tensor in itertools.product((None, *SIZES), SIZES, SIZES):
        asked: dict[str, Any] = {"data": data, "pipeline": pipeline, "tensor": tensor}
        fits = world % (pipeline * tensor) == 0 and per_host % tensor == 0
        if data is not None:
            fits = fits and data * pipeline * tensor == world
        try:
            layout = fit_layout(world_size=world, ranks_per_host=per_host, **asked)
        except LayoutError as error:
            assert not fits, asked
            instead = named(str(error))
            assert 1 <= len(instead) <= NUM_NAMED
            for each in instead:
                again = {**each.sizes, "world_size": world, "ranks_per_host": per_host}
                assert fit_layout(**again) == each
            continue
        assert fits, asked
        assert (layout.pipeline, layout.tensor) == (pipeline, tensor)
        assert layout.world_size == world


def test_the_nearest_keep_the_pipeline_and_change_as_little_as_they_can() -> None:
    near = nearest_layouts(world_size=8, ranks_per_host=8, data=2, pipeline=2, tensor=3)
    assert near == [
        MeshLayout(pipeline=2, data=2, tensor=2),
        MeshLayout(pipeline=2, data=1, tensor=4),
    ]
    near = nearest_layouts(world_size=12, ranks_per_host=4, data=None, pipeline=5, tensor=2)
    assert near[0] == MeshLayout(pipeline=6, data=1, tensor=2)
    assert math.prod(near[0].sizes.values()) == 12


def test_only_the_axis_that_a_strategy_has_is_changed() -> None:
    with pytest.raises(LayoutError, match=r"context=3.*has 4. Set data=1 x context=4 or data=2 x"):
        fit_layout(world_size=4, ranks_per_host=4, context=3)


def test_each_error_says_what_was_asked_what_is_true_and_what_to_do() -> None:
    with pytest.raises(LayoutError, match=r"data=3 x tensor=2 needs 6 ranks, but the job has 8"):
        fit_layout(world_size=8, ranks_per_host=8, data=3, tensor=2)
    with pytest.raises(LayoutError, match=r"multiple of 3 ranks, but the job has 8.* or start 9"):
        fit_layout(world_size=8, ranks_per_host=24, tensor=3)
    with pytest.raises(LayoutError, match=r"hosts with 2 ranks each, .* Set pipeline=1 x data=4 x"):
        fit_layout(world_size=8, ranks_per_host=2, tensor=4)
    with pytest.raises(LayoutError, match="tensor=0 holds no rank"):
        fit_layout(world_size=8, ranks_per_host=2, tensor=0)
