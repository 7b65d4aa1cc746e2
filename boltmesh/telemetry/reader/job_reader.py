"""Reads one job: all of its ranks into one snapshot, again and again while it runs."""

import contextlib
import os
import stat
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from boltmesh.errors import TelemetryError
from boltmesh.telemetry.job import (
    JOB_FILE,
    JobInfo,
    RankEnd,
    rank_file,
    read_end,
    read_job,
    stamp_of,
)
from boltmesh.telemetry.reader.cause import Failure, describe_death, job_state, stop_reason
from boltmesh.telemetry.reader.file_records import Status
from boltmesh.telemetry.reader.job_view import (
    PlansView,
    clean_mesh,
    describe,
    mean_expected,
    num_ranks,
    started_at,
)
from boltmesh.telemetry.reader.nodes_view import NodesView
from boltmesh.telemetry.reader.rank_reader import RankReader
from boltmesh.telemetry.reader.rank_view import MOST_LINES, RankView, missing_rank
from boltmesh.telemetry.sanitize import clean
from boltmesh.telemetry.snapshot import (
    PHASES,
    SCHEMA_VERSION,
    Event,
    JobSnapshot,
    JobState,
    RankSnapshot,
)
from boltmesh.telemetry.stall import RECENT_STEPS, STALL_AT_LEAST_S, stalled_seconds

if TYPE_CHECKING:
    from typing_extensions import Self

MAX_EVENTS = 256
MAX_STEPS = 65_536
"""Steps of all ranks together that are kept, so that a thousand ranks fit into a viewer."""

MAX_CHUNKS = 131_072
MANY_RANKS = 64
"""With more ranks than these, only as much is read as is shown."""

RANKS_IN_TURN = 256
RANKS_A_LOOK = 16
STILL_RANKS_A_LOOK = 64
"""With more ranks than RANKS_IN_TURN, a look reads the collectives and chunks of so many, in turn,
and where they are, their steps and events of all. Those that have made no step for STILL_S come
sooner, for in a hang their collectives are what counts; and they cost little, for little is new."""

STILL_S = 10.0
BRIEF_STEPS = 5
BRIEF_LINES = 10
"""Lines of output kept for each of many ranks."""
MOST_BEHIND = 64
"""Steps that the means of collectives are over where ranks take turns, and records that a rank may
be behind when its turn comes."""

MIN_STEPS = 64
"""Steps, and chunks, that are kept of a rank however many there are."""

STARTING_S = 120.0
"""How long the ranks of a job may take until one of them has opened its file."""


class Peek(NamedTuple):
    """State of a job without its records."""

    statuses: list[Status]
    """One for each rank that has a file."""
    phases: list[str | None]
    """Current phase of each of these ranks."""
    state: JobState
    stalled_s: float | None
    """Seconds without progress; None if the job is not stalled."""
    stop_reason: str | None


class _Verdict(NamedTuple):
    """State of a job, and the evidence for it."""

    ranks: tuple[RankSnapshot, ...]
    failures: list[Failure]
    state: JobState
    cause: str | None


