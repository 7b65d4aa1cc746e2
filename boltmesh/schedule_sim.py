"""Pipeline schedules: actions, how they are written, and an event simulation. Loads no torch.

A schedule is a list of actions for each pipeline rank, written as ``torch.distributed.pipelining``
writes them: ``0F3`` is the forward of microbatch 3 in stage 0, B a whole backward, I and W its two
halves (gradients of the inputs, of the weights); ``0SEND_F3``, ``1RECV_F3``, ``1SEND_B3`` and
``0RECV_B3`` move activations and gradients between ranks. ``(0F7;7B3)OVERLAP_F_B`` is a forward and
a backward that may run side by side; here they run one after the other.

A rank runs its list in order. A forward waits for the forward of the stage before, a backward for
its own forward and for the gradient from the stage after, W for the I of its microbatch.

Steps of an asynchronous schedule (PipeDream-2BW) overlap. Its order is that of a step between two
others of its size: a backward before the forward of the same number belongs to the batch before,
and what it needs is there when the step begins.
"""

import functools
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from typing_extensions import override

Order = tuple[tuple[str | None, ...], ...]
"""For each pipeline rank its actions in order; None is a slot that a schedule leaves empty."""

COMPUTATIONS: Final = frozenset("FBIW")
BACKWARD: Final = frozenset("BIW")
SENDS: Final = frozenset({"SEND_F", "SEND_B"})
RECEIVES: Final = frozenset({"RECV_F", "RECV_B"})

_ACTION = re.compile(r"(\d{1,5})(SEND_F|RECV_F|SEND_B|RECV_B|F|B|I|W)(\d{1,6})")
_OVERLAPPED = re.compile(r"\(([^()]+)\)OVERLAP_F_B")


class DeadlockError(ValueError):
    """An action waits for one that comes later, or for one that is on no rank."""


class Action(NamedTuple):
    """One thing to do with one microbatch in one stage; ``str`` writes it as ``0F3``."""

    stage: int
    kind: str
    microbatch: int

    @override
    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"

    @property
    def boundary(self) -> int:
        """The boundary that a message crosses; 1 is the one from stage 0 to stage 1."""
        return self.stage + (self.kind in {"SEND_F", "RECV_B"})


class Slot(NamedTuple):
    """When a rank does an action, in the unit of the times that were given."""

    action: Action
    start: float
    end: float


Timetable = tuple[tuple[Slot, ...], ...]
"""For each pipeline rank its actions, in order."""


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
        """The whole backward."""
        return self.input_gradient + self.weight_gradient

    def seconds(self, action: Action) -> float:
        """Return how long an action takes."""
        match action.kind:
            case "F":
                return self.forward
            case "I":
                return self.input_gradient
            case "W":
                return self.weight_gradient
            case _:
                return self.backward


NOMINAL: Final = StageTimes()
"""Times of a schedule's ideal: a backward is two forwards, one for inputs, one for weights."""


# The grammar.


def parse_actions(texts: Sequence[str]) -> tuple[Action, ...]:
    """Read a list of actions; an overlapped pair becomes its parts in order.

    Raises:
        ValueError: A text is not an action that can be run.
    """
    found = []
    for text in texts:
        pair = _OVERLAPPED.fullmatch(text)
        for part in pair[1].split(";") if pair else (text,):
            match = _ACTION.fullmatch(part.strip())
            if match is None:
                raise ValueError(
                    f"cannot run the action {text!r}: it is none of F, B, I, W, SEND_F, RECV_F, "
                    "SEND_B, RECV_B and OVERLAP_F_B with a stage before and a microbatch behind"
                )
            found.append(_action(*match.groups()))
    return tuple(found)


@functools.lru_cache(maxsize=16)
def actions(order: Order) -> tuple[tuple[Action, ...], ...]:
    """Return the computations of each rank; an overlapped pair becomes its parts in order.

    Communication, and whatever else torch notes in an order or a file contains, is left out.
    """
    return tuple(
        tuple(
            _action(*parts)
            for text in row
            if text is not None
            for parts in _ACTION.findall(text)
            if parts[1] in COMPUTATIONS
        )
        for row in order
    )


