"""Figures of the recent optimizer steps of a rank, kept up to date as steps come.

Sums over a window that moves: a look costs what has changed, not the length of the window.

``offload_totals`` says what a rank moves between its device, its host and its disk, in all and in a
step. Medians, not means: validation and checkpoints read what is offloaded too, and a step between
which they fell says nothing of the others.
"""

import itertools
from collections import deque
from collections.abc import Iterable
from statistics import median
from typing import Final

from boltmesh.telemetry import layout
from boltmesh.telemetry.reader.file_records import OffloadRow, StepRow, Traffic
from boltmesh.telemetry.snapshot import OffloadTotal
from boltmesh.telemetry.stall import RECENT_STEPS, whole_steps
from boltmesh.telemetry.writer.phases import CHECKPOINT, VALIDATION

WARM_UP_STEPS: Final = 2
"""The first optimizer steps of a run move more: DDP rebuilds its buckets and broadcasts them."""

MAX_KEPT_STEPS: Final = 4096
"""Batches with traffic sums of their own; longer optimizer steps have no mean."""

Key = tuple[int, int, int]
"""Group, operator and peer as in ``layout.TRAFFIC``."""


_Batch = tuple[int, int | None, int | None]
"""Nanoseconds, samples and tokens."""


class StepRates:
    """Items a second over the recent optimizer steps, validation and checkpoints left out.

    Without the first batch of the run as soon as there are others, for it warms up.
    """

    def __init__(self) -> None:
        self._recent: deque[_Batch] = deque()
        self._sums = [0, 0, 0]
        self._num_unknown = [0, 0]
        self._is_first = False
        self._global_step: int | None = None
        self._num_batches = 0
        """Since the newest end of an optimizer step."""
        self._batches_per_step = 1

    def push(self, step: StepRow) -> None:
        """Add the newest batch."""
        if self._is_first and self._recent:
            self._pop()
        self._is_first = step.sequence == 1
        batch = step.record
        entry = (step.busy_ns, batch.samples, batch.tokens)
        self._change(entry, 1)
        self._recent.append(entry)
        self._num_batches += 1
        if self._global_step is not None and batch.global_step > self._global_step:
            self._batches_per_step, self._num_batches = self._num_batches, 0
        self._global_step = batch.global_step
        while len(self._recent) > whole_steps(RECENT_STEPS, self._batches_per_step):
            self._pop()

    def _pop(self) -> None:
        self._change(self._recent.popleft(), -1)

    def _change(self, entry: _Batch, sign: int) -> None:
        busy_ns, *items = entry
        self._sums[0] += sign * busy_ns
        for at, number in enumerate(items):
            if number is None:
                self._num_unknown[at] += sign
            else:
                self._sums[1 + at] += sign * number

    @property
    def samples(self) -> float | None:
        """Samples a second; None where a batch does not say how many it had."""
        return self._rate(0)

    @property
    def tokens(self) -> float | None:
        """Tokens a second, likewise."""
        return self._rate(1)

    def _rate(self, at: int) -> float | None:
        if self._sums[0] <= 0 or self._num_unknown[at]:
            return None
        return self._sums[1 + at] * 1e9 / self._sums[0]


