"""Actions of one rank in a step, for any number of microbatches: computation, sends, receives."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final

from boltmesh.errors import ConfigError
from boltmesh.schedule_sim import (
    BACKWARD,
    NOMINAL,
    Action,
    Order,
    Timetable,
    carried,
    parse_actions,
    peaks_by_stage,
    simulate,
)
from boltmesh.strategies.pipeline.options import PipelineOptions
from boltmesh.strategies.pipeline.schedules.registry import (
    ScheduleTable,
    schedule_kind,
    schedule_table,
)

_OF_FORWARD: Final = frozenset({"F", "SEND_F", "RECV_F"})


@dataclass(frozen=True)
class RankProgram:
    """The actions of one rank, and the ranks of all stages.

    Ranks are numbered within the group of the pipeline axis. A rank posts its messages in the order
    of its actions. torch places the sends and receives of any two ranks in matching orders, so they
    cannot deadlock, whether sends are buffered or not.
    """

    rank: int
    rank_of_stage: tuple[int, ...]
    actions: tuple[Action, ...]
    num_before: int = 0
    """Microbatches of the batch before, if backward passes of it run in this step. Their numbers
    count from its end; -1 is the last."""
    carries: bool = False
    """Whether backward passes of this step's batch run in the next step, on some rank."""

    @classmethod
    def parse(
        cls, texts: Sequence[str], *, rank: int, rank_of_stage: Sequence[int]
    ) -> "RankProgram":
        """Read the list of one rank.

        Raises:
            ValueError: An action is unknown, or of a stage on another rank.
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
        """Numbers of the step's microbatches, without those of the batch before."""
        return tuple(
            sorted({action.microbatch for action in self.actions if action.microbatch >= 0})
        )

    @cached_property
    def has_backward(self) -> bool:
        """Whether there are backward passes, in this or the next step."""
        return self.carries or any(action.kind in BACKWARD for action in self.actions)

    @cached_property
    def is_whole(self) -> bool:
        """Whether as many backward as forward passes run; the same on all ranks.

        An asynchronous schedule has fewer in its first step and only them in its last one.
        """
        count = len(self.microbatches)
        return self.has_backward and count > 0 and self.num_before == (count if self.carries else 0)

    @cached_property
    def forward_only(self) -> "RankProgram":
        """The program without backward passes, for validation and prediction."""
        kept = tuple(action for action in self.actions if action.kind in _OF_FORWARD)
        return RankProgram(self.rank, self.rank_of_stage, kept)

    def number(self, action: Action) -> int:
        """Return the number of an action's microbatch in its own batch."""
        return action.microbatch % self.num_before if action.microbatch < 0 else action.microbatch

    def is_local(self, stage: int) -> bool:
        """Whether this rank has the stage, so that values need no message."""
        return 0 <= stage < len(self.rank_of_stage) and self.rank_of_stage[stage] == self.rank

    def peer(self, action: Action) -> int:
        """Return the rank at the other end of a send or a receive."""
        to_next = action.boundary > action.stage
        return self.rank_of_stage[action.stage + (1 if to_next else -1)]


