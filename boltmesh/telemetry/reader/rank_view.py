"""Turns one rank's file into that rank's part of a snapshot.

``memory_kinds`` says what a rank's memory is for. Parameters, gradients, optimizer state and
buffers are measured. Activations cannot be walked: on CUDA they are what the allocator has given
out at its peak beyond the kinds that are known, which includes what libraries and communication
borrow. On the host the rest of the process is ``other``.
"""

import math
import os
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import msgspec

from boltmesh.errors import TelemetryError
from boltmesh.telemetry import layout
from boltmesh.telemetry.reader.file_records import MAX_NUMBER, Line, Status
from boltmesh.telemetry.reader.rank_reader import Facts, RankReader
from boltmesh.telemetry.reader.series_reader import MetricHistory, NamedPoint
from boltmesh.telemetry.reader.sidecar_files import ExpertLoads, OutputTail
from boltmesh.telemetry.reader.step_sums import StepRates, offload_totals
from boltmesh.telemetry.reader.traffic_reader import TrafficView
from boltmesh.telemetry.sanitize import clean
from boltmesh.telemetry.snapshot import (
    MEMORY_KINDS,
    MEMORY_PLACES,
    PHASES,
    Chunk,
    Event,
    LiveMicrobatches,
    Memory,
    MemoryKind,
    MetricPoint,
    RankSnapshot,
    RankState,
    StepRecord,
)

_Key = tuple[str, str]


def memory_totals(status: Status | None) -> Memory:
    """Return the totals as the rank sampled them."""
    if status is None:
        return Memory(None, None, None, None)
    totals = (status.rss, status.allocated, status.reserved, status.peak)
    return Memory(*(None if each == layout.UNKNOWN else each for each in totals))


def memory_kinds(
    walked: Sequence[int] | None, totals: Memory, predicted: Sequence[Mapping[str, Any]]
) -> tuple[MemoryKind, ...]:
    """Return each kind in each place with a known value."""
    measured = _measured(walked, totals)
    expected = _predicted(predicted)
    return tuple(
        MemoryKind(kind, place, measured.get((kind, place)), expected.get((kind, place)))  # type: ignore[arg-type]
        for kind in MEMORY_KINDS
        for place in MEMORY_PLACES
        if (kind, place) in measured or (kind, place) in expected
    )


def _measured(walked: Sequence[int] | None, totals: Memory) -> dict[_Key, int]:
    if walked is None:
        return {}
    keys = [(kind, place) for kind in MEMORY_KINDS for place in MEMORY_PLACES]
    found = {key: size for key, size in zip(keys, walked, strict=True) if 0 <= size <= MAX_NUMBER}
    known = {
        where: sum(
            size for (kind, place), size in found.items() if place == where and kind != "copies"
        )  # files, which are not resident in the process
        for where in MEMORY_PLACES
    }
    allocated, reserved = totals.device_allocated_bytes, totals.device_reserved_bytes
    peak = totals.device_peak_bytes
    if peak is not None:
        found["activations", "device"] = max(0, peak - known["device"])
    if allocated is not None and reserved is not None:
        found["cache", "device"] = max(0, reserved - allocated)
    if totals.host_rss_bytes is not None:
        found["other", "host"] = max(0, totals.host_rss_bytes - known["host"])
    return found


def _predicted(predicted: Sequence[Mapping[str, Any]]) -> dict[_Key, int]:
    found: dict[_Key, int] = {}
    for each in predicted[: len(MEMORY_KINDS) * len(MEMORY_PLACES)]:
        kind, place, size = each.get("kind"), each.get("place"), each.get("predicted_bytes")
        is_known = kind in MEMORY_KINDS and place in MEMORY_PLACES
        if is_known and isinstance(size, int) and 0 <= size <= MAX_NUMBER:
            found[str(kind), str(place)] = size
    return found


MOST_LINES: Final = 100
"""Lines of output kept for each rank."""

MOST_AHEAD_S: Final = 10.0
"""A time further ahead is of before the clock was set back, and no sign of life."""

MAX_STAGES_OF_RANK: Final = 64
"""Stages that are kept of a rank; a file may hold any number."""


