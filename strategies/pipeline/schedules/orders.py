"""The orders that run and are drawn: torch's own, but for those that torch gets wrong.

torch runs GPipe and 1F1B by loops and describes them apart from that; its description of 1F1B
counts the last rank's forwards from 1 (torch 2.11 to 2.13). So these two are made here, and
PipeDream-2BW, which torch does not have. All others are read from torch's classes, and torch is
loaded for those only.

The order of PipeDream-2BW as it is run here: steps that take each other's gaps. No torch.

PipeDream-2BW (Narayanan et al. 2021, https://arxiv.org/abs/2006.09503, section 3.1) never lets the
pipeline run empty: the last backward passes of a batch come in the step of the next one, beside its
forward passes, and the gradient that they complete is applied one step later. The paper's ranks do
not wait for each other between steps. Here they meet at the end of each, for the loss, the norm of
the gradients and failures, so each rank keeps backward passes back, with which it begins the next
step while the first microbatch is on its way to it. The first rank keeps most; the last one keeps
half as many as there are borders, for a backward pass takes as long as two forwards.

A microbatch of the batch before counts from its end: -1 is its last.

Whether a schedule does all of the work, and whether ranks that run it can get stuck. No torch.

Two ways to send are tried. *Rendezvous*: a send and its receive each hold their rank up until the
other one has come, which is the least that NCCL promises. *Buffered*: a send is gone at once, and a
receive takes the oldest message of its peer, for neither NCCL nor gloo look at what it is.
"""

from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from boltmesh.errors import ConfigError
from boltmesh.strategies.pipeline.schedules.registry import (
    KINDS,
    STEP,
    check_schedule,
    owners,
)
from boltmesh.strategies.pipeline.schedules.registry import (
    ScheduleTable as ScheduleTable,
)
from boltmesh.telemetry.schedule import (
    NOMINAL,
    Action,
    DeadlockError,
    Order,
    Slot,
    Timetable,
    actions,
    carried,
    gpipe,
    one_forward_one_backward,
    simulate,
)

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
        _RankOrder(rank, old, new, now)
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


class _RankOrder:
    """How far one rank is."""

    def __init__(self, number: int, old: int, new: int, now: int) -> None:
        self.number = number
        self.slots: list[Slot] = []
        self.old = old
        self._forward, self._end_of_forward = 0, now
        self._backward, self._end_of_backward = -old, now - new
        self._most = max(old, new) + 1
        self.ends: dict[tuple[str, int], float] = {}

    def next(self, ranks: Sequence["_RankOrder"]) -> tuple[float, bool, int] | None:
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

    def _forward_ready(self, ranks: Sequence["_RankOrder"]) -> float | None:
        is_full = self._forward - self._backward >= self._most
        if self._forward == self._end_of_forward or is_full:
            return None
        return 0.0 if self.number == 0 else ranks[self.number - 1].ends.get(("F", self._forward))

    def _backward_ready(self, ranks: Sequence["_RankOrder"]) -> float | None:
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


def check_order(table: ScheduleTable) -> None:
    """Check that every microbatch goes forward and backward once through every stage.

    Raises:
        ValueError: Something is missing, done twice, or done by the wrong rank.
        DeadlockError: A rank would wait for what comes later.
    """
    if dict(enumerate(table.rank_of_stage)) != owners(table.order):
        raise ValueError("stages are worked on by other ranks than rank_of_stage says")
    done = Counter(action for row in actions(table.order) for action in row)
    for stage in range(table.num_stages):
        for microbatch in range(table.num_microbatches):
            forward, whole, inputs, weights = (
                done.pop((stage, kind, microbatch), 0)  # type: ignore[call-overload]
                for kind in "FBIW"
            )
            if forward != 1 or (whole, inputs, weights) not in ((1, 0, 0), (0, 1, 1)):
                raise ValueError(
                    f"microbatch {microbatch} goes {forward} times forward and "
                    f"{whole} + {inputs}/{weights} times backward through stage {stage}"
                )
    if done:
        raise ValueError(f"there is no such work as {next(iter(done))}")
    kind = KINDS.get(table.name)
    if kind is None or not kind.is_asynchronous:
        for stage, microbatch in sorted(carried(table.order)):
            rank = table.rank_of_stage[stage]
            raise DeadlockError(f"pipeline rank {rank} waits forever before {stage}B{microbatch}")
    simulate(table.order, lambda _: 1.0)


class _OrderStep(NamedTuple):
    stage: int
    kind: str
    microbatch: int


_Message = tuple[str, int, int]
"""F or B, the stage that it is for, the microbatch."""


