"""Torch's own pipeline schedules, without running them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass
class _ScheduledStage:
    """What torch's schedules ask of a stage to work an order out; it holds no module."""

    num_stages: int
    group_size: int
    group_rank: int = 0
    submod: None = None
    stage_index_to_group_rank: dict[int, int] | None = None


def torch_schedule_order(
    class_name: str, num_ranks: int, num_microbatches: int, stages_per_rank: int
) -> tuple[tuple[str | None, ...], ...]:
    """The order of one of torch's schedules of several stages a rank, in torch's own words.

    torch works it out when a schedule is built, on stages that exist. Communication is added there
    too, which is left out here: :func:`torch_send_recv` does that when it is asked for.
    """
    from torch.distributed.pipelining import schedules

    made: Any = type(
        class_name,
        (getattr(schedules, class_name),),
        {"_prepare_schedule_with_comms": lambda *_, **__: None},
    )
    num_stages = num_ranks * stages_per_rank
    stages = [_ScheduledStage(num_stages, num_ranks) for _ in range(stages_per_rank)]
    rows = made(stages, num_microbatches).pipeline_order
    return tuple(
        tuple(None if action is None else str(action) for action in rows[rank])
        for rank in range(num_ranks)
    )


def torch_send_recv(
    order: Sequence[Sequence[str | None]], rank_of_stage: Sequence[int]
) -> tuple[tuple[str, ...], ...]:
    """``order`` with sends and receives where torch places them.

    The parts of an overlapped pair are placed one after the other, which is how torch runs them
    too unless a function for pairs is registered; so a forward is sent on before its pair's
    backward runs.
    """
    from torch.distributed.pipelining import schedules

    rows: dict[int, list[Any]] = {rank: [] for rank in range(len(order))}
    for rank, row in enumerate(order):
        for text in row:
            if text is not None:
                action: Any = schedules._Action.from_str(text)
                rows[rank] += action.sub_actions or (action,)
    placed = schedules._add_send_recv(
        rows,
        stage_to_rank=lambda stage: rank_of_stage[stage],
        num_stages=len(rank_of_stage),
    )
    return tuple(tuple(map(str, placed[rank])) for rank in sorted(placed))
