"""What one rank has to do in a step, read from the actions of a schedule.

Actions are written as torch writes them: ``0F3`` is the forward pass of microbatch 3 in stage 0,
``B`` a whole backward pass, ``I`` and ``W`` its halves (of the inputs, of the weights), and
``0SEND_F3``, ``1RECV_F3``, ``1SEND_B3``, ``0RECV_B3`` hand over values and gradients.

The actions of this rank for any number of microbatches.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final, NamedTuple

from typing_extensions import override

from boltmesh.errors import ConfigError
from boltmesh.strategies.pipeline.options import PipelineOptions
from boltmesh.strategies.pipeline.schedules.bubble import peak_live_bytes
from boltmesh.strategies.pipeline.schedules.orders import (
    asynchronous_timetable,
    leaves_work,
    schedule_table,
    with_communication,
    with_messages,
)
from boltmesh.strategies.pipeline.schedules.registry import ScheduleTable, schedule_kind
from boltmesh.telemetry.schedule import Order

SENDS: Final = frozenset({"SEND_F", "SEND_B"})
RECEIVES: Final = frozenset({"RECV_F", "RECV_B"})
BACKWARD: Final = frozenset({"B", "I", "W"})

_ACTION: Final = re.compile(r"(\d+)(SEND_F|RECV_F|SEND_B|RECV_B|F|B|I|W)(\d+)")
_OVERLAPPED: Final = re.compile(r"\(([^()]+)\)OVERLAP_F_B")
_OF_FORWARD: Final = frozenset({"F", "SEND_F", "RECV_F"})


class Action(NamedTuple):
    """One thing to do with one microbatch in one stage."""

    stage: int
    kind: str
    microbatch: int

    @override
    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"


def parse_actions(texts: Sequence[str]) -> tuple[Action, ...]:
    """Read a list of actions; an overlapped pair, ``(0F3;1B0)OVERLAP_F_B``, is its parts in order.

    Raises:
        ValueError: One of them is none that the executor can do.
    """
    actions = []
    for text in texts:
        pair = _OVERLAPPED.fullmatch(text)
        for part in pair[1].split(";") if pair else (text,):
            match = _ACTION.fullmatch(part.strip())
            if match is None:
                raise ValueError(
                    f"cannot run the action {text!r}: it is none of F, B, I, W, SEND_F, RECV_F, "
                    "SEND_B, RECV_B and OVERLAP_F_B with a stage before and a microbatch behind"
                )
            actions.append(Action(int(match[1]), match[2], int(match[3])))
    return tuple(actions)


@dataclass(frozen=True)
class RankProgram:
    """The actions of one rank, and where the stages are.

    Ranks count within the group of the pipeline axis. The order in which a rank posts its messages
    is that of its actions, so lists in which sends and receives of any two ranks come in orders
    that fit each other, as torch's do, cannot lock up however messages are carried.
    """

    rank: int
    rank_of_stage: tuple[int, ...]
    actions: tuple[Action, ...]
    num_before: int = 0
    """Microbatches of the batch before, where backward passes of it are done in this step; they
    count from its end, -1 being the last."""
    carries: bool = False
    """Whether backward passes of this step's batch are left to the next one, on some rank."""

    @classmethod
    def parse(
        cls, texts: Sequence[str], *, rank: int, rank_of_stage: Sequence[int]
    ) -> "RankProgram":
        """Read the list of one rank.

        Raises:
            ValueError: An action is unknown, or of a stage that another rank has.
        """
        program = cls(rank, tuple(rank_of_stage), parse_actions(texts))
        for action in program.actions:
            if action.stage not in program.stages:
                raise ValueError(
                    f"cannot run the action {action} on rank {rank} of the pipeline: its stages "
                    f"are {', '.join(map(str, program.stages)) or 'none'}"
                )
        return program

    @cached_property
    def stages(self) -> tuple[int, ...]:
        """The stages of this rank."""
        return tuple(stage for stage, rank in enumerate(self.rank_of_stage) if rank == self.rank)

    @cached_property
    def microbatches(self) -> tuple[int, ...]:
        """The numbers of the step's microbatches, without those of the batch before."""
        return tuple(sorted({each.microbatch for each in self.actions if each.microbatch >= 0}))

    @cached_property
    def has_backward(self) -> bool:
        """Whether anything is differentiated, now or in the next step."""
        return self.carries or any(action.kind in BACKWARD for action in self.actions)

    @cached_property
    def forward_only(self) -> "RankProgram":
        """The same without backward passes: for validation and prediction."""
        kept = tuple(action for action in self.actions if action.kind in _OF_FORWARD)
        return RankProgram(self.rank, self.rank_of_stage, kept)

    def number(self, action: Action) -> int:
        """Return the number of an action's microbatch in its own batch."""
        return action.microbatch % self.num_before if action.microbatch < 0 else action.microbatch

    def is_local(self, stage: int) -> bool:
        """Whether this rank has the stage, so that handing it a value takes no message."""
        return 0 <= stage < len(self.rank_of_stage) and self.rank_of_stage[stage] == self.rank

    def peer(self, action: Action) -> int:
        """Return the rank at the other end of a send or a receive."""
        to_next = action.kind in {"SEND_F", "RECV_B"}
        return self.rank_of_stage[action.stage + (1 if to_next else -1)]