def _action(stage: str, kind: str, microbatch: str) -> Action:
    return Action(int(stage), kind, int(microbatch))


def stage_owners(order: Order) -> dict[int, int]:
    """Return the rank of each stage.

    Raises:
        ValueError: Two ranks compute in one stage.
    """
    found: dict[int, int] = {}
    for rank, row in enumerate(actions(order)):
        for action in row:
            if found.setdefault(action.stage, rank) != rank:
                both = f"{found[action.stage]} and {rank}"
                raise ValueError(f"ranks {both} both work on stage {action.stage}")
    return found


# The simulation.


@functools.lru_cache(maxsize=16)
def carried(order: Order) -> frozenset[tuple[int, int]]:
    """Return the stages and microbatches whose backward belongs to the previous batch."""
    return _carried(actions(order))


def _carried(rows: Sequence[Sequence[Action]]) -> frozenset[tuple[int, int]]:
    found: set[tuple[int, int]] = set()
    for row in rows:
        forward = {(action.stage, action.microbatch) for action in row if action.kind == "F"}
        done: set[tuple[int, int]] = set()
        for stage, kind, microbatch in row:
            if kind == "F":
                done.add((stage, microbatch))
            elif kind in BACKWARD and (stage, microbatch) in forward - done:
                found.add((stage, microbatch))
    return frozenset(found)


def simulate(
    order: Order, seconds: Callable[[Action], float], *, transfer_s: float = 0.0
) -> Timetable:
    """Return when each action would run.

    Args:
        order: The actions of each pipeline rank.
        seconds: How long a computation takes.
        transfer_s: How long an activation or a gradient takes from one rank to another: a value is
            there so long after it was computed.

    Raises:
        DeadlockError: A rank waits forever.
    """
    return Simulation(actions(order), seconds, transfer_s).run()


_Value = tuple[str, int, int]
"""Result of an action: F for activations or I for gradients of inputs; stage, microbatch."""
_COMPUTES: Final = {"F": "F", "B": "I", "I": "I"}


class Simulation:
    """The clock of each rank, and the values that it has."""

    def __init__(
        self,
        rows: Sequence[Sequence[Action]],
        seconds: Callable[[Action], float],
        transfer_s: float,
    ) -> None:
        self._rows = rows
        self._seconds = seconds
        self._transfer_s = transfer_s
        self._rank_of = {action.stage: rank for rank, row in enumerate(rows) for action in row}
        self._last_stage = max(self._rank_of, default=0)
        self._carried = _carried(rows)
        self._slots: list[list[Slot]] = [[] for _ in rows]
        self._free = [0.0] * len(rows)
        self._there: dict[tuple[int, _Value], float] = {}
        """When a rank has a value."""

    def run(self) -> Timetable:
        """Do actions until no rank can."""
        is_moving = True
        while is_moving:
            is_moving = False
            for rank in range(len(self._rows)):
                while self._advance(rank):
                    is_moving = True
        stuck = [
            f"pipeline rank {rank} waits forever before {self._next(rank)}"
            for rank in range(len(self._rows))
            if self._next(rank) is not None
        ]
        if stuck:
            raise DeadlockError("; ".join(stuck))
        return tuple(map(tuple, self._slots))

    def _next(self, rank: int) -> Action | None:
        row, at = self._rows[rank], len(self._slots[rank])
        return row[at] if at < len(row) else None

    def _advance(self, rank: int) -> bool:
        """Do the next action of a rank if it can be done."""
        action = self._next(rank)
        return action is not None and self._compute(rank, action)

    def _compute(self, rank: int, action: Action) -> bool:
        start = self._free[rank]
        for need in self._needs(action):
            ready = self._there.get((rank, need))
            if ready is None:
                return False
            start = max(start, ready)
        end = start + self._seconds(action)
        self._record(rank, action, start, end)
        kind = _COMPUTES.get(action.kind)
        if kind is not None:
            value = (kind, action.stage, action.microbatch)
            self._there[rank, value] = end
            self._hand_on(rank, value, end)
        return True

    def _hand_on(self, rank: int, value: _Value, end: float) -> None:
        kind, stage, _ = value
        peer = self._rank_of.get(stage + (1 if kind == "F" else -1), rank)
        if peer != rank:
            self._there[peer, value] = end + self._transfer_s

    def _needs(self, action: Action) -> tuple[_Value, ...]:
        stage, kind, microbatch = action
        if kind == "F":
            return (("F", stage - 1, microbatch),) if stage > 0 else ()
        if kind == "W":
            return (("I", stage, microbatch),)
        after = ("I", stage + 1, microbatch)
        if (stage, microbatch) in self._carried:
            return (after,) if (stage + 1, microbatch) in self._carried else ()
        own = ("F", stage, microbatch)
        return (own,) if stage == self._last_stage else (own, after)

    def _record(self, rank: int, action: Action, start: float, end: float) -> None:
        self._slots[rank].append(Slot(action, start, end))
        self._free[rank] = end


