"""The order of PipeDream-2BW as it is run here: steps that take each other's gaps. No torch.

PipeDream-2BW (Narayanan et al. 2021, https://arxiv.org/abs/2006.09503, section 3.1) never lets the
pipeline run empty: the last backward passes of a batch come in the step of the next one, beside its
forward passes, and the gradient that they complete is applied one step later. The paper's ranks do
not wait for each other between steps. Here they meet at the end of each, for the loss, the norm of
the gradients and failures, so each rank keeps backward passes back, with which it begins the next
step while the first microbatch is on its way to it. The first rank keeps most; the last one keeps
half as many as there are borders, for a backward pass takes as long as two forwards.

A microbatch of the batch before counts from its end: -1 is its last.
"""

from collections.abc import Iterable, Sequence

from boltmesh.telemetry.schedule import Action, Order, Slot, Timetable

FORWARD, BACKWARD = 1.0, 2.0
"""Times of a stage that the order is made for."""


def num_carried(num_ranks: int, num_microbatches: int) -> tuple[int, ...]:
    """Return for each rank how many backward passes of a batch it does in the next step."""
    last = num_ranks // 2
    return tuple(
        min(num_microbatches - 1, last + num_ranks - 1 - rank) if num_microbatches else 0
        for rank in range(num_ranks)
    )


def leaves_work(num_ranks: int, num_microbatches: int) -> bool:
    """Whether any rank leaves backward passes of such a batch to the next step."""
    return any(num_carried(num_ranks, num_microbatches))


def asynchronous_timetable(num_ranks: int, *, before: int, now: int) -> Timetable:
    """Work out what ranks compute in a step, and when.

    Args:
        num_ranks: Of the pipeline, one stage each.
        before: Microbatches of the batch before, of which backward passes are left; 0 in a first
            step.
        now: Microbatches of the step's own batch; 0 to do no more than what is left.
    """
    ranks = [
        _Rank(rank, old, new, now)
        for rank, (old, new) in enumerate(
            zip(num_carried(num_ranks, before), num_carried(num_ranks, now), strict=True)
        )
    ]
    while True:
        ready = [found for rank in ranks if (found := rank.next(ranks)) is not None]
        if not ready:
            return tuple(tuple(rank.slots) for rank in ranks)
        # Of what can begin first; of several, a forward, for which all ranks behind wait.
        start, is_backward, number = min(ready)
        ranks[number].do("B" if is_backward else "F", start)


class _Rank:
    """How far one rank is."""

    def __init__(self, number: int, old: int, new: int, now: int) -> None:
        self.number = number
        self.slots: list[Slot] = []
        self.old = old
        self._forward, self._end_of_forward = 0, now
        self._backward, self._end_of_backward = -old, now - new
        self._most = max(old, new) + 1
        self.ends: dict[tuple[str, int], float] = {}

    def next(self, ranks: Sequence["_Rank"]) -> tuple[float, bool, int] | None:
        """Return when, whether it is a backward pass, and by whom; None where nothing can be."""
        free = self.slots[-1].end if self.slots else 0.0
        found = [
            (max(free, ready), is_backward, self.number)
            for is_backward, ready in (
                (False, self._forward_ready(ranks)),
                (True, self._backward_ready(ranks)),
            )
            if ready is not None
        ]
        return min(found, default=None)

    def do(self, kind: str, start: float) -> None:
        microbatch = self._forward if kind == "F" else self._backward
        end = start + (FORWARD if kind == "F" else BACKWARD)
        self.slots.append(Slot(Action(self.number, kind, microbatch), start, end))
        self.ends[kind, microbatch] = end
        if kind == "F":
            self._forward += 1
        else:
            self._backward += 1

    def _forward_ready(self, ranks: Sequence["_Rank"]) -> float | None:
        is_full = self._forward - self._backward >= self._most
        if self._forward == self._end_of_forward or is_full:
            return None
        return 0.0 if self.number == 0 else ranks[self.number - 1].ends.get(("F", self._forward))

    def _backward_ready(self, ranks: Sequence["_Rank"]) -> float | None:
        if self._backward >= min(self._end_of_backward, self._forward):
            return None
        if self.number == len(ranks) - 1:
            return 0.0
        behind = ranks[self.number + 1]
        if self._backward < -behind.old:
            return 0.0  # its gradient came in the step before
        return behind.ends.get(("B", self._backward))


def pipedream_2bw(num_ranks: int, num_microbatches: int) -> Order:
    """Return what ranks compute in a step that follows another one of its size.

    A backward pass that stands before the forward pass of its number is of the batch before.
    """
    timetable = asynchronous_timetable(num_ranks, before=num_microbatches, now=num_microbatches)
    return tuple(
        tuple(
            f"{slot.action.stage}{slot.action.kind}{slot.action.microbatch % num_microbatches}"
            for slot in row
        )
        for row in timetable
    )


def with_messages(timetable: Timetable) -> tuple[tuple[Action, ...], ...]:
    """Add what ranks send and receive: of each pair both at once, when it has been computed.

    So there is one order of all messages, and no two ranks wait for each other. One stage a rank.
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
    return tuple(tuple(_in_order(row)) for row in rows)


def _in_order(row: Iterable[tuple[float, bool, Action]]) -> list[Action]:
    # Of one moment: messages in the order of stages and microbatches, then what needs them.
    def key(entry: tuple[float, bool, Action]) -> tuple[float, bool, int, str, int]:
        time, is_computed, (stage, kind, microbatch) = entry
        sender = stage if "SEND" in kind else stage + (1 if kind.endswith("B") else -1)
        return time, is_computed, sender, kind[-1], microbatch

    return [action for _, _, action in sorted(row, key=key)]
