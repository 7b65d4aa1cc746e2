"""Lists of actions for tests, as torch's own schedules write them."""

from typing import Any

from torch.distributed.pipelining import schedules

from boltmesh.strategies.pipeline.schedules.actions import RankProgram

NAMES = ("gpipe", "1f1b", "looped_bfs", "interleaved_1f1b", "zero_bubble", "zbv", "dualpipev")

_CLASSES: dict[str, Any] = {
    "looped_bfs": schedules.ScheduleLoopedBFS,
    "interleaved_1f1b": schedules.ScheduleInterleaved1F1B,
    "zero_bubble": schedules.ScheduleInterleavedZeroBubble,
    "zbv": schedules.ScheduleZBVZeroBubble,
    "dualpipev": schedules.ScheduleDualPipeV,
}


class _MockStage:
    """What a schedule asks of a stage before it runs."""

    def __init__(self, index: int, num_stages: int, num_ranks: int) -> None:
        self.stage_index, self.num_stages = index, num_stages
        self.group_size, self.group_rank = num_ranks, 0
        self.is_first, self.is_last = index == 0, index == num_stages - 1
        self.submod: Any = None
        self.has_backward = True


def order(name: str, num_ranks: int, num_microbatches: int) -> list[list[str]]:
    """What each rank computes."""
    everything = range(num_microbatches)
    if name == "gpipe":
        return [
            [f"{rank}F{each}" for each in everything] + [f"{rank}B{each}" for each in everything]
            for rank in range(num_ranks)
        ]
    if name == "1f1b":
        rows = []
        for rank in range(num_ranks):
            ahead = min(num_ranks - rank, num_microbatches)
            row = [f"{rank}F{each}" for each in range(ahead)]
            for each in everything:
                row.append(f"{rank}B{each}")
                if each + ahead < num_microbatches:
                    row.append(f"{rank}F{each + ahead}")
            rows.append(row)
        return rows
    kind = type("Listed", (_CLASSES[name],), {"_prepare_schedule_with_comms": lambda *_, **__: 0})
    stages = [_MockStage(index, 2 * num_ranks, num_ranks) for index in range(2)]
    listed: dict[int, list[Any]] = kind(stages, num_microbatches).pipeline_order
    return [[str(each) for each in listed[rank] if each is not None] for rank in range(num_ranks)]


def programs(name: str, num_ranks: int, num_microbatches: int) -> list[RankProgram]:
    """The program of each rank, with communication where torch places it."""
    rows = order(name, num_ranks, num_microbatches)
    num_stages = num_ranks * (1 if name in {"gpipe", "1f1b"} else 2)
    if name in {"zbv", "dualpipev"}:
        rank_of_stage = [min(each, num_stages - 1 - each) for each in range(num_stages)]
    else:
        rank_of_stage = [each % num_ranks for each in range(num_stages)]
    placed = schedules._add_send_recv(
        {rank: [schedules._Action.from_str(each) for each in row] for rank, row in enumerate(rows)},
        stage_to_rank=lambda stage: rank_of_stage[stage],
        num_stages=num_stages,
    )
    return [
        RankProgram.parse(
            [str(each) for each in placed[rank]], rank=rank, rank_of_stage=rank_of_stage
        )
        for rank in range(num_ranks)
    ]
