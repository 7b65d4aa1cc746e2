"""The bubble of a schedule at best: simulated, and by the formula of its paper. Loads no torch.

A bubble is idle time over the common window of all ranks, from the first start to the last end, in
the mean over the ranks ("of total"). Transfers take no time here.
"""

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

from boltmesh.schedule_sim import (
    NOMINAL,
    Action,
    StageTimes,
    Timetable,
    idle_shares,
    of_ideal,
    peak_live_activations,
    simulate,
    window_of,
)
from boltmesh.strategies.pipeline.schedules.registry import ScheduleTable, schedule_kind


@dataclass(frozen=True)
class Ideal:
    """One step of a schedule in which nothing but the schedule costs time."""

    table: ScheduleTable
    timetable: Timetable

    @cached_property
    def window(self) -> float:
        """From the first start to the last end on any rank."""
        return window_of(self.timetable)

    @cached_property
    def idle_shares(self) -> tuple[float, ...]:
        """Of each rank, over the common window."""
        return tuple(idle_shares(self.timetable))

    @property
    def bubble(self) -> float:
        """Idle over total time, in the mean over the ranks."""
        return statistics.fmean(self.idle_shares)

    @property
    def bubble_of_ideal(self) -> float:
        """Idle over busy time, as Megatron and Llama 3 report it."""
        return of_ideal(self.bubble)

    @cached_property
    def peak_live_activations(self) -> tuple[int, ...]:
        """Of each rank: microbatches of one stage that it keeps at once for their backward."""
        return tuple(peak_live_activations(self.table.order))


def simulate_ideal(
    table: ScheduleTable, seconds: Callable[[Action], float] = NOMINAL.seconds
) -> Ideal:
    """Simulate a step without transfers; ``seconds`` may differ by stage and microbatch."""
    return Ideal(table, simulate(table.order, seconds))


def closed_form_bubble(
    name: str,
    *,
    num_ranks: int,
    num_microbatches: int,
    stages_per_rank: int,
    times: StageTimes = NOMINAL,
) -> float | None:
    """Return the published bubble of a schedule whose stages are equal; None without a formula.

    Sources: GPipe, 1F1B and interleaved: Narayanan et al. 2021, https://arxiv.org/abs/2104.04473,
    section 2.2. ZB-H1 and ZB-V: Qi et al. 2023, https://arxiv.org/abs/2401.10241, sections 2 and
    6. The conditions of each are in its module in ``orders/``.
    """
    wait_per_rank = schedule_kind(name).wait_per_rank
    wait = None if wait_per_rank is None else wait_per_rank(num_ranks, num_microbatches, times)
    if wait is None:
        return None
    idle = (num_ranks - 1) * wait
    busy = num_microbatches * stages_per_rank * (times.forward + times.backward)
    return idle / (busy + idle)