class TrafficSums:
    """Calls, bytes and time by operator over the recent optimizer steps.

    Steps that validate or write a checkpoint are left out: what is called before and after, such as
    a gather of parameters or the reduction of a metric, is part of no other step. So are steps of
    fewer batches than the one before, as at the end of an epoch, which move less.

    Args:
        num_recent: How many steps those are.
    """

    def __init__(self, num_recent: int = RECENT_STEPS) -> None:
        self.num_steps = 0
        """Optimizer steps that the sums are over."""
        self.sums: dict[Key, list[int]] = {}
        """Calls, payload bytes, nanoseconds, and calls whose time is unknown."""
        self._ends: deque[int] = deque(maxlen=num_recent + 1)
        self._num_skipped = 0
        self._global_step: int | None = None
        self._batches: list[int] = []
        """Batches of the current optimizer step, so far."""
        self._batches_before = 0
        """Number of batches of the newest step without an interruption."""
        self._is_ordinary = True
        self._left_out: set[int] = set()
        """Batches of optimizer steps that are in no mean."""
        self._by_step: dict[int, dict[Key, list[int]]] = {}
        self._complete_from = 0
        self._window = (0, 0)

    @property
    def needed_after(self) -> int:
        """The batch up to whose end nothing is needed."""
        return self._ends[0] if len(self._ends) == self._ends.maxlen else 0

    def push(self, step: StepRow) -> None:
        """Note a batch that has ended."""
        is_first = step.sequence == 1
        before, global_step = 0 if is_first else self._global_step, step.record.global_step
        if is_first:
            self._num_skipped = WARM_UP_STEPS - 1
        self._batches.append(step.sequence)
        if not step.is_ordinary:
            self._is_ordinary = False
        if not self._is_ordinary:
            self._left_out.update(self._batches)
            self._batches.clear()
        if before is not None and global_step > before:
            if self._num_skipped:
                self._num_skipped -= 1
            else:
                self._ends.append(step.sequence)
            if self._is_ordinary:
                if len(self._batches) < self._batches_before:
                    self._left_out.update(self._batches)
                self._batches_before = len(self._batches)
            self._batches.clear()
            self._is_ordinary = True
        self._global_step = global_step

    def break_before(self, step: int) -> None:
        """Forget all earlier batches: the beginning of this one may be missing."""
        self._complete_from = step

    def add(self, record: Traffic, sign: int = 1) -> None:
        """Add a collective, or remove one with its earlier values."""
        if record.phase in {VALIDATION, CHECKPOINT}:
            return
        is_timed = record.done_ns and record.flags & layout.TRAFFIC_IS_TIMED
        key = (record.group, record.operator, record.peer)
        values = (
            1,
            record.payload_bytes,
            record.done_ns - record.enqueued_ns if is_timed else 0,
            0 if is_timed else 1,
        )
        of_step = self._by_step.get(record.step)
        if of_step is None:
            if record.step <= self.needed_after:
                return
            of_step = self._by_step[record.step] = {}
        _add(of_step, key, values, sign)
        if self._is_in(self._window, record.step):
            _add(self.sums, key, values, sign)

    def move(self) -> bool:
        """Move the window to the newest optimizer steps; return whether it has moved."""
        ends = self._ends
        if ends and ends[0] < self._complete_from:
            ends = deque(end for end in ends if end >= self._complete_from)
        self.num_steps = sum(end not in self._left_out for end in itertools.islice(ends, 1, None))
        before, window = self._window, (ends[0], ends[-1]) if ends else (0, 0)
        if window == before:
            return False
        self._window = window
        for step in self._between(before, window):
            was_in = self._is_in(before, step)
            is_in = self._is_in(window, step)
            if was_in != is_in:
                for key, values in self._by_step.get(step, {}).items():
                    _add(self.sums, key, values, 1 if is_in else -1)
            if step <= window[0]:
                self._by_step.pop(step, None)
        self._left_out = {step for step in self._left_out if step > window[0]}
        while len(self._by_step) > MAX_KEPT_STEPS:
            step = next(iter(self._by_step))
            for key, values in self._by_step.pop(step).items():
                if self._is_in(window, step):
                    _add(self.sums, key, values, -1)
            self._complete_from = max(self._complete_from, step + 1)
        return True

    def _is_in(self, window: tuple[int, int], step: int) -> bool:
        return window[0] < step <= window[1] and step not in self._left_out

    def _between(self, before: tuple[int, int], window: tuple[int, int]) -> Iterable[int]:
        """Return the batches that may have come into the window or have left it."""
        came, left = range(before[1] + 1, window[1] + 1), range(before[0], window[0] + 1)
        is_near = before[0] <= window[0] and before[1] <= window[1]
        if is_near and len(came) + len(left) < len(self._by_step):
            return itertools.chain(came, left)
        return list(self._by_step)


def _add(
    sums: dict[Key, list[int]], key: Key, values: "tuple[int, ...] | list[int]", sign: int
) -> None:
    total = sums.get(key)
    if total is None:
        total = sums[key] = [0, 0, 0, 0]
    for at, value in enumerate(values):
        total[at] += sign * value
    if not total[0]:
        del sums[key]


MOST_BYTES_PER_NS: Final = 10**9
"""An exabyte a second: a record that says more is damaged."""

_LEAST_STEPS: Final = 3


def offload_totals(records: Iterable[OffloadRow]) -> tuple[OffloadTotal, ...]:
    """Return each way on which anything was moved, from the newest records, oldest first."""
    known = list(records)
    if not known:
        return ()
    steps = _first_of_each_step(known)
    return tuple(
        _total(way, newest, [(each.global_step, each.ways[number]) for each in steps])
        for number, (way, newest) in enumerate(
            zip(layout.OFFLOAD_WAYS, known[-1].ways, strict=True)
        )
        if newest[0]
    )


def _first_of_each_step(records: list[OffloadRow]) -> list[OffloadRow]:
    """Leave out records written at the end of the run, after the last step."""
    found = records[:1]
    for record in records[1:]:
        if record.global_step > found[-1].global_step:
            found.append(record)
        elif record.global_step < found[-1].global_step:
            found = [record]  # another fit of the same process
    return found


def _total(
    way: tuple[str, str],
    newest: tuple[int, int, int],
    steps: list[tuple[int, tuple[int, int, int]]],
) -> OffloadTotal:
    moved: list[float] = []
    busy: list[float] = []
    for (before, old), (after, new) in itertools.pairwise(steps):
        moved.append(max(0, new[1] - old[1]) / (after - before))
        busy.append(max(0, new[2] - old[2]) / (after - before) / 1e9)
    is_known = len(moved) >= _LEAST_STEPS
    # A run that was too short for a step's median still has a bandwidth.
    first = steps[0][1] if is_known else (0, 0, 0)
    recent_bytes, recent_ns = newest[1] - first[1], newest[2] - first[2]
    is_rate = 0 < recent_bytes <= recent_ns * MOST_BYTES_PER_NS
    place, direction = way
    return OffloadTotal(
        place=place,  # type: ignore[arg-type]
        direction=direction,  # type: ignore[arg-type]
        calls=newest[0],
        moved_bytes=newest[1],
        bytes_per_step=median(moved) if is_known else None,
        seconds_per_step=median(busy) if is_known else None,
        bytes_per_second=recent_bytes * 1e9 / recent_ns if is_rate else None,
    )
