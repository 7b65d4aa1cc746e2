"""What a step moves, by the formulas of each stage."""

import pytest

from boltmesh.strategies.cost_model.model import (
    JobShape,
    ModelShape,
    ShardingLayout,
    TensorShape,
    UnitShape,
    widths_of,
)
from boltmesh.strategies.cost_model.traffic import OperatorBytes, estimate_traffic

BLOCKS, BLOCK, ROOT = 3, 48, 16
NUM_BATCHES = 3


def model(*, is_trained: bool = True) -> ModelShape:
    blocks = [
        UnitShape(f"b{at}", (TensorShape("w", (12, 4), is_trained=is_trained),))
        for at in range(BLOCKS)
    ]
    root = UnitShape("", (TensorShape("w", (4, 4)),), is_autocast=False, stays_gathered=True)
    return ModelShape("blocks", (*blocks, root))


def moved(stage: int, precision: str = "32-true", num_ranks: int = 4, **more):
    job = JobShape(num_ranks, widths_of(precision), num_microbatches=NUM_BATCHES)
    found = estimate_traffic(model(**more), ShardingLayout("zero", stage), job)
    return {each.operator: (each.calls, each.whole_bytes) for each in found}


@pytest.mark.parametrize(("precision", "width"), [("32-true", 4), ("bf16-mixed", 2)])
@pytest.mark.parametrize(
    ("stage", "gathers", "reductions"),
    [(1, (1, 1), 1), (2, (1, 1), NUM_BATCHES), (3, (2 * NUM_BATCHES, NUM_BATCHES), NUM_BATCHES)],
)
def test_stages_move_what_their_formula_says(stage, precision, width, gathers, reductions):
    of_block, of_root = gathers
    numel = BLOCKS * BLOCK
    assert moved(stage, precision) == {
        "all-gather": (
            of_block * BLOCKS + of_root,
            of_block * width * numel + of_root * 4 * ROOT,
        ),
        "reduce-scatter": (reductions * (BLOCKS + 1), reductions * 4 * (numel + ROOT)),
    }


def test_replicas_reduce_their_gradients_once():
    assert moved(0, "bf16-mixed") == {"all-reduce": (None, 4 * (BLOCKS * BLOCK + ROOT))}


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_rank_alone_moves_nothing(stage):
    assert moved(stage, num_ranks=1) == {}


def test_what_is_frozen_is_gathered_and_not_reduced():
    found = moved(3, is_trained=False)
    assert found["all-gather"] == moved(3)["all-gather"]
    assert found["reduce-scatter"] == (NUM_BATCHES, NUM_BATCHES * 4 * ROOT)


@pytest.mark.parametrize(("stage", "rounds"), [(1, 1), (2, NUM_BATCHES), (3, NUM_BATCHES)])
def test_copies_of_the_model_average_their_shards_as_often_as_they_reduce(stage, rounds):
    job = JobShape(8, widths_of("32-true"), shard_size=4, num_microbatches=NUM_BATCHES)
    *_, average = estimate_traffic(model(), ShardingLayout("zero", stage), job)
    whole = rounds * 4 * (BLOCKS * BLOCK + ROOT) // 4
    assert average == OperatorBytes("all-reduce", rounds * (BLOCKS + 1), whole, whole)


def test_rows_that_do_not_divide_are_moved_with_their_padding():
    odd = ModelShape("odd", (UnitShape("", (TensorShape("w", (7, 3)),), stays_gathered=True),))
    found = estimate_traffic(odd, ShardingLayout("zero", 1), JobShape(4, widths_of("32-true")))
    assert [each.whole_bytes for each in found] == [4 * 8 * 3] * 2
    assert [each.wire_bytes for each in found] == [3 * 2 * 3 * 4] * 2