class RankPrograms:
    """The programs of one rank by number of microbatches: a last batch may have fewer rows.

    Args:
        options: The user's choice of schedule and sizes.
        num_ranks: Ranks of the pipeline.
        rank: This rank, within the pipeline.
    """

    def __init__(self, options: PipelineOptions, num_ranks: int, rank: int) -> None:
        self._options = options
        self._num_ranks = num_ranks
        self._rank = rank
        self._tables: dict[int, ScheduleTable] = {}
        self._programs: dict[int, RankProgram] = {}
        self._overlapped: dict[tuple[int, int], RankProgram] = {}
        self.schedule = options.first_schedule
        """Name of the schedule."""
        self._overlapped_step = schedule_kind(self.schedule).overlapped_step
        self.is_asynchronous = self._overlapped_step is not None
        full_batch = self._table(options.num_microbatches(num_ranks))
        self.num_stages = full_batch.num_stages
        self.rank_of_stage = full_batch.rank_of_stage

    @property
    def has_forwards_first(self) -> bool:
        """Whether all forward passes of a batch come before its first backward pass."""
        return schedule_kind(self.schedule).has_forwards_first

    def change_schedule(self, name: str) -> None:
        """Change to a schedule with the same stages on each rank."""
        self.schedule = name
        self._tables.clear()
        self._programs.clear()
        count = self._options.num_microbatches(self._num_ranks)
        assert self._table(count).rank_of_stage == self.rank_of_stage

    def asynchronous(self, before: int, now: int) -> RankProgram:
        """Return the actions of a step that overlaps with the one before, if asynchronous.

        Args:
            before: Microbatches of the batch before, whose last backward passes are left; 0 if
                none are.
            now: Microbatches of the step's own batch; 0 runs only what is left.
        """
        assert self._overlapped_step is not None
        if (before, now) not in self._overlapped:
            timetable = self._overlapped_step(self._num_ranks, before, now)
            backward = [
                action.microbatch
                for row in timetable
                for action, _, _ in row
                if action.kind in {"B", "W"}
            ]
            num_left = sum(microbatch < 0 for microbatch in backward)
            self._overlapped[before, now] = RankProgram(
                self._rank,
                self.rank_of_stage,
                with_messages(timetable)[self._rank],
                num_before=before if num_left else 0,
                carries=len(backward) - num_left < self.num_stages * now,
            )
        return self._overlapped[before, now]

    def of(self, num_microbatches: int) -> RankProgram:
        """Return the actions of a step with ``num_microbatches``.

        For an asynchronous schedule, of a step between two others of its size.
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
        """Return the most microbatches that each stage keeps at the same time."""
        peaks = peaks_by_stage(self._table(num_microbatches).order)
        return tuple(peaks[stage] for stage in range(self.num_stages))

    def order(self, num_microbatches: int) -> Order:
        """Return the order of computation on all ranks, for telemetry."""
        return self._table(num_microbatches).order

    def _table(self, num_microbatches: int) -> ScheduleTable:
        if num_microbatches not in self._tables:
            self._tables[num_microbatches] = self._make_table(num_microbatches)
        return self._tables[num_microbatches]

    def _make_table(self, num_microbatches: int) -> ScheduleTable:
        try:
            return schedule_table(
                self.schedule,
                num_ranks=self._num_ranks,
                num_microbatches=num_microbatches,
                stages_per_rank=self._options.stages_per_rank,
            )
        except ConfigError:
            if not self._tables:
                raise
        # A small last batch of an epoch: the schedule has no order for so few microbatches.
        return all_forward_first(self.schedule, self.rank_of_stage, num_microbatches)


def all_forward_first(
    name: str, rank_of_stage: tuple[int, ...], num_microbatches: int
) -> ScheduleTable:
    """Return GPipe's order for any assignment of stages: all forwards, then all backwards."""
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


def with_communication(table: ScheduleTable) -> tuple[tuple[str, ...], ...]:
    """Return each rank's actions with sends and receives, in torch's order.

    ``0SEND_F3`` sends the output of stage 0 for microbatch 3 to the rank of stage 1, which has
    ``1RECV_F3`` for it; ``1SEND_B3`` and ``0RECV_B3`` return the gradient. Nothing is sent between
    stages of one rank. Overlapped pairs become a forward, then a backward. A send and its receive
    are placed at the same point of one sequence over all ranks, so that the list runs to its end
    also if a send blocks its rank until the receiver is there.
    """
    if carried(table.order):
        timetable = simulate(table.order, NOMINAL.seconds)
        return tuple(tuple(map(str, row)) for row in with_messages(timetable))
    from boltmesh.strategies.torch_compat.schedules import torch_send_recv

    return torch_send_recv(table.order, table.rank_of_stage)


def with_messages(timetable: Timetable) -> tuple[tuple[Action, ...], ...]:
    """Add sends and receives, both of a pair at the time when the value has been computed.

    So all messages have one order, and no two ranks wait for each other. For one stage per rank.
    """
    last = len(timetable) - 1
    rows: list[list[tuple[float, bool, Action]]] = [[] for _ in timetable]
    for slot in (slot for row in timetable for slot in row):
        stage, kind, microbatch = slot.action
        rows[stage].append((slot.start, True, slot.action))
        other = stage + (1 if kind == "F" else -1)
        if 0 <= other <= last:
            rows[stage].append((slot.end, False, Action(stage, f"SEND_{kind}", microbatch)))
            rows[other].append((slot.end, False, Action(other, f"RECV_{kind}", microbatch)))
    return tuple(tuple(_by_time(row)) for row in rows)


def _by_time(row: Iterable[tuple[float, bool, Action]]) -> list[Action]:
    # At equal times: messages in the order of stages and microbatches, then what needs them.
    def key(entry: tuple[float, bool, Action]) -> tuple[float, bool, int, str, int]:
        time, is_computed, (stage, kind, microbatch) = entry
        sender = stage if "SEND" in kind else stage + (1 if kind.endswith("B") else -1)
        return time, is_computed, sender, kind[-1], microbatch

    return [action for _, _, action in sorted(row, key=key)]
