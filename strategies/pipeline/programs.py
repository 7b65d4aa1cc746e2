"""The actions of this rank for any number of microbatches."""

from boltmesh.errors import ConfigError
from boltmesh.strategies.pipeline.asynchronous import (
    asynchronous_timetable,
    leaves_work,
    with_messages,
)
from boltmesh.strategies.pipeline.bubble import peak_live_bytes
from boltmesh.strategies.pipeline.executor.program import Action, Program
from boltmesh.strategies.pipeline.kinds import schedule_kind
from boltmesh.strategies.pipeline.options import PipelineOptions
from boltmesh.strategies.pipeline.schedules import schedule_table, with_communication
from boltmesh.strategies.pipeline.table import ScheduleTable
from boltmesh.telemetry.schedule import Order


class Programs:
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
        self._programs: dict[int, Program] = {}
        self._between: dict[tuple[int, int], Program] = {}
        self.is_asynchronous = schedule_kind(options.schedule).is_asynchronous
        whole = self._table(options.num_microbatches(num_ranks))
        self.num_stages = whole.num_stages
        self.rank_of_stage = whole.rank_of_stage

    def asynchronous(self, before: int, now: int) -> Program:
        """Return what this rank does in a step that goes on with the batch before.

        Args:
            before: Microbatches of that one, of which backward passes are left; 0: there are none.
            now: Microbatches of the step's own batch; 0: nothing but what is left is done.
        """
        if (before, now) not in self._between:
            timetable = asynchronous_timetable(self._num_ranks, before=before, now=now)
            self._between[before, now] = Program(
                self._rank,
                self.rank_of_stage,
                tuple(Action(*each) for each in with_messages(timetable)[self._rank]),
                num_before=before if leaves_work(self._num_ranks, before) else 0,
                carries=leaves_work(self._num_ranks, now),
            )
        return self._between[before, now]

    def of(self, num_microbatches: int) -> Program:
        """Return what this rank does in a step with so many microbatches.

        Where steps take each other's gaps, in one between two others of its size.
        """
        if self.is_asynchronous:
            return self.asynchronous(num_microbatches, num_microbatches)
        if num_microbatches not in self._programs:
            table = self._table(num_microbatches)
            self._programs[num_microbatches] = Program.parse(
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