class RankView:
    """One rank, looked at again and again.

    What a look finds unchanged is what it was at the look before, the same objects.

    Args:
        rank: Its number.
        reader: Its file, which need not exist yet.
        most_lines: Lines of its output that are kept.
    """

    def __init__(self, rank: int, reader: RankReader, *, most_lines: int = MOST_LINES) -> None:
        self.rank = rank
        self._experts = ExpertLoads(reader.path.with_suffix(".experts"))
        self._output = OutputTail(reader.path.with_suffix(".log"), most_lines)
        self.error_time = 0.0
        self.reader = reader
        self._forget()

    def _forget(self) -> None:
        self.is_present = False
        self._said: RankSnapshot | None = None
        self._rates = StepRates()
        self._steps: deque[StepRecord] = deque()
        self._chunks: tuple[Chunk, ...] = ()
        self._events: tuple[Event, ...] = ()
        self._history = MetricHistory()
        self._traffic: TrafficView | None = None

    def close(self) -> None:
        """Let go of the file."""
        self.reader.close()

    def look(self, *, is_quick: bool = False) -> RankSnapshot:
        """Read the file and return the rank; missing, with the reason, when it cannot be read.

        ``is_quick`` is as in ``RankReader.read``.
        """
        reader = self.reader
        try:
            reader.read(is_quick=is_quick)
        except (TelemetryError, OSError) as error:
            return self._missing(error)
        changed = reader.changed
        if "all" in changed:
            self._forget()
        before = self._said if self.is_present else None
        self.is_present = True
        if before is None or changed:
            self._said = before = self._build(changed, before)
        if not is_quick and (output := self._output.read()) is not before.output:
            self._said = before = msgspec.structs.replace(before, output=output)
        if not is_quick and (experts := self._experts.read()) is not before.experts:
            self._said = before = msgspec.structs.replace(before, experts=experts)
        return before

    def peek(self) -> RankSnapshot:
        """Return the rank's state, step and error alone, reading no more than they need.

        ``look`` is not affected, and so finds all that is new since it was called last.
        """
        try:
            self.reader.peek()
            state = self._state()
            if state == "failed":
                self.reader.read_events()
        except (TelemetryError, OSError) as error:
            return missing_rank(self.rank, self._why_missing(error))
        status = self.reader.status
        return msgspec.structs.replace(
            missing_rank(self.rank, self._error() if state == "failed" else None),
            state=state,
            global_step=status.global_step if status else 0,
        )

    def is_still_since(self, time: float) -> bool:
        """Whether this rank, when it was looked at last, had ended no step since then."""
        return bool(self._steps) and self._steps[-1].end_time < time

    def _missing(self, error: Exception) -> RankSnapshot:
        text = self._why_missing(error)
        if self.is_present or self._said is None or self._said.error != text:
            self._said = missing_rank(self.rank, text)
        self.is_present = False
        return self._said

    def _why_missing(self, error: Exception) -> str | None:
        """Return why an existing file cannot be read; None if there is no file."""
        if not os.path.lexists(self.reader.path):
            return None
        return clean(f"{self.reader.path.name}: {error}")

    def _build(self, changed: set[str], before: RankSnapshot | None) -> RankSnapshot:
        """Make a new snapshot, of the parts that have not changed those of ``before``."""
        reader = self.reader
        header, status, facts = reader.header, reader.status, reader.facts
        assert header is not None
        is_new = before is None
        if is_new or "facts" in changed or self._traffic is None:
            self._traffic = TrafficView(facts, header)
        is_counted = is_new or bool(changed & {"facts", "traffic"})
        if is_new or reader.new_steps:
            self._add_steps(from_scratch=is_new)
        if is_new or "spans" in changed:
            self._chunks = tuple(
                Chunk(
                    step=span.step,
                    stage=span.stage,
                    microbatch=span.microbatch,
                    kind=span.kind,  # type: ignore[arg-type]
                    start=header.wall_time(span.start_ns),
                    end=header.wall_time(span.end_ns),
                )
                for span in reader.spans.records.values()
            )
        if is_new or "events" in changed:
            self._events = self._make_events(reader.events.records.values())
        state = self._state()
        traffic, view = reader.traffic, self._traffic
        newest_row = next(reversed(reader.steps.records.values()), None)
        newest_step = newest_row.record if newest_row else None
        # The status is a tenth of a second old at most, and the newest step may be newer.
        where = [each for each in (status, newest_step) if each is not None]
        in_flight, moved_at = view.in_flight(traffic)
        now = time.time()
        times = [status.wall_s] if status else []
        times += [newest_step.end_time] if newest_step else []
        seen = [moved_at, *times] if times else [header.wall_s]
        past = [min(each, now) for each in seen if 0 < each <= now + MOST_AHEAD_S]
        memory = memory_totals(status)
        named = before if before is not None and "facts" not in changed else None
        return RankSnapshot(
            rank=self.rank,
            pid=header.pid,
            host=named.host if named else clean(facts.host, 100),
            device=named.device if named else clean(facts.device, 100),
            device_uuid=named.device_uuid if named else _uuid(facts),
            state=state,
            coordinates=named.coordinates if named else _coordinates(facts),
            phase=PHASES[reader.phase] if status and reader.phase < len(PHASES) else None,
            global_step=max((each.global_step for each in where), default=0),
            epoch=max((each.epoch for each in where), default=0),
            last_seen=max(past, default=now),
            steps=tuple(self._steps) if before is None or reader.new_steps else before.steps,
            samples_per_second=self._rates.samples,
            tokens_per_second=self._rates.tokens,
            memory=memory,
            collectives=(
                view.collectives(traffic) if before is None or is_counted else before.collectives
            ),
            in_flight=in_flight,
            error=self._error() if state == "failed" else None,
            groups=view.groups(traffic) if before is None or is_counted else before.groups,
            peers=view.peers(traffic) if before is None or is_counted else before.peers,
            memory_kinds=memory_kinds(reader.memory, memory, facts.expected_memory),
            offload=(
                offload_totals(reader.offload.records.values())
                if before is None or "offload" in changed
                else before.offload
            ),
            chunks=self._chunks,
            live_microbatches=tuple(
                LiveMicrobatches(stage, most)
                for stage, most in facts.live_microbatches[:MAX_STAGES_OF_RANK]
                if stage >= 0 and most >= 0
            ),
            flops_per_batch=_positive(facts.flops_per_batch),
            recomputed_flops_per_batch=_recomputed(facts.recomputed_flops_per_batch),
            peak_flops_per_second=_positive(facts.peak_flops_per_second),
            skipped_records=reader.num_damaged,
            output=() if before is None else before.output,
            experts=() if before is None else before.experts,
        )

    def _add_steps(self, *, from_scratch: bool) -> None:
        records = self.reader.steps.records
        if from_scratch:
            self._rates = StepRates()
            self._steps.clear()
            self._history = MetricHistory()
        new = (
            list(records.values()) if from_scratch else [step for _, step in self.reader.new_steps]
        )
        for step in new:
            self._rates.push(step)
            self._steps.append(step.record)
        while len(self._steps) > len(records):
            self._steps.popleft()

    def metrics(self) -> dict[str, float]:
        """Return the newest value of every metric of a rank whose series were read."""
        newest = {
            clean(name, layout.MAX_NAME): value
            for name, value in self.reader.series.newest_values().items()
            if not name.startswith(layout.TREND)
        }
        loss = next((step.loss for step in reversed(self._steps) if step.loss is not None), None)
        return newest if loss is None else newest | {"loss": loss}

    def history(self, *, data_size: int) -> tuple[tuple[MetricPoint, ...], tuple[MetricPoint, ...]]:
        """Return the series of all metrics, the loss of the newest steps without gaps, and trends.

        Args:
            data_size: Ranks with batches of their own, by which tokens are multiplied.
        """
        points: list[NamedPoint] = []
        is_whole = self._history.is_outdated(data_size)
        try:
            points, is_whole = self.reader.read_series(is_whole=is_whole)
        except (TelemetryError, OSError):
            is_whole = False
        return self._history.update(points, self._steps, data_size, is_whole=is_whole)

    def peek_events(self) -> tuple[Event, ...]:
        """Read the lines alone.

        Raises:
            TelemetryError: There is no file that can be trusted.
        """
        return self._make_events(self.reader.read_events())

    def _make_events(self, lines: Iterable[Line]) -> tuple[Event, ...]:
        return tuple(
            Event(time, self.rank, kind, clean(message, layout.MAX_MESSAGE))  # type: ignore[arg-type]
            for time, kind, message in lines
        )

    def events(self) -> tuple[Event, ...]:
        """Return the lines that this rank wrote for humans."""
        return self._events if self.is_present else ()

    @property
    def communication_note(self) -> str | None:
        """Why communication is not counted."""
        note = self.reader.facts.communication_note if self.is_present else None
        return clean(note) if note else None

    @property
    def expected(self) -> list[dict[str, object]]:
        """The traffic that the strategy states for a step, undecoded."""
        return self.reader.facts.expected

    @property
    def chosen_strategy(self) -> str | None:
        """Name of the strategy that a choosing one has taken."""
        chosen = self.reader.facts.chosen_strategy if self.is_present else None
        return clean(chosen, 60) if chosen else None

    @property
    def checkpoint(self) -> str | None:
        """The newest checkpoint that this rank has recorded."""
        path = self.reader.facts.checkpoint if self.is_present else None
        return clean(path) if path else None

    def _state(self) -> RankState:
        said = self.reader.status.state if self.reader.status else "starting"
        if said in {"finished", "failed"} or self.reader.is_alive:
            return said  # type: ignore[return-value]
        return "dead"

    def _error(self) -> str | None:
        for error_time, kind, message in reversed(self.reader.events.records.values()):
            if kind == "error":
                self.error_time = error_time
                return clean(message)
        return "an error that is no longer recorded"


def missing_rank(rank: int, error: str | None) -> RankSnapshot:
    """Return a rank that has no file, or none that can be trusted: ``error`` says why."""
    return RankSnapshot(
        rank=rank,
        pid=None,
        host="",
        device="",
        device_uuid=None,
        state="missing",
        coordinates={},
        phase=None,
        global_step=0,
        epoch=0,
        last_seen=0.0,
        steps=(),
        samples_per_second=None,
        tokens_per_second=None,
        memory=Memory(None, None, None, None),
        collectives=(),
        in_flight=None,
        error=error,
    )


def _uuid(facts: Facts) -> str | None:
    return clean(facts.device_uuid, 100) if facts.device_uuid else None


def _coordinates(facts: Facts) -> dict[str, int]:
    return {
        clean(axis, 40): at
        for axis, at in list(facts.coordinates.items())[:8]
        if 0 <= at <= MAX_NUMBER
    }


def _positive(number: float | None) -> float | None:
    return number if number is not None and math.isfinite(number) and number > 0 else None


def _recomputed(number: float | None) -> float | None:
    return 0.0 if number == 0 else _positive(number)