class RankPrograms:
    """Works schedules out as batches ask for them: a last batch may have too few rows for all.

    Args:
        options: What the user chose.
        num_ranks: Of the pipeline.
        rank: This one, within it.
    """

    def __init__(self, options: PipelineOptions, num_ranks: int, rank: int) -> None:
        self._options = options
        self._num_ranks = num_ranks
        self._rank = rank
        self._tables: dict[int, ScheduleTable] = {}
        self._programs: dict[int, RankProgram] = {}
        self._between: dict[tuple[int, int], RankProgram] = {}
        self.is_asynchronous = schedule_kind(options.schedule).is_asynchronous
        whole = self._table(options.num_microbatches(num_ranks))
        self.num_stages = whole.num_stages
        self.rank_of_stage = whole.rank_of_stage

    def asynchronous(self, before: int, now: int) -> RankProgram:
        """Return what this rank does in a step that goes on with the batch before.

        Args:
            before: Microbatches of that one, of which backward passes are left; 0: there are none.
            now: Microbatches of the step's own batch; 0: nothing but what is left is done.
        """
        if (before, now) not in self._between:
            timetable = asynchronous_timetable(self._num_ranks, before=before, now=now)
            self._between[before, now] = RankProgram(
                self._rank,
                self.rank_of_stage,
                tuple(Action(*each) for each in with_messages(timetable)[self._rank]),
                num_before=before if leaves_work(self._num_ranks, before) else 0,
                carries=leaves_work(self._num_ranks, now),
            )
        return self._between[before, now]

    def of(self, num_microbatches: int) -> RankProgram:
        """Return what this rank does in a step with so many microbatches.

        Where steps take each other's gaps, in one between two others of its size.
        """
        if self.is_asynchronous:
            return self.asynchronous(num_microbatches, num_microbatches)
        if num_microbatches not in self._programs:
            table = self._table(num_microbatches)
            self._programs[num_microbatches] = RankProgram.parse(
                with_communication(table)[self._rank],
                rank=self._rank,
                rank_of_stage=table.rank_of_stage,
            )
        return self._programs[num_microbatches]

    def live(self, num_microbatches: int) -> tuple[int, ...]:
        """Return how many microbatches each stage keeps at once at most."""
        order = self._table(num_microbatches).order
        return tuple(
            peak_live_bytes(order[rank], [int(each == stage) for each in range(self.num_stages)])
            for stage, rank in enumerate(self.rank_of_stage)
        )

    def order(self, num_microbatches: int) -> Order:
        """Return what all ranks compute, as telemetry shows it."""
        return self._table(num_microbatches).order

    def _table(self, num_microbatches: int) -> ScheduleTable:
        if num_microbatches not in self._tables:
            self._tables[num_microbatches] = self._work_out(num_microbatches)
        return self._tables[num_microbatches]

    def _work_out(self, num_microbatches: int) -> ScheduleTable:
        try:
            return schedule_table(
                self._options.schedule,
                num_ranks=self._num_ranks,
                num_microbatches=num_microbatches,
                stages_per_rank=self._options.stages_per_rank,
            )
        except ConfigError:
            if not self._tables:
                raise
        # A small batch at the end of an epoch: the schedule has no order for so few.
        return all_forward_first(self._options.schedule, self.rank_of_stage, num_microbatches)


def all_forward_first(
    name: str, rank_of_stage: tuple[int, ...], num_microbatches: int
) -> ScheduleTable:
    """The plainest order, which stages can have in any number: all forwards, then all backwards."""
    num_ranks = max(rank_of_stage) + 1
    rows: list[tuple[str, ...]] = []
    for rank in range(num_ranks):
        stages = [stage for stage, owner in enumerate(rank_of_stage) if owner == rank]
        numbers = range(num_microbatches)
        forwards = [f"{stage}F{number}" for stage in stages for number in numbers]
        backwards = [f"{stage}B{number}" for stage in reversed(stages) for number in numbers]
        rows.append((*forwards, *backwards))
    return ScheduleTable(
        name=name,
        num_ranks=num_ranks,
        num_stages=len(rank_of_stage),
        num_microbatches=num_microbatches,
        order=tuple(rows),
        rank_of_stage=rank_of_stage,
    )
