"""What a schedule costs at best: its bubble and what it keeps, simulated and by formula. No torch.

A bubble is idle time over the common window of all ranks, from the first start to the last end, in
the mean over the ranks ("of total"). Transfers take no time here.
"""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

from boltmesh.strategies.pipeline.schedules.registry import ScheduleTable
from boltmesh.telemetry.schedule import (
    Action,
    Timetable,
    actions,
    carried,
    idle_shares,
    of_ideal,
    peak_live_activations,
    simulate,
    window_of,
)


@dataclass(frozen=True)
class StageTimes:
    """How long one stage takes for one microbatch, in any unit; the same for all stages."""

    forward: float = 1.0
    input_gradient: float = 1.0
    weight_gradient: float = 1.0

    @classmethod
    def of(cls, forward: float, backward: float) -> "StageTimes":
        """Halve a whole backward: each half of a linear layer's is as long as its forward."""
        return cls(forward, backward / 2, backward / 2)

    @property
    def backward(self) -> float:
        """The whole."""
        return self.input_gradient + self.weight_gradient

    def seconds(self, action: Action) -> float:
        """How long an action takes."""
        return {
            "F": self.forward,
            "B": self.backward,
            "I": self.input_gradient,
            "W": self.weight_gradient,
        }[action.kind]


NOMINAL = StageTimes()
"""A backward is two forwards, one for the input, one for the weights."""


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


def peak_live_bytes(row: Sequence[str | None], kept_bytes: Sequence[int]) -> int:
    """Return the most that one rank keeps at once for its backward passes.

    Args:
        row: The rank's actions, as in ``Order``; a microbatch counts from its forward (F) to its
            whole backward (B) or to the gradient of its weights (W); one whose backward is of the
            batch before, from the beginning on.
        kept_bytes: Of one microbatch, by stage.
    """
    order = (tuple(row),)
    live = peak = sum(kept_bytes[stage] for stage, _ in carried(order))
    for action in actions(order)[0]:
        live += {"F": 1, "I": 0}.get(action.kind, -1) * kept_bytes[action.stage]
        peak = max(peak, live)
    return peak


def simulate_ideal(
    table: ScheduleTable, seconds: Callable[[Action], float] = NOMINAL.seconds
) -> Ideal:
    """Work a schedule off without transfers; ``seconds`` may differ by stage and microbatch."""
    return Ideal(table, simulate(table.order, seconds))


def closed_form_bubble(
    name: str,
    *,
    num_ranks: int,
    num_microbatches: int,
    stages_per_rank: int,
    times: StageTimes = NOMINAL,
) -> float | None:
    """Return the published bubble of a schedule whose stages are equal; None where none holds.

    Sources: GPipe, 1F1B and interleaved: Narayanan et al. 2021, https://arxiv.org/abs/2104.04473,
    section 2.2. ZB-H1, where a weight gradient fits into the gap that it fills, and ZB-V with
    equal times: Qi et al. 2023, https://arxiv.org/abs/2401.10241, sections 2 and 6. Ranks of ZB-V
    have no gap of their own; over the common window the last one begins ``p - 1`` forwards late.
    PipeDream-2BW as it is run here, where a backward takes two forwards: its own, for all ranks
    meet after a step and begin the next one with what they have left.
    """
    waits = _wait_per_rank(name, num_ranks, num_microbatches, times)
    if waits is None:
        return None
    idle = (num_ranks - 1) * waits
    busy = num_microbatches * stages_per_rank * (times.forward + times.backward)
    return idle / (busy + idle)


def _wait_per_rank(
    name: str, num_ranks: int, num_microbatches: int, times: StageTimes
) -> float | None:
    """Return the idle time that each rank after the first adds to the window."""
    forward, weight = times.forward, times.weight_gradient
    if name in ("gpipe", "1f1b"):
        return forward + times.backward
    is_filled = num_microbatches >= num_ranks
    if name in ("looped_bfs", "interleaved_1f1b"):
        return forward + times.backward if is_filled else None
    if name == "zero_bubble" and is_filled and weight <= min(forward, times.input_gradient):
        return forward + times.input_gradient - weight
    if name == "pipedream_2bw" and num_ranks > 1:
        is_filled = num_microbatches >= num_ranks + num_ranks // 2
        is_filled = is_filled and times.backward == 2 * forward
        return (num_ranks - 2) / (num_ranks - 1) * forward if is_filled else None
    is_even = forward == times.input_gradient == weight
    if name == "zbv" and is_even and num_microbatches >= 2 * num_ranks - 1:
        return forward
    return None
