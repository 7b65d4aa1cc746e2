"""The order of PipeDream-2BW: consecutive steps overlap.

PipeDream-2BW (Narayanan et al. 2021, https://arxiv.org/abs/2006.09503, section 3.1) never drains
the pipeline: the last backward passes of a batch run in the step of the next one, beside its
forward passes, and the gradient that they complete is applied one step later. The paper's ranks do
not synchronise between steps. Here they do at the end of each step, for the loss, the norm of the
gradients and failures, so each rank leaves some backward passes and begins the next step with them,
until the first microbatch arrives. The first rank leaves the most; the last one leaves half as many
as there are ranks, because a backward takes as long as two forwards.

Numbers of microbatches of the batch before count from its end: -1 is its last.
"""

from collections.abc import Sequence

from boltmesh.schedule_sim import NOMINAL, Action, Order, Slot, StageTimes, Timetable
from boltmesh.strategies.pipeline.schedules.registry import MicrobatchRule, ScheduleKind, register


def num_carried(num_ranks: int, num_microbatches: int) -> tuple[int, ...]:
    """Return the number of backward passes of a batch in the next step, by rank."""
    last = num_ranks // 2
    return tuple(
        min(num_microbatches - 1, last + num_ranks - 1 - rank) if num_microbatches else 0
        for rank in range(num_ranks)
    )


def overlapped_step(num_ranks: int, before: int, now: int) -> Timetable:
    """Return the timetable of all ranks for a step.

    Args:
        num_ranks: Ranks of the pipeline, one stage each.
        before: Microbatches of the batch before, whose last backward passes are left; 0 in a first
            step.
        now: Microbatches of the step's own batch; 0 runs only what is left.
    """
    ranks = [
        _RankClock(rank, old, new, now)
        for rank, (old, new) in enumerate(
            zip(num_carried(num_ranks, before), num_carried(num_ranks, now), strict=True)
        )
    ]
    while True:
        ready = [candidate for rank in ranks if (candidate := rank.next(ranks)) is not None]
        if not ready:
            return tuple(tuple(rank.slots) for rank in ranks)
        # The action that can begin first; among several, a forward, which all later ranks need.
        start, is_backward, number = min(ready)
        ranks[number].do("B" if is_backward else "F", start)


class _RankClock:
    """Progress of one rank.

    Args:
        number: The rank, and its stage.
        old: Backward passes of the batch before.
        new: Backward passes that it leaves to the next step.
        now: Microbatches of the step's own batch.
    """

    def __init__(self, number: int, old: int, new: int, now: int) -> None:
        self.number = number
        self.slots: list[Slot] = []
        self.old = old
        self._forward, self._end_of_forward = 0, now
        self._backward, self._end_of_backward = -old, now - new
        # Otherwise a later rank would keep one more in a first step than in those after it.
        is_filling = number > 0 and old == 0 < new
        self._most = new if is_filling else max(old, new) + 1
        self.ends: dict[tuple[str, int], float] = {}

    def next(self, ranks: Sequence["_RankClock"]) -> tuple[float, bool, int] | None:
        """Return start, whether it is a backward pass, and rank; None if nothing is ready."""
        free = self.slots[-1].end if self.slots else 0.0
        candidates = [
            (max(free, ready), is_backward, self.number)
            for is_backward, ready in (
                (False, self._forward_ready(ranks)),
                (True, self._backward_ready(ranks)),
            )
            if ready is not None
        ]
        return min(candidates, default=None)

    def do(self, kind: str, start: float) -> None:
        microbatch = self._forward if kind == "F" else self._backward
        action = Action(self.number, kind, microbatch)
        end = start + NOMINAL.seconds(action)
        self.slots.append(Slot(action, start, end))
        self.ends[kind, microbatch] = end
        if kind == "F":
            self._forward += 1
        else:
            self._backward += 1

    def _forward_ready(self, ranks: Sequence["_RankClock"]) -> float | None:
        is_full = self._forward - self._backward >= self._most
        if self._forward == self._end_of_forward or is_full:
            return None
        return 0.0 if self.number == 0 else ranks[self.number - 1].ends.get(("F", self._forward))

    def _backward_ready(self, ranks: Sequence["_RankClock"]) -> float | None:
        if self._backward >= min(self._end_of_backward, self._forward):
            return None
        if self.number == len(ranks) - 1:
            return 0.0
        next_rank = ranks[self.number + 1]
        if self._backward < -next_rank.old:
            return 0.0  # its gradient arrived in the step before
        return next_rank.ends.get(("B", self._backward))


def pipedream_2bw(num_ranks: int, num_microbatches: int, stages_per_rank: int = 1) -> Order:
    """Return the order of a step between two others of its size, with one stage per rank.

    A backward pass before the forward pass of its number belongs to the batch before.
    """
    return tuple(
        tuple(
            f"{action.stage}{action.kind}{action.microbatch % num_microbatches}"
            for action, _, _ in row
        )
        for row in overlapped_step(num_ranks, num_microbatches, num_microbatches)
    )


def _wait_per_rank(num_ranks: int, num_microbatches: int, times: StageTimes) -> float | None:
    """Return the wait of this implementation, if a backward takes as long as two forwards.

    All ranks synchronise after a step and begin the next one with the passes they left.
    """
    is_filled = num_microbatches >= num_ranks + num_ranks // 2
    if num_ranks == 1 or not is_filled or times.backward != 2 * times.forward:
        return None
    return (num_ranks - 2) / (num_ranks - 1) * times.forward


register(
    ScheduleKind(
        "pipedream_2bw",
        "1F1B without a pause between steps, on weights that are one step old",
        "Narayanan et al. 2021, https://arxiv.org/abs/2006.09503, section 3.1",
        pipedream_2bw,
        instead="interleaved_1f1b",
        # With fewer, a microbatch would meet weights older than the two versions that are kept.
        microbatch_rule=MicrobatchRule(
            lambda ranks, count: count >= ranks,
            lambda ranks, _: f"two versions of the weights are enough from {ranks} on, one a rank",
        ),
        overlapped_step=overlapped_step,
        wait_per_rank=_wait_per_rank,
        note="shown is a step between two others: it begins with backward passes of the batch "
        "before, and leaves as many of its own to the next",
    )
)