class JobReader:
    """One job's folder, open for reading.

    Args:
        path: The job's folder.

    Raises:
        TelemetryError: It is not the folder of a job of this user.
    """

    def __init__(self, path: Path) -> None:
        check_folder(path)
        self.path = path
        self._stamp = stamp_of(path / JOB_FILE)
        self.info = read_job(path)
        self._about: dict[str, Any] | None = None
        self._plans = PlansView(path)
        self._num_looks = 0
        self._lines: list[tuple[Event, ...]] = []
        self._events: tuple[Event, ...] = ()
        self._ranks: dict[int, RankView] = {}
        self._absences: dict[int, RankSnapshot] = {}
        self._nodes = NodesView(path)

    def __enter__(self) -> "Self":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Let go of the job's files; the job does not notice."""
        for rank in self._ranks.values():
            rank.close()
        self._ranks.clear()

    def snapshot(self) -> JobSnapshot:
        """Return a snapshot of the job's files as they are now.

        A rank whose file is absent or cannot be trusted is shown as missing, with the reason.

        Raises:
            TelemetryError: The job's own description can no longer be read.
        """
        if (stamp := stamp_of(self.path / JOB_FILE)) != self._stamp:
            with contextlib.suppress(TelemetryError):  # a cleaner took it: what was read is true
                self.info = read_job(self.path)
                self._stamp = stamp
                self._about = None
        info = self.info
        end = self._end()
        views = self._views()
        self._num_looks += 1
        turns = self._turns(views)
        looks = {
            view.rank: _with_death(
                view.look(is_quick=turns is not None and view.rank not in turns), end
            )
            for view in views
        }
        ranks, failures, state, cause = self._judge(views, looks, end)
        present = [rank for rank in ranks if rank.state != "missing"]
        started = started_at(info)
        first = next((view for view in views if view.is_present), None)
        data_size = clean_mesh(info).get("data", 1)
        history, trends = first.history(data_size=data_size) if first else ((), ())
        events = self._newest_events(views)
        if self._about is None:
            self._about = describe(info)
        chosen = first.chosen_strategy if first else None
        about = self._about if chosen is None else self._about | {"strategy": chosen}
        return JobSnapshot(
            **about,
            schema=SCHEMA_VERSION,
            state=state,
            started=started,
            updated=max((rank.last_seen for rank in present), default=started),
            epoch=max((rank.epoch for rank in present), default=0),
            global_step=max((rank.global_step for rank in present), default=0),
            history=history,
            trends=trends,
            metrics=first.metrics() if first else {},
            samples_per_second=_whole(present, info, "samples_per_second"),
            tokens_per_second=_whole(present, info, "tokens_per_second"),
            ranks=ranks,
            expected=mean_expected(views, [ranks[view.rank] for view in views]),
            communication_note=next(
                (note for view in views if (note := view.communication_note)), None
            ),
            events=events,
            cause=clean(cause, 600) if cause else None,
            checkpoint=_newest_checkpoint(views),
            pipeline=self._plans.pipeline,
            tensor_plan=self._plans.tensor,
            stop_reason=stop_reason(events, failures) if state == "finished" else None,
            is_restarting=(
                state in {"failed", "crashed"}
                and info.restarted_by is not None
                and info.restarted_by.has_ended() is False
            ),
        )

    def _end(self) -> RankEnd | None:
        """Return how the first rank died, where a supervisor saw it."""
        end = read_end(self.path)
        return None if end is not None and end.time < self.info.started else end  # earlier run's

    def _judge(
        self, views: Sequence[RankView], looks: Mapping[int, RankSnapshot], end: RankEnd | None
    ) -> _Verdict:
        """Return the state of the job, from those of the ranks that have a file here."""
        ranks = self._nodes.fill(
            [looks.get(rank) or self._absent(rank) for rank in range(num_ranks(self.info))]
        )
        error_times = {view.rank: view.error_time for view in views}
        failures = [
            Failure(
                rank,
                rank.last_seen if rank.is_summary else error_times.get(rank.rank, 0.0),
                rank.error or "",
            )
            for rank in ranks
            if rank.state == "failed"
        ]
        state, cause = job_state(ranks, failures, end)
        is_missing = all(rank.state == "missing" for rank in ranks)
        if is_missing and state == "running" and time.time() - started_at(self.info) > STARTING_S:
            state, cause = "crashed", "no rank of it has left telemetry that can be read."
        return _Verdict(ranks, failures, state, cause)

    def _turns(self, views: Sequence[RankView]) -> set[int] | None:
        """Return the ranks that this look reads whole; None: all."""
        if len(views) <= RANKS_IN_TURN:
            return None
        ranks = [view.rank for view in views]
        before = time.time() - STILL_S
        still = [view.rank for view in views if view.is_still_since(before)]
        return {
            each[(self._num_looks * number + at) % len(each)]
            for each, number in ((ranks, RANKS_A_LOOK), (still, STILL_RANKS_A_LOOK))
            for at in range(min(number, len(each)))
        }

    def _newest_events(self, views: Sequence[RankView]) -> tuple[Event, ...]:
        """Return the newest lines of all ranks; sorted again only when a rank has another one."""
        lines = [view.events() for view in views]
        if len(lines) != len(self._lines) or any(
            now is not before for now, before in zip(lines, self._lines, strict=True)
        ):
            self._lines = lines
            events = [event for each in lines for event in each]
            self._events = tuple(sorted(events, key=lambda event: event.time)[-MAX_EVENTS:])
        return self._events

    def peek(self) -> Peek:
        """Return where the ranks are and the job's state, reading as little as that needs.

        A job that runs and is silent is read whole, for its limit depends on its steps; so is one
        of which some ranks run and others do not.
        """
        statuses: list[Status] = []
        phases: list[str | None] = []
        views = [self._view(rank) for rank in range(num_ranks(self.info))]
        looks = {view.rank: view.peek() for view in views}
        for view in views:
            reader = view.reader
            if looks[view.rank].state != "missing" and reader.status is not None:
                statuses.append(reader.status)
                phases.append(PHASES[reader.phase] if reader.phase < len(PHASES) else None)
        states = {look.state for look in looks.values()}
        if states & {"starting", "running"} and statuses:
            silent_s = time.time() - max(status.wall_s for status in statuses)
            if states & {"failed", "dead"} or silent_s >= STALL_AT_LEAST_S:
                return self._peek_whole(statuses, phases)
            return Peek(statuses, phases, "running", None, None)
        if statuses and not states & {"failed", "dead"}:
            return Peek(statuses, phases, "finished", None, self._stop_reason())
        _, failures, state, _ = self._judge(views, looks, self._end())
        if state == "running":
            return self._peek_whole(statuses, phases)
        reason = stop_reason((), failures) if state == "finished" else None
        return Peek(statuses, phases, state, None, reason)

    def throughput(self) -> float | None:
        """Return samples a second of the whole job, by the file of its first rank alone."""
        with contextlib.suppress(TelemetryError, OSError):
            return _whole([self._view(0).look()], self.info, "samples_per_second")
        return None

    def _peek_whole(self, statuses: list[Status], phases: list[str | None]) -> Peek:
        job = self.snapshot()
        stalled_s = stalled_seconds(job, time.time())
        return Peek(statuses, phases, job.state, stalled_s, job.stop_reason)

    def _stop_reason(self) -> str | None:
        """Return why a job ended early that ended well, from the events of its first rank."""
        for rank in range(num_ranks(self.info)):
            with contextlib.suppress(TelemetryError, OSError):
                return stop_reason(self._view(rank).peek_events(), ())
        return None

    def _views(self) -> list[RankView]:
        """Return the ranks to look at: of very many those alone that have a file."""
        number = num_ranks(self.info)
        if number <= MANY_RANKS:
            return [self._view(rank) for rank in range(number)]
        try:
            names = set(os.listdir(self.path))
        except OSError:  # a cleaner removed it; what is open stays readable
            names = set()
        return [
            self._view(rank)
            for rank in range(number)
            if rank in self._ranks or f"rank-{rank}.bin" in names
        ]

    def _absent(self, rank: int) -> RankSnapshot:
        found = self._absences.get(rank)
        if found is None:
            found = self._absences[rank] = missing_rank(rank, None)
        return found

    def _view(self, rank: int) -> RankView:
        if rank not in self._ranks:
            shared_by = max(1, num_ranks(self.info))
            reader = RankReader(
                rank_file(self.path, rank),
                keep_steps=max(MIN_STEPS, MAX_STEPS // shared_by),
                keep_spans=max(MIN_STEPS, MAX_CHUNKS // shared_by),
                is_brief=shared_by > MANY_RANKS,
                num_recent=BRIEF_STEPS if shared_by > RANKS_IN_TURN else RECENT_STEPS,
                most_behind=MOST_BEHIND if shared_by > RANKS_IN_TURN else None,
            )
            most_lines = BRIEF_LINES if shared_by > MANY_RANKS else MOST_LINES
            self._ranks[rank] = RankView(rank, reader, most_lines=most_lines)
        return self._ranks[rank]


def check_folder(path: Path) -> None:
    """Refuse a path that is no folder of this user's own.

    Raises:
        TelemetryError: It cannot be read, is a link or a file, or belongs to another user.
    """
    try:
        found = path.lstat()
    except OSError as error:
        raise TelemetryError(f"{path} cannot be read: {error.strerror}.") from error
    if stat.S_ISLNK(found.st_mode):
        raise TelemetryError(f"{path} is a link. Name the folder that it leads to.")
    if not stat.S_ISDIR(found.st_mode):
        raise TelemetryError(f"{path} is not the folder of a job.")
    if found.st_uid != os.geteuid():
        raise TelemetryError(
            f"{path} belongs to user {found.st_uid}, and this is user {os.geteuid()}. "
            f"Read it as its owner."
        )


def _with_death(rank: RankSnapshot, end: RankEnd | None) -> RankSnapshot:
    if end is None or end.rank != rank.rank or rank.state != "dead":
        return rank
    return msgspec.structs.replace(rank, error=clean(describe_death(end)))


def _whole(ranks: Sequence[RankSnapshot], info: JobInfo, name: str) -> float | None:
    """Sum a rate over the data axis, counting ranks that share their data once.

    Ranks of the data axis that another host holds are taken to be like those seen here: they
    step together, with batches of the same size.
    """
    shares: dict[int, list[float]] = {}
    for rank in ranks:
        value: float | None = getattr(rank, name)
        if value is None:
            return None
        shares.setdefault(rank.coordinates.get("data", 0), []).append(value)
    if not shares:
        return None
    mean = sum(sum(values) / len(values) for values in shares.values()) / len(shares)
    return mean * max(clean_mesh(info).get("data", 1), len(shares))


def _newest_checkpoint(views: Sequence[RankView]) -> str | None:
    return next((view.checkpoint for view in views if view.checkpoint), None)
