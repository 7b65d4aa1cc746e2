"""Torch's own pipeline schedules, without running them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from boltmesh.schedule_sim import Order


@dataclass
class _ScheduledStage:
    """Attributes that torch's schedules read from a stage to build an order; without a module."""

    num_stages: int
    group_size: int
    group_rank: int = 0
    submod: None = None
    stage_index_to_group_rank: dict[int, int] | None = None


def torch_schedule_order(class_name: str) -> Callable[[int, int, int], Order]:
    """Return the order of a torch class as a function of ranks, microbatches and stages per rank.

    torch builds the order with the schedule, on existing stages, and adds communication. Here that
    is left out: :func:`torch_send_recv` adds it. The returned function imports torch.
    """

    def order(num_ranks: int, num_microbatches: int, stages_per_rank: int) -> Order:
        from torch.distributed.pipelining import schedules

        schedule_class: Any = type(
            class_name,
            (getattr(schedules, class_name),),
            {"_prepare_schedule_with_comms": lambda *_, **__: None},
        )
        num_stages = num_ranks * stages_per_rank
        stages = [_ScheduledStage(num_stages, num_ranks) for _ in range(stages_per_rank)]
        rows = schedule_class(stages, num_microbatches).pipeline_order
        return tuple(
            tuple(None if action is None else str(action) for action in rows[rank])
            for rank in range(num_ranks)
        )

    return order


def torch_send_recv(
    order: Sequence[Sequence[str | None]], rank_of_stage: Sequence[int]
) -> tuple[tuple[str, ...], ...]:
    """Return ``order`` with sends and receives where torch places them.

    The parts of an overlapped pair are placed one after the other, which is also how torch runs
    them unless a function for pairs is registered; so a forward's result is sent before its pair's
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
