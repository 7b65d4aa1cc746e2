"""Weights in tiles: which ones, what of them is there at a time, and what they move."""

import pytest

from boltmesh.strategies.cost_model.memory import estimate_memory
from boltmesh.strategies.cost_model.model import (
    JobShape,
    ModelShape,
    ShardingLayout,
    TensorShape,
    UnitShape,
    widths_of,
)
from boltmesh.strategies.cost_model.traffic import InFlightMemory, estimate_traffic

LARGE = TensorShape("block.large", (20, 8), layers=("product",), is_multiplied=True)
SMALL = TensorShape("block.small", (4, 8), layers=("product",), is_multiplied=True)
TABLE = TensorShape("table", (30, 8), layers=("lookup",))
OTHER = TensorShape("other", (100, 8))
TILE_BYTES = 4 * 8 * 8
"""Eight rows in fp32: on two ranks four of each shard."""


def model() -> ModelShape:
    root = UnitShape("", (TABLE, OTHER), is_autocast=False, stays_gathered=True)
    return ModelShape("tiled", (UnitShape("block", (LARGE, SMALL)), root))


def job(num_ranks: int = 2, **more) -> JobShape:
    return JobShape(num_ranks, widths_of("bf16-mixed"), **more)


def test_weights_of_plain_layers_above_the_limit_become_units():
    tiled = model().in_tiles(TILE_BYTES)
    assert [(each.name, [t.name for t in each.tensors]) for each in tiled.units] == [
        ("block.large", ["block.large"]),
        ("block", ["block.small"]),
        ("table", ["table"]),
        ("", ["other"]),
    ]
    assert tiled.numel == model().numel
    assert tiled.in_tiles(TILE_BYTES) == tiled
    assert model().in_tiles(None) == model()


@pytest.mark.parametrize(("num_ranks", "rows", "count"), [(2, 8, 3), (3, 6, 4)])
def test_two_tiles_are_gathered_at_a_time(num_ranks, rows, count):
    made = job(num_ranks)
    large, table = InFlightMemory(model().in_tiles(TILE_BYTES).units, made).tiles
    assert large.plan.count == count
    assert large.forward() == 2 * rows * 8 * 2, "autocast gathers factors in bf16"
    assert table.forward() >= 2 * rows * 8 * 4, "and what is looked up in fp32"
    assert large.backward() == large.forward() + 2 * rows * 8 * 4


def test_a_rank_alone_copies_only_what_it_casts():
    large, table = InFlightMemory(model().in_tiles(TILE_BYTES).units, job(1)).tiles
    assert large.forward() == 7 * 8 * 2
    assert table.forward() == 0


def test_the_peak_has_tiles_in_place_of_whole_weights():
    whole = estimate_memory(model(), ShardingLayout("zero3", 3), job())
    tiled = estimate_memory(model(), ShardingLayout("zero3", 3, tile_bytes=TILE_BYTES), job())
    assert tiled.kept == whole.kept
    assert tiled.peak.device < whole.peak.device


def test_a_product_is_gathered_twice_and_a_lookup_once():
    def moved(tile_bytes: int | None) -> dict[str, tuple[int | None, int]]:
        sharing = ShardingLayout("zero3", 3, tile_bytes=tile_bytes)
        found = estimate_traffic(model(), sharing, job(num_microbatches=3))
        return {each.operator: (each.calls, each.whole_bytes) for each in found}

    block, root = 2 * 32 * 2, 4 * 800
    assert moved(TILE_BYTES) == {
        "all-gather": (
            3 * (2 + 1 + 2 * 3 + 4),
            3 * (block + root + 2 * 160 * 2 + 240 * 4),
        ),
        "reduce-scatter": (3 * (2 + 3 + 4), 3 * 4 * (32 + 800 + 160 + 240)),
    }


def test_copies_of_the_model_average_every_gradient_in_every_backward_pass():
    made = job(4, shard_size=2, num_microbatches=3)
    sharing = ShardingLayout("zero3", 3, tile_bytes=TILE_BYTES)
    average = estimate_traffic(model(), sharing, made)[-1]
    assert average.operator == "all-reduce"
    assert average.calls == 3 * (2 + 2)
    assert average.whole_bytes == 3 * 4 * (32 + 800 + 160 + 240) // 2
