"""Schedules that compute gradients of inputs and of weights separately, in torch's orders."""

from boltmesh.schedule_sim import StageTimes
from boltmesh.strategies.pipeline.schedules.registry import (
    IN_ROUNDS,
    MicrobatchRule,
    ScheduleKind,
    register,
)
from boltmesh.strategies.torch_compat.schedules import torch_schedule_order


def _wait_of_h1(num_ranks: int, num_microbatches: int, times: StageTimes) -> float | None:
    """Return the wait of ZB-H1, if a weight gradient fits into its gap."""
    weight = times.weight_gradient
    if num_microbatches < num_ranks or weight > min(times.forward, times.input_gradient):
        return None
    return times.forward + times.input_gradient - weight


def _wait_of_v(num_ranks: int, num_microbatches: int, times: StageTimes) -> float | None:
    """Return the wait of ZB-V with equal times.

    Its ranks have no gap of their own; over the common window the last one begins ``p - 1``
    forwards late.
    """
    is_even = times.forward == times.input_gradient == times.weight_gradient
    return times.forward if is_even and num_microbatches >= 2 * num_ranks - 1 else None


register(
    ScheduleKind(
        "zero_bubble",
        "1F1B, with the gradients of weights computed where a rank would wait (ZB-H1)",
        "Qi et al. 2023, https://arxiv.org/abs/2401.10241, section 2.1",
        torch_schedule_order("ScheduleInterleavedZeroBubble"),
        most_stages_per_rank=None,
        microbatch_rule=IN_ROUNDS,
        splits_backward=True,
        wait_per_rank=_wait_of_h1,
        is_searched=True,
        bubble_over_1f1b=0.42,
        faster="zbv",
    )
)
register(
    ScheduleKind(
        "zbv",
        "two stages a rank in a V, with the gradients of weights in the gaps (ZB-V)",
        "Qi et al. 2023, https://arxiv.org/abs/2401.10241, section 6",
        torch_schedule_order("ScheduleZBVZeroBubble"),
        default_stages_per_rank=2,
        least_stages_per_rank=2,
        most_stages_per_rank=2,
        instead="zero_bubble",
        splits_backward=True,
        wait_per_rank=_wait_of_v,
        is_searched=True,
        bubble_over_1f1b=0.03,
        live_microbatches=lambda ranks, microbatches, _: min(ranks, microbatches),
    )
)
register(
    ScheduleKind(
        "dualpipev",
        "two stages a rank in a V, forwards paired with backwards of other microbatches",
        "DeepSeek-AI 2024, https://arxiv.org/abs/2412.19437, section 3.2.1, and "
        "https://github.com/deepseek-ai/DualPipe",
        torch_schedule_order("ScheduleDualPipeV"),
        default_stages_per_rank=2,
        least_stages_per_rank=2,
        most_stages_per_rank=2,
        instead="zero_bubble",
        microbatch_rule=MicrobatchRule(
            lambda ranks, count: count >= 2 * ranks,
            lambda ranks, _: f"it needs at least as many as there are stages, {2 * ranks}",
        ),
        splits_backward=True,
        note="a forward and a backward that may run side by side are shown one after the other",
    )
)
