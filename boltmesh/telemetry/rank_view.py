"""Turns one rank's file into what a snapshot says of that rank."""

from boltmesh.errors import TelemetryError
from boltmesh.telemetry import layout
from boltmesh.telemetry.cleaning import clean
from boltmesh.telemetry.rank_reader import RankReader, Step
from boltmesh.telemetry.rates import collective_totals, per_second
from boltmesh.telemetry.snapshot import (
    PHASES,
    CollectiveInFlight,
    CollectiveTotal,
    Event,
    Memory,
    MetricPoint,
    PhaseTime,
    RankSnapshot,
    RankState,
    StepRecord,
)

_NO_MEMORY = Memory(None, None, None, None)


class RankView:
    """One rank, looked at again and again.

    Args:
        rank: Its number.
        reader: Its file, which need not exist yet.
    """

    def __init__(self, rank: int, reader: RankReader) -> None:
        self.rank = rank
        self.is_present = False
        self.error_time = 0.0
        self.reader = reader
        self._steps: dict[int, StepRecord] = {}

    def close(self) -> None:
        """Let go of the file."""
        self.reader.close()

    def look(self) -> RankSnapshot:
        """Read the file and return what it says; missing, with the reason, when it cannot be."""
        reader = self.reader
        try:
            reader.read()
        except (TelemetryError, OSError) as error:
            self.is_present = False
            return self._missing(
                str(error) if reader.path.is_symlink() or reader.path.exists() else None
            )
        assert reader.header is not None
        self.is_present = True
        status, facts = reader.status, reader.facts
        state = self._state()
        steps = self._step_records()
        raw_steps = list(reader.steps.records.values())
        # The status is a tenth of a second old at most, and the newest step may be newer.
        where = [each for each in (status, *raw_steps[-1:]) if each is not None]
        in_flight, moved_at = self._in_flight()
        seen = [reader.header.wall_s, moved_at, *(step.end_time for step in steps[-1:])]
        seen += [status.wall_s] if status else []
        return RankSnapshot(
            rank=self.rank,
            pid=reader.header.pid,
            host=clean(facts.host, 100),
            device=clean(facts.device, 100),
            device_uuid=clean(facts.device_uuid, 100) if facts.device_uuid else None,
            state=state,
            coordinates={clean(axis, 40): at for axis, at in list(facts.coordinates.items())[:8]},
            phase=PHASES[reader.phase] if status and reader.phase < len(PHASES) else None,
            global_step=max((each.global_step for each in where), default=0),
            epoch=max((each.epoch for each in where), default=0),
            last_seen=max(seen),
            steps=steps,
            samples_per_second=per_second(raw_steps, lambda step: step.samples),
            tokens_per_second=per_second(raw_steps, lambda step: step.tokens),
            memory=self._memory(),
            collectives=tuple(self._collectives()),
            in_flight=in_flight,
            error=self._error() if state == "failed" else None,
        )

    def metrics(self) -> dict[str, float]:
        """Return the newest value of every metric."""
        newest = {
            clean(name, layout.MAX_NAME): points[-1][2]
            for name, points in self.reader.series().items()
            if points
        }
        losses = [step.loss for step in self._steps.values() if step.loss is not None]
        return newest | ({"loss": losses[-1]} if losses else {})

    def history(self) -> tuple[MetricPoint, ...]:
        """Return the series of all metrics, the loss of the newest steps without gaps."""
        steps = [step for step in self._steps.values() if step.loss is not None]
        points: list[tuple[int, MetricPoint]] = []
        for name, series in self.reader.series().items():
            shown = clean(name, layout.MAX_NAME)
            newest_thinned = steps[0].global_step if name == "loss" and steps else None
            points.extend(
                (global_step, MetricPoint(shown, global_step, value))
                for _, global_step, value in series
                if newest_thinned is None or global_step < newest_thinned
            )
        points.extend(
            (step.global_step, MetricPoint("loss", step.global_step, step.loss))
            for step in steps
            if step.loss is not None
        )
        points.sort(key=lambda point: point[0])
        return tuple(point for _, point in points)

    def events(self) -> list[Event]:
        """Return the lines that this rank wrote for humans."""
        if not self.is_present:
            return []
        return [
            Event(time, self.rank, kind, clean(message, layout.MAX_MESSAGE))  # type: ignore[arg-type]
            for time, kind, message in self.reader.events.records.values()
        ]

    @property
    def communication_note(self) -> str | None:
        """Why communication is not counted."""
        note = self.reader.facts.communication_note if self.is_present else None
        return clean(note) if note else None

    @property
    def expected(self) -> list[dict[str, object]]:
        """What the strategy says that a step moves, undecoded."""
        return self.reader.facts.expected

    @property
    def checkpoint(self) -> str | None:
        """The newest checkpoint that this rank told of."""
        path = self.reader.facts.checkpoint if self.is_present else None
        return clean(path) if path else None

    def _missing(self, reason: str | None) -> RankSnapshot:
        return RankSnapshot(
            rank=self.rank,
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
            memory=_NO_MEMORY,
            collectives=(),
            in_flight=None,
            error=clean(f"{self.reader.path.name}: {reason}") if reason else None,
        )

    def _state(self) -> RankState:
        said = self.reader.status.state if self.reader.status else "starting"
        if said in {"finished", "failed"} or self.reader.is_alive:
            return said  # type: ignore[return-value]
        return "dead"

    def _error(self) -> str | None:
        for time, kind, message in reversed(self.reader.events.records.values()):
            if kind == "error":
                self.error_time = time
                return clean(message)
        return "an error that is no longer recorded"

    def _memory(self) -> Memory:
        status = self.reader.status
        if status is None:
            return _NO_MEMORY
        return Memory(
            *(
                None if each == layout.UNKNOWN else each
                for each in (status.rss, status.allocated, status.reserved, status.peak)
            )
        )

    def _step_records(self) -> tuple[StepRecord, ...]:
        """Return the steps of the ring, each made once."""
        self._steps = {
            sequence: self._steps.get(sequence) or _step_record(step)
            for sequence, step in self.reader.steps.records.items()
        }
        return tuple(self._steps.values())

    def _in_flight(self) -> tuple[CollectiveInFlight | None, float]:
        """Return the newest collective, and the wall clock of its enqueue or end."""
        reader = self.reader
        assert reader.header is not None
        if not reader.traffic.records:
            return None, 0.0
        newest = next(reversed(reader.traffic.records.values()))
        facts = reader.facts
        if newest.group >= len(facts.groups) or newest.operator >= len(facts.operators):
            return None, 0.0
        is_timed = bool(newest.flags & layout.TRAFFIC_IS_TIMED)
        found = CollectiveInFlight(
            axis=clean(facts.groups[newest.group].axis, 40),
            operator=clean(facts.operators[newest.operator], 60),
            sequence=newest.in_group,
            is_done=newest.done_ns > 0 if is_timed else None,
        )
        return found, reader.header.wall_time(newest.done_ns or newest.enqueued_ns)

    def _collectives(self) -> list[CollectiveTotal]:
        return collective_totals(self.reader)


def _step_record(step: Step) -> StepRecord:
    return StepRecord(
        index=step.batch_index,
        global_step=step.global_step,
        epoch=step.epoch,
        end_time=step.wall_s,
        seconds=step.total_ns / 1e9,
        phases=tuple(
            PhaseTime(name, nanoseconds / 1e9)
            for name, nanoseconds in zip(PHASES, step.phases_ns, strict=True)
        ),
        loss=step.loss if step.flags & layout.STEP_HAS_LOSS else None,
        samples=None if step.samples < 0 else step.samples,
        tokens=None if step.tokens < 0 else step.tokens,
    )
