"""The formulas of the stages, by hand and as their paper has them."""

from dataclasses import replace

import pytest

from boltmesh.strategies.cost_model.memory import BackwardPass, estimate_memory
from boltmesh.strategies.cost_model.model import (
    Activations,
    JobShape,
    ModelShape,
    ShardingLayout,
    TensorShape,
    UnitShape,
    widths_of,
)
from boltmesh.strategies.cost_model.traffic import InFlightMemory

NUM_BLOCKS = 1000
BLOCK = 64 * 10


def many_blocks() -> ModelShape:
    """So many blocks that one in flight is a thousandth of the model."""
    units = [UnitShape(f"{at}", (TensorShape("w", (64, 10)),)) for at in range(NUM_BLOCKS)]
    return ModelShape("blocks", tuple(units))


def job(num_ranks: int, precision: str = "32-true", **more) -> JobShape:
    return JobShape(num_ranks, widths_of(precision), **more)


@pytest.mark.parametrize("num_ranks", [1, 2, 4, 8])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_between_steps_everything_is_a_share(stage, num_ranks):
    kept = estimate_memory(
        many_blocks(), ShardingLayout("zero", stage), job(num_ranks)
    ).between_steps
    assert kept.device == 16 * NUM_BLOCKS * BLOCK / num_ranks
    assert kept.host == kept.disk == 0


@pytest.mark.parametrize("num_ranks", [2, 4, 8])
@pytest.mark.parametrize(
    ("stage", "precision", "whole", "share"),
    [
        # Bytes for each parameter that is held whole, and for each of the shares. Beside the
        # paper's terms fully_shard keeps its shard next to what is gathered.
        (1, "32-true", 8, 12),
        (2, "32-true", 4, 16),
        (3, "32-true", 0, 16),
        (1, "bf16-mixed", 6, 12),
        (2, "bf16-mixed", 2, 16),
        (3, "bf16-mixed", 0, 16),
    ],
)
def test_the_peak_is_the_papers_when_batches_are_accumulated(
    stage, precision, whole, share, num_ranks
):
    made = job(num_ranks, precision, num_microbatches=3)
    peak = estimate_memory(many_blocks(), ShardingLayout("zero", stage), made).peak.device
    expected = (whole + share / num_ranks) * NUM_BLOCKS * BLOCK
    assert expected <= peak <= expected + 5 * 4 * BLOCK


def test_replicas_hold_everything_once_and_accumulated_gradients_beside_their_buckets():
    whole = NUM_BLOCKS * BLOCK
    memory = estimate_memory(many_blocks(), ShardingLayout("ddp", 0), job(4))
    assert memory.kept["parameters"].device == 4 * whole
    assert memory.between_steps.device == memory.peak.device == 16 * whole
    accumulated = estimate_memory(
        many_blocks(), ShardingLayout("ddp", 0), job(4, num_microbatches=2)
    )
    assert accumulated.between_steps.device == 16 * whole
    assert accumulated.peak.device == 20 * whole


@pytest.mark.parametrize(
    ("sharing", "made", "reads"),
    [
        (ShardingLayout("ddp", 0, keeps_in_buckets=False), job(4), False),
        (ShardingLayout("ddp", 0), job(4, reads_gradients=True), False),
        (ShardingLayout("ddp", 0), job(4), True),
    ],
)
def test_replicas_whose_gradients_are_looked_at_have_them_beside_their_buckets(
    sharing, made, reads
):
    whole = NUM_BLOCKS * BLOCK
    memory = estimate_memory(replace(many_blocks(), reads_gradients=reads), sharing, made)
    assert memory.between_steps.device == 16 * whole
    assert memory.peak.device == 20 * whole
    in_buckets = replace(sharing, keeps_in_buckets=True)
    memory = estimate_memory(many_blocks(), in_buckets, made)
    assert memory.peak.device == 16 * whole


@pytest.mark.parametrize("stage", [1, 2])
def test_gradients_that_the_model_zeroes_itself_are_there_beside_what_is_gathered(stage):
    model = replace(many_blocks(), keeps_gradients=True)
    whole = NUM_BLOCKS * BLOCK
    sharing = ShardingLayout("zero", stage)
    freed, kept = (estimate_memory(each, sharing, job(2)) for each in (many_blocks(), model))
    assert kept.moments["forward pass"] - freed.moments["forward pass"] == 4 * whole / 2


@pytest.mark.parametrize(("stage", "shares"), [(1, 8 + 8 / 1), (2, 4 + 12 / 1)])
def test_gradients_of_the_last_step_are_not_there_beside_what_is_gathered(stage, shares):
    memory = estimate_memory(many_blocks(), ShardingLayout("zero", stage), job(1))
    assert memory.peak.device == pytest.approx(shares * NUM_BLOCKS * BLOCK, rel=0.01)
    offloaded = ShardingLayout("zero_cpu", stage, {"host": 0.5})
    moments = estimate_memory(many_blocks(), offloaded, job(1)).moments
    assert moments["forward pass"] > moments["optimizer step"], "there the engine has them"


def test_shards_of_rows_that_do_not_divide_are_padded():
    model = ModelShape("odd", (UnitShape("", (TensorShape("w", (7, 3)),), stays_gathered=True),))
    kept = estimate_memory(model, ShardingLayout("zero", 3), job(4)).kept
    assert kept["parameters"].device == 4 * 2 * 3
    assert kept["optimizer"].device == 2 * 4 * 2 * 3


