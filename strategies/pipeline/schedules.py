"""The orders that run and are drawn: torch's own, but for those that torch gets wrong.

torch runs GPipe and 1F1B by loops and describes them apart from that; its description of 1F1B
counts the last rank's forwards from 1 (torch 2.11 to 2.13). So these two are made here, and
PipeDream-2BW, which torch does not have. All others are read from torch's classes, and torch is
loaded for those only.
"""

from collections.abc import Callable

from boltmesh.errors import ConfigError
from boltmesh.strategies.pipeline.asynchronous import pipedream_2bw, with_messages
from boltmesh.strategies.pipeline.kinds import check_schedule
from boltmesh.strategies.pipeline.table import ScheduleTable as ScheduleTable
from boltmesh.strategies.pipeline.table import owners
from boltmesh.strategies.pipeline.verify import check_communication, check_order
from boltmesh.telemetry.schedule import (
    NOMINAL,
    Order,
    carried,
    gpipe,
    one_forward_one_backward,
    simulate,
)

_OWN: dict[str, Callable[[int, int], Order]] = {
    "gpipe": gpipe,
    "1f1b": one_forward_one_backward,
    "pipedream_2bw": pipedream_2bw,
}
_OF_TORCH = {
    "looped_bfs": "ScheduleLoopedBFS",
    "interleaved_1f1b": "ScheduleInterleaved1F1B",
    "zero_bubble": "ScheduleInterleavedZeroBubble",
    "zbv": "ScheduleZBVZeroBubble",
    "dualpipev": "ScheduleDualPipeV",
}


def schedule_table(
    name: str, *, num_ranks: int, num_microbatches: int, stages_per_rank: int | None = None
) -> ScheduleTable:
    """Work a schedule out.

    Args:
        name: gpipe, 1f1b, looped_bfs, interleaved_1f1b, zero_bubble, zbv, dualpipev or
            pipedream_2bw.
        num_ranks: Of the pipeline.
        num_microbatches: Of one optimizer step.
        stages_per_rank: None for what is usual with this schedule: 1, or 2 where it is made for
            several.

    Raises:
        ConfigError: The schedule does not have these sizes; says which ones it has.
    """
    size = check_schedule(
        name,
        num_ranks=num_ranks,
        num_microbatches=num_microbatches,
        stages_per_rank=stages_per_rank,
    )
    if name in _OWN:
        order = _OWN[name](num_ranks, num_microbatches)
    else:
        from boltmesh.strategies.torch_compat import torch_schedule_order

        order = torch_schedule_order(_OF_TORCH[name], num_ranks, num_microbatches, size)
    table = ScheduleTable(
        name=name,
        num_ranks=num_ranks,
        num_stages=num_ranks * size,
        num_microbatches=num_microbatches,
        order=order,
        rank_of_stage=tuple(rank for _, rank in sorted(owners(order).items())),
    )
    try:
        check_order(table)
    except ValueError as error:
        raise ConfigError(
            f"This torch gives an order for schedule={name} that cannot be run: {error}. "
            f"Set schedule=1f1b."
        ) from error
    return table


def with_communication(table: ScheduleTable) -> tuple[tuple[str, ...], ...]:
    """Return what each rank computes, sends and receives, in torch's order.

    ``0SEND_F3`` sends what stage 0 made of microbatch 3 to the rank of stage 1, which has
    ``1RECV_F3`` for it; ``1SEND_B3`` and ``0RECV_B3`` carry the gradient back. Between stages of
    one rank nothing is sent. Overlapped pairs are taken apart, the forward first. All sends and
    receives of a pair of ranks stand in the same order on both, so that even ranks which hold still
    until their peer has come get through.

    Raises:
        ConfigError: Ranks that do as torch places it could wait for each other for good.
    """
    if carried(table.order):
        timetable = simulate(table.order, lambda action: NOMINAL[action.kind])
        return tuple(
            tuple(f"{stage}{kind}{at}" for stage, kind, at in row)
            for row in with_messages(timetable)
        )
    from boltmesh.strategies.torch_compat import torch_send_recv

    rows = torch_send_recv(table.order, table.rank_of_stage)
    try:
        for is_buffered in (False, True):
            check_communication(rows, table.rank_of_stage, is_buffered=is_buffered)
    except ValueError as error:
        raise ConfigError(
            f"This torch places the messages of schedule={table.name} so that ranks do not get "
            f"through: {error}. Install a torch that boltmesh is tested with, such as 2.13."
        ) from error
    return rows