def check_communication(
    rows: Sequence[Sequence[str]], rank_of_stage: Sequence[int], *, is_buffered: bool
) -> None:
    """Run what :func:`with_communication` gives, without computing anything.

    Raises:
        DeadlockError: Ranks wait for each other, a step runs before what it needs is there, or a
            receive would take the message of another.
    """
    _OrderRun(rows, rank_of_stage, is_buffered=is_buffered).finish()


class _OrderRun:
    def __init__(
        self, rows: Sequence[Sequence[str]], rank_of_stage: Sequence[int], *, is_buffered: bool
    ) -> None:
        self._rows = [[_parse(text) for text in row] for row in rows]
        self._rank_of = rank_of_stage
        computed = tuple(tuple(text for text in row if "_" not in text) for row in rows)
        self._old = carried(computed)
        self._is_buffered = is_buffered
        self._at = [0] * len(rows)
        self._done: set[_OrderStep] = set()
        self._here: set[_Message] = set()
        self._under_way: dict[tuple[int, int], deque[_Message]] = {}

    def finish(self) -> None:
        """Go on until every rank is through.

        Raises:
            DeadlockError: Nothing moves any more, or messages are left over.
        """
        is_moving = True
        while is_moving:
            is_moving = False
            for rank, row in enumerate(self._rows):
                while self._at[rank] < len(row) and self._advance(rank, row[self._at[rank]]):
                    is_moving = True
        stuck = [rank for rank, row in enumerate(self._rows) if self._at[rank] < len(row)]
        if stuck:
            raise DeadlockError(
                "; ".join(f"rank {rank} waits forever in {self._text(rank)}" for rank in stuck)
            )
        left = [message for queue in self._under_way.values() for message in queue]
        if left:
            raise DeadlockError(f"nobody receives {left[0]}")

    def _text(self, rank: int) -> str:
        step = self._rows[rank][self._at[rank]]
        return f"{step.stage}{step.kind}{step.microbatch}"

    def _advance(self, rank: int, step: _OrderStep) -> bool:
        """Do the next step of a rank if it can be done."""
        if step.kind.startswith("RECV"):
            if not self._is_buffered or not self._receive(rank, step):
                return False
        elif step.kind.startswith("SEND"):
            if not self._send(rank, step):
                return False
        elif all(self._is_there(rank, step, *need) for need in self._needs(step)):
            self._done.add(step)
        else:
            return False
        self._at[rank] += 1
        return True

    def _needs(self, step: _OrderStep) -> list[tuple[str, int]]:
        """What a computation waits for: a kind and the stage that makes it."""
        stage = step.stage
        if step.kind == "F":
            return [("F", stage - 1)] if stage > 0 else []
        if step.kind == "W":
            return [("I", stage)]
        if (stage, step.microbatch) in self._old:
            return [("B", stage + 1)] if (stage + 1, step.microbatch) in self._old else []
        is_last = stage == len(self._rank_of) - 1
        return [("F", stage)] if is_last else [("F", stage), ("B", stage + 1)]

    def _is_there(self, rank: int, step: _OrderStep, kind: str, stage: int) -> bool:
        if self._rank_of[stage] != rank:
            return (kind, step.stage, step.microbatch) in self._here
        kinds = "BI" if kind == "B" else kind
        return any(_OrderStep(stage, each, step.microbatch) in self._done for each in kinds)

    def _send(self, rank: int, step: _OrderStep) -> bool:
        kind = step.kind[-1]
        if not self._is_there(rank, step, kind, step.stage):
            return False
        to_stage = step.stage + (1 if kind == "F" else -1)
        peer = self._rank_of[to_stage]
        message = (kind, to_stage, step.microbatch)
        if self._is_buffered:
            self._under_way.setdefault((rank, peer), deque()).append(message)
            return True
        row, at = self._rows[peer], self._at[peer]
        if at == len(row) or row[at] != _OrderStep(to_stage, f"RECV_{kind}", step.microbatch):
            return False
        self._here.add(message)
        self._at[peer] += 1
        return True

    def _receive(self, rank: int, step: _OrderStep) -> bool:
        kind = step.kind[-1]
        peer = self._rank_of[step.stage + (-1 if kind == "F" else 1)]
        queue = self._under_way.get((peer, rank))
        if not queue:
            return False
        message = queue.popleft()
        if message != (kind, step.stage, step.microbatch):
            raise DeadlockError(f"rank {rank} receives {message} in {self._text(rank)}")
        self._here.add(message)
        return True


def _parse(text: str) -> _OrderStep:
    found = STEP.fullmatch(text)
    if found is None:
        raise ValueError(f"{text!r} is no step of a schedule")
    stage, kind, microbatch = found.groups()
    return _OrderStep(int(stage), kind, int(microbatch))


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
        from boltmesh.strategies.torch_compat.schedules import torch_schedule_order

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
    from boltmesh.strategies.torch_compat.schedules import torch_send_recv

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