def test_frozen_parameters_have_no_gradient_and_no_state():
    frozen = TensorShape("frozen", (8, 4), is_trained=False)
    model = ModelShape("half", (UnitShape("a", (frozen, TensorShape("w", (8, 4)))),))
    kept = estimate_memory(model, ShardingLayout("zero", 3), job(2)).kept
    assert kept["parameters"].device == 2 * kept["gradients"].device == 4 * 32
    assert kept["optimizer"].device == 2 * kept["gradients"].device


def test_copies_of_the_model_are_sharded_over_fewer_ranks():
    whole = estimate_memory(many_blocks(), ShardingLayout("zero", 3), job(8, shard_size=2))
    assert whole.kept == estimate_memory(many_blocks(), ShardingLayout("zero", 3), job(2)).kept


def test_another_optimizer_keeps_what_it_keeps():
    memory = estimate_memory(many_blocks(), ShardingLayout("zero", 3), job(2, state_copies=0))
    assert memory.kept["optimizer"].device == 0


def three_blocks() -> list[UnitShape]:
    """Blocks of 10, 30 and 20 elements and a root of 5, gathered in bf16 and reduced in fp32."""
    sizes = {"a": 10, "b": 30, "c": 20}
    units = [UnitShape(name, (TensorShape("w", (numel,)),)) for name, numel in sizes.items()]
    root = UnitShape("", (TensorShape("w", (5,)),), is_autocast=False, stays_gathered=True)
    return [*units, root]


def test_a_forward_pass_by_hand():
    flight = InFlightMemory(three_blocks(), job(5, "bf16-mixed"))
    # The root in fp32; then b's gather and the copy of it, bf16.
    assert flight.forward(is_freed=True) == 4 * 5 + 2 * (2 * 30)
    # All of them, and the output of the largest gather.
    assert flight.forward(is_freed=False) == 2 * 60 + 4 * 5 + 2 * 30


def backward(
    stage: int, *, saved: int = 0, transient: int = 0, is_accumulated: bool = False
) -> int:
    """Of the same model; this rank's shares of the gradients take 96 bytes."""
    return BackwardPass(
        InFlightMemory(three_blocks(), job(5, "bf16-mixed")),
        Activations(saved, transient, "by hand"),
        stage=stage,
        is_accumulated=is_accumulated,
        gradients=96,
    ).most()


def test_the_backward_pass_by_hand():
    root = 4 * 5 + 4 * 5  # gathered, and its gradient
    # b's gradient is complete: b and its gradient, a gathered ahead, the input of c's reduction,
    # and this rank's share of c's gradient.
    assert backward(3) == root + 2 * 30 + 2 * 30 + 2 * 10 + 4 * 20 + 96 // 3
    # With activations it is when c's backward begins, b gathered ahead.
    assert backward(3, saved=3000) == root + 2 * 20 + 2 * 30 + 3000
    # Everything is gathered; before the first gradient there are temporary results.
    assert backward(2, transient=10**4) == 2 * 60 + 4 * 5 + 10**4
    # Whole gradients in fp32, and the input of c's reduction, with c's parameters freed.
    assert backward(1, is_accumulated=True) == (2 * 40 + 4 * 5) + 4 * 65 + 4 * 20


def test_a_rank_alone_gathers_by_copying_once():
    flight = InFlightMemory(many_blocks().units, job(1))
    assert flight.forward(is_freed=True) == 4 * BLOCK


def test_activations_count_where_they_are_alive():
    small = many_blocks()
    large = ModelShape("act", small.units, activations=Activations(10**9, 10**8, "said so"))
    before = estimate_memory(small, ShardingLayout("zero", 3), job(4)).moments
    after = estimate_memory(large, ShardingLayout("zero", 3), job(4)).moments
    more = {name: after[name] - before[name] for name in before}
    assert more["forward pass"] == 10**9
    assert more["backward pass"] == pytest.approx(1.1e9, rel=1e-3)
    assert more["optimizer step"] == 0


def test_autocast_copies_what_is_not_gathered_in_its_type():
    multiplied = TensorShape("w", (8, 4), is_multiplied=True)
    block, root = UnitShape("a", (multiplied,)), UnitShape("", (multiplied,), is_autocast=False)
    model = ModelShape("cast", (block, root))
    one = estimate_memory(model, ShardingLayout("ddp", 0), job(2, "bf16-mixed")).moments[
        "forward pass"
    ]
    other = estimate_memory(model, ShardingLayout("ddp", 0), job(2)).moments["forward pass"]
    assert one - other == 2 * 64
    parts = [UnitShape("", (TensorShape("w", (8, 4)),), is_autocast=False)]
    without = estimate_memory(
        ModelShape("cast", (block, *parts)), ShardingLayout("zero", 3), job(2, "bf16-mixed")
    )
    with_root = estimate_memory(model, ShardingLayout("zero", 3), job(2, "bf16-mixed"))
    assert with_root.moments["forward pass"] - without.moments["forward pass"] == 2 * 32


def test_on_a_cpu_device_and_host_are_one():
    memory = estimate_memory(
        many_blocks(), ShardingLayout("zero_cpu", 3, {"host": 0.5}, "host"), job(4, is_on_host=True)
    )
    assert memory.peak.device == memory.between_steps.device == 0
    assert memory.peak.host == max(memory.moments.values())
