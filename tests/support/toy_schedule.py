"""A schedule in one module: each microbatch passes through all stages and back before the next."""

from boltmesh.schedule_sim import Order, StageTimes
from boltmesh.strategies.pipeline.schedules.registry import MicrobatchRule, ScheduleKind, register


def one_by_one(num_ranks: int, num_microbatches: int, stages_per_rank: int) -> Order:
    return tuple(
        tuple(f"{rank}{kind}{at}" for at in range(num_microbatches) for kind in "FIW")
        for rank in range(num_ranks)
    )


def wait_per_rank(num_ranks: int, num_microbatches: int, times: StageTimes) -> float | None:
    is_even = times.forward == times.input_gradient == times.weight_gradient
    return 2 * num_microbatches * times.forward if is_even else None


register(
    ScheduleKind(
        "toy",
        "one microbatch after the other",
        "tests",
        one_by_one,
        instead="interleaved_1f1b",
        microbatch_rule=MicrobatchRule(
            lambda ranks, count: count % 2 == 0, lambda ranks, count: "it wants pairs"
        ),
        splits_backward=True,
        wait_per_rank=wait_per_rank,
        is_searched=True,
        live_microbatches=lambda ranks, microbatches, stages: 1,
    )
)
