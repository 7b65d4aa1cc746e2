"""Whether a schedule does all of the work, and whether ranks that run it can get stuck. No torch.

Two ways to send are tried. *Rendezvous*: a send and its receive each hold their rank up until the
other one has come, which is the least that NCCL promises. *Buffered*: a send is gone at once, and a
receive takes the oldest message of its peer, for neither NCCL nor gloo look at what it is.
"""

from collections import Counter, deque
from collections.abc import Sequence
from typing import NamedTuple

from boltmesh.strategies.pipeline.kinds import KINDS
from boltmesh.strategies.pipeline.table import STEP, ScheduleTable, owners
from boltmesh.telemetry.schedule import DeadlockError, actions, carried, simulate


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


class _Step(NamedTuple):
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
    _Run(rows, rank_of_stage, is_buffered=is_buffered).finish()


class _Run:
    def __init__(
        self, rows: Sequence[Sequence[str]], rank_of_stage: Sequence[int], *, is_buffered: bool
    ) -> None:
        self._rows = [[_parse(text) for text in row] for row in rows]
        self._rank_of = rank_of_stage
        computed = tuple(tuple(text for text in row if "_" not in text) for row in rows)
        self._old = carried(computed)
        self._is_buffered = is_buffered
        self._at = [0] * len(rows)
        self._done: set[_Step] = set()
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

    def _advance(self, rank: int, step: _Step) -> bool:
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

    def _needs(self, step: _Step) -> list[tuple[str, int]]:
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

    def _is_there(self, rank: int, step: _Step, kind: str, stage: int) -> bool:
        if self._rank_of[stage] != rank:
            return (kind, step.stage, step.microbatch) in self._here
        kinds = "BI" if kind == "B" else kind
        return any(_Step(stage, each, step.microbatch) in self._done for each in kinds)

    def _send(self, rank: int, step: _Step) -> bool:
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
        if at == len(row) or row[at] != _Step(to_stage, f"RECV_{kind}", step.microbatch):
            return False
        self._here.add(message)
        self._at[peer] += 1
        return True

    def _receive(self, rank: int, step: _Step) -> bool:
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


def _parse(text: str) -> _Step:
    found = STEP.fullmatch(text)
    if found is None:
        raise ValueError(f"{text!r} is no step of a schedule")
    stage, kind, microbatch = found.groups()
    return _Step(int(stage), kind, int(microbatch))
