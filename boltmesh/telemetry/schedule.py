"""The order of a pipeline's work, and how long it would take: an event simulation.

A schedule is written as torch writes it: for each pipeline rank a list of actions, ``0F3`` being
the forward of microbatch 3 in stage 0. A rank works its list off in order, and an action waits for
what it needs: a forward for the one in the stage before, a backward for the one in the stage after,
and the gradient of the weights (W) for that of the input (I).

Where steps take each other's gaps (PipeDream-2BW), a list is that of a step between two others: a
backward that stands before the forward of its number is of the batch before, and what it needs of
that one is there when the step begins.
"""

import functools
import math
import re
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

Order = tuple[tuple[str | None, ...], ...]
"""For each pipeline rank its actions in order; None where a slot is left empty."""

_ACTION = re.compile(r"(\d{1,5})([FBIW])(\d{1,6})(?![A-Z_])")


NOMINAL: Final = {"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0}
"""What a schedule's ideal assumes: a backward is two forwards, one for input, one for weights."""


class DeadlockError(ValueError):
    """An action waits for one that comes later, or for one that no rank does."""


class Action(NamedTuple):
    """One microbatch in one stage, forward or backward."""

    stage: int
    kind: str
    microbatch: int


class Slot(NamedTuple):
    """When a rank does an action, in the unit of the times that were given."""

    action: Action
    start: float
    end: float


Timetable = tuple[tuple[Slot, ...], ...]
"""For each pipeline rank what it does, in order."""


@functools.lru_cache(maxsize=16)
def actions(order: Order) -> tuple[tuple[Action, ...], ...]:
    """Return the computing actions; torch's notes on communication and sharding are left out.

    An overlapped pair, ``(0F3;1B0)OVERLAP_F_B``, counts as its two parts.
    """
    return tuple(
        tuple(
            Action(int(stage), kind, int(microbatch))
            for text in row
            if text is not None
            for stage, kind, microbatch in _ACTION.findall(text)
        )
        for row in order
    )


@functools.lru_cache(maxsize=16)
def carried(order: Order) -> frozenset[tuple[int, int]]:
    """Return the stages and microbatches whose backward is of the batch before."""
    found: set[tuple[int, int]] = set()
    for row in actions(order):
        forward = {(stage, at) for stage, kind, at in row if kind == "F"}
        done: set[tuple[int, int]] = set()
        for stage, kind, at in row:
            if kind == "F":
                done.add((stage, at))
            elif (stage, at) in forward - done:
                found.add((stage, at))
    return frozenset(found)


def simulate(
    order: Order, seconds: Callable[[Action], float], *, transfer_s: float = 0.0
) -> Timetable:
    """Return when each action would run.

    Args:
        order: The actions of each pipeline rank.
        seconds: How long an action takes.
        transfer_s: How long an activation or a gradient takes from one rank to another.

    Raises:
        DeadlockError: The order cannot be worked off.
    """
    rows = actions(order)
    last_stage = max((action.stage for row in rows for action in row), default=0)
    rank_of = {action.stage: rank for rank, row in enumerate(rows) for action in row}
    old = carried(order)
    done: dict[tuple[int, str, int], float] = {}
    free = [0.0] * len(rows)
    slots: list[list[Slot]] = [[] for _ in rows]
    is_moving = True
    while is_moving:
        is_moving = False
        for rank, row in enumerate(rows):
            while len(slots[rank]) < len(row):
                action = row[len(slots[rank])]
                start = free[rank]
                for need in _needs(action, last_stage, old):
                    ready = done.get(need)
                    if ready is None:
                        break
                    start = max(start, ready + (transfer_s if rank_of[need[0]] != rank else 0.0))
                else:
                    end = start + seconds(action)
                    slots[rank].append(Slot(action, start, end))
                    free[rank] = end
                    for mark in _marks(action.kind):
                        done[action.stage, mark, action.microbatch] = end
                    is_moving = True
                    continue
                break
    for rank, row in enumerate(rows):
        if len(slots[rank]) < len(row):
            action = row[len(slots[rank])]
            text = f"{action.stage}{action.kind}{action.microbatch}"
            raise DeadlockError(f"pipeline rank {rank} waits forever before {text}")
    return tuple(map(tuple, slots))


def _needs(
    action: Action, last_stage: int, old: frozenset[tuple[int, int]]
) -> tuple[tuple[int, str, int], ...]:
    """Return what must be done before; the whole backward (B) is both I and W."""
    stage, microbatch = action.stage, action.microbatch
    if (stage, microbatch) in old and action.kind in "BI":
        return ((stage + 1, "I", microbatch),) if (stage + 1, microbatch) in old else ()
    if action.kind == "F":
        return ((stage - 1, "F", microbatch),) if stage > 0 else ()
    if action.kind == "W":
        return ((stage, "I", microbatch),)
    own = (stage, "F", microbatch)
    return (own,) if stage == last_stage else (own, (stage + 1, "I", microbatch))


def _marks(kind: str) -> str:
    return "IW" if kind == "B" else kind


def idle_shares(timetable: Timetable) -> list[float]:
    """Return for each rank of a simulated step how much of the common window it is idle."""
    window = window_of(timetable)
    if window <= 0:
        return [0.0 for _ in timetable]
    return [1 - sum(slot.end - slot.start for slot in row) / window for row in timetable]


def window_of(timetable: Timetable) -> float:
    """Return how long the whole takes, from zero to the last end on any rank."""
    return max((row[-1].end for row in timetable if row), default=0.0)


def of_ideal(share: float) -> float:
    """Turn idle over total time into idle over busy time, as Megatron and Llama 3 report it."""
    return share / (1 - share) if share < 1 else math.inf


def peak_live_activations(order: Order) -> list[int]:
    """Return for each rank how many forwards it keeps at most at once for their backward.

    Each is one microbatch in one stage. It counts from its forward until nothing needs it any more:
    the whole backward (B), or the gradient of the weights (W), for linear layers need their input
    for that one too. When a rank does what, and so how long that takes, is not asked.
    """
    old = carried(order)
    return [_peak(row, old) for row in actions(order)]


@functools.lru_cache(maxsize=16)
def peaks_by_stage(order: Order) -> dict[int, int]:
    """Return the same for each stage by itself."""
    rows: dict[int, list[Action]] = {}
    for row in actions(order):
        for action in row:
            rows.setdefault(action.stage, []).append(action)
    old = carried(order)
    return {stage: _peak(row, old) for stage, row in rows.items()}


def _peak(row: Sequence[Action], old: frozenset[tuple[int, int]]) -> int:
    live = peak = len({(stage, at) for stage, _, at in row} & old)
    for action in row:
        live += {"F": 1, "I": 0}.get(action.kind, -1)
        peak = max(peak, live)
    return peak


@functools.lru_cache(maxsize=16)
def gpipe(num_stages: int, num_microbatches: int) -> Order:
    """Return the order of GPipe: all forwards, then all backwards.

    Source: Huang et al. 2019, https://arxiv.org/abs/1811.06965, section 2.3.
    """
    return tuple(
        tuple(f"{stage}{kind}{at}" for kind in "FB" for at in range(num_microbatches))
        for stage in range(num_stages)
    )


@functools.lru_cache(maxsize=16)
def one_forward_one_backward(num_stages: int, num_microbatches: int) -> Order:
    """Return the order of 1F1B: forwards until the first backward can come, then by turns.

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
