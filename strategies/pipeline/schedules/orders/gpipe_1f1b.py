"""GPipe and 1F1B, and their forms with several stages per rank.

torch runs GPipe and 1F1B by loops and has a separate description of each; that of 1F1B counts the
last rank's forwards from 1 (torch 2.11 to 2.13). So these two orders are made here.
"""

from boltmesh.schedule_sim import Order, StageTimes, one_forward_one_backward
from boltmesh.strategies.pipeline.schedules.registry import IN_ROUNDS, ScheduleKind, register
from boltmesh.strategies.torch_compat.schedules import torch_schedule_order


def gpipe(num_ranks: int, num_microbatches: int, stages_per_rank: int = 1) -> Order:
    """Return the order of GPipe, with one stage per rank.

    Source: Huang et al. 2019, https://arxiv.org/abs/1811.06965, section 2.3.
    """
    return tuple(
        tuple(f"{stage}{kind}{at}" for kind in "FB" for at in range(num_microbatches))
        for stage in range(num_ranks)
    )


def _wait_per_rank(num_ranks: int, num_microbatches: int, times: StageTimes) -> float:
    return times.forward + times.backward


def _wait_if_filled(num_ranks: int, num_microbatches: int, times: StageTimes) -> float | None:
    return times.forward + times.backward if num_microbatches >= num_ranks else None


def _all(num_ranks: int, num_microbatches: int, stages_per_rank: int) -> float:
    return num_microbatches


register(
    ScheduleKind(
        "gpipe",
        "all forwards, then all backwards",
        "Huang et al. 2019, https://arxiv.org/abs/1811.06965",
        gpipe,
        instead="looped_bfs",
        has_forwards_first=True,
        wait_per_rank=_wait_per_rank,
        live_microbatches=_all,
        smaller="1f1b",
        faster="zero_bubble",
    )
)
register(
    ScheduleKind(
        "1f1b",
        "one forward, one backward by turns",
        "Narayanan et al. 2021, https://arxiv.org/abs/2104.04473, section 2.2.1",
        lambda ranks, microbatches, _: one_forward_one_backward(ranks, microbatches),
        instead="interleaved_1f1b",
        wait_per_rank=_wait_per_rank,
        is_searched=True,
        faster="zero_bubble",
    )
)
register(
    ScheduleKind(
        "looped_bfs",
        "all microbatches through one stage of the rank, then through the next",
        "Lamy-Poirier 2023, https://arxiv.org/abs/2211.05953",
        torch_schedule_order("ScheduleLoopedBFS"),
        default_stages_per_rank=2,
        least_stages_per_rank=2,
        most_stages_per_rank=None,
        instead="gpipe",
        has_forwards_first=True,
        wait_per_rank=_wait_if_filled,
        live_microbatches=_all,
        smaller="interleaved_1f1b",
    )
)
register(
    ScheduleKind(
        "interleaved_1f1b",
        "1F1B in rounds over several stages of a rank",
        "Narayanan et al. 2021, https://arxiv.org/abs/2104.04473, section 2.2.2",
        torch_schedule_order("ScheduleInterleaved1F1B"),
        default_stages_per_rank=2,
        least_stages_per_rank=2,
        most_stages_per_rank=None,
        instead="1f1b",
        microbatch_rule=IN_ROUNDS,
        wait_per_rank=_wait_if_filled,
        is_searched=True,
        faster="zero_bubble",
    )
)