# Costs and memory of a simulated step.


def idle_shares(timetable: Timetable) -> list[float]:
    """Return for each rank of a simulated step how much of the common window it is idle."""
    window = window_of(timetable)
    if window <= 0:
        return [0.0 for _ in timetable]
    return [1 - sum(slot.end - slot.start for slot in row) / window for row in timetable]


def window_of(timetable: Timetable) -> float:
    """Return the time from zero to the last end on any rank."""
    return max((row[-1].end for row in timetable if row), default=0.0)


def of_ideal(share: float) -> float:
    """Turn idle over total time into idle over busy time, as Megatron and Llama 3 report it."""
    return share / (1 - share) if share < 1 else math.inf


def peak_live_activations(order: Order) -> list[int]:
    """Return for each rank how many forwards it keeps at most at once for their backward.

    Each is one microbatch in one stage. It counts from its forward until the whole backward (B), or
    the gradient of the weights (W), for linear layers need their input for that one too; one whose
    backward belongs to the batch before counts from the beginning on.
    """
    return [_peak(row, lambda _: 1) for row in actions(order)]


@functools.lru_cache(maxsize=16)
def peaks_by_stage(order: Order) -> dict[int, int]:
    """Return the same for each stage by itself."""
    rows: dict[int, list[Action]] = {}
    for row in actions(order):
        for action in row:
            rows.setdefault(action.stage, []).append(action)
    return {stage: _peak(row, lambda _: 1) for stage, row in rows.items()}


def peak_live_bytes(row: Sequence[str | None], kept_bytes: Sequence[int]) -> int:
    """Return the most bytes that one rank keeps at once for its backward passes.

    Args:
        row: The rank's actions, one list of an :data:`Order`.
        kept_bytes: Bytes that one microbatch keeps, by stage.
    """
    return _peak(actions((tuple(row),))[0], kept_bytes.__getitem__)


def _peak(row: Sequence[Action], weight: Callable[[int], int]) -> int:
    live = peak = sum(weight(stage) for stage, _ in _carried([row]))
    for action in row:
        live += {"F": 1, "I": 0}.get(action.kind, -1) * weight(action.stage)
        peak = max(peak, live)
    return peak


# The dashboard's demo runs it too, which knows no strategies.


@functools.lru_cache(maxsize=16)
def one_forward_one_backward(num_stages: int, num_microbatches: int) -> Order:
    """Return the order of 1F1B: forwards until the first backward can run, then by turns.

    Source: Narayanan et al. 2021, https://arxiv.org/abs/2104.04473, section 2.2.
    """
    rows = []
    for stage in range(num_stages):
        ahead = min(num_stages - 1 - stage, num_microbatches)
        row = [f"{stage}F{at}" for at in range(ahead)]
        for at in range(num_microbatches - ahead):
            row += [f"{stage}F{at + ahead}", f"{stage}B{at}"]
        row += [f"{stage}B{at}" for at in range(num_microbatches - ahead, num_microbatches)]
        rows.append(tuple(row))
    return tuple(rows)
