"""Times of steps and batches: the recent ones of each rank, their phases, and an ordinary step.

A step is an optimizer step with all of its accumulated batches. ``recent_times`` reads the times of
recent batches from the records, once for all panels. ``phase_split`` divides a batch into phases;
in a pipeline, the chunks of a batch divide the time of its schedule, recorded as one phase, into
forward and backward passes and the bubble.

``rank_profiles`` has an ordinary optimizer step of each rank, by which ranks are compared. Batches
that validate or write a checkpoint are left out, and so are the first ones of a run, which compile,
allocate and fill caches.
"""

import itertools
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from statistics import fmean, median

import msgspec

from boltmesh.telemetry.snapshot import PHASES, JobSnapshot, PhaseTime, RankSnapshot, StepRecord
from boltmesh.telemetry.stall import RECENT_STEPS, recent_step_seconds, whole_steps
from boltmesh.tui.metrics.memo import remember_last
from boltmesh.tui.metrics.pipelines import pipelines

LEAST_S = 1e-9
"""Steps are recorded in nanoseconds."""

LEAST_STEPS = 8
RECORDS = 4096
"""In jobs with many ranks, least steps of each rank and most steps in all that are judged."""


class RecentTimes(msgspec.Struct, frozen=True):
    """One rank's recent batches, in columns."""

    indexes: tuple[int, ...]
    seconds: tuple[float, ...]
    phases: dict[str, tuple[float, ...]]
    """Seconds of each phase that took any."""
    are_last: tuple[bool, ...]
    """Whether an optimizer step ends with the batch."""


@remember_last
def recent_times(job: JobSnapshot) -> dict[int, RecentTimes]:
    """Return the columns of each rank that has steps.

    Where a rank of a pipeline has recorded its chunks, ``forward`` and ``backward`` are their time,
    and what the rank waits for its neighbours is ``bubble``.
    """
    return _times(job, RECENT_STEPS)


JUDGED_S = 30.0
JUDGED_STEPS = 200
"""Findings are judged over the steps of this time, from RECENT_STEPS to this many: on a busy host
twenty steps differ by chance more than ranks do."""


@remember_last
def judged_times(job: JobSnapshot) -> dict[int, RecentTimes]:
    """Return the columns over the longer window in which findings are judged."""
    step_s = max(filter(None, map(recent_step_seconds, job.ranks[:STEP_SAMPLES])), default=JUDGED_S)
    num_steps = JUDGED_S / step_s if step_s > 0 else 0.0
    return _times(job, int(min(JUDGED_STEPS, max(RECENT_STEPS, num_steps))))


def _times(job: JobSnapshot, num_steps: int) -> dict[int, RecentTimes]:
    num_steps = min(num_steps, max(LEAST_STEPS, RECORDS // max(1, len(job.ranks))))
    num_steps = whole_steps(num_steps, batches_per_step(job))
    chunks = _chunk_times(job, num_steps)
    return {
        rank.rank: times
        for rank in job.ranks
        if (times := _columns(rank, num_steps, chunks.get(rank.rank))) is not None
    }


BUBBLE = "bubble"
"""A part of a step beside PHASES: the time in which a pipeline's rank waits for its neighbours."""


class ChunkTimes(msgspec.Struct, frozen=True):
    """Seconds of one rank of a pipeline in one batch."""

    forward: float
    backward: float
    """Weight gradients included."""
    idle: float
    """The rest of the window that the ranks of the pipeline share."""


_NamedBatch = tuple[int, int]
"""Optimizer step, and the batch of it from 0."""


def _chunk_times(job: JobSnapshot, num_steps: int) -> dict[int, dict[_NamedBatch, ChunkTimes]]:
    """Return the times of each rank of a pipeline in its newest whole batches."""
    # Without the schedule the batches of an optimizer step have one window.
    count = batches_per_step(job) if job.pipeline is None else 1
    found: dict[int, dict[_NamedBatch, ChunkTimes]] = {}
    for pipeline in pipelines(job):
        newest = list(zip(pipeline.whole, pipeline.times, strict=True))[-num_steps:]
        for at, rank in enumerate(pipeline.ranks):
            batches = found[rank] = {}
            for step, times in newest:
                kinds = times.rows[at]
                busy_s, forward_s = sum(kinds.values()), kinds.get("F", 0.0)
                known = ChunkTimes(
                    forward=forward_s / count,
                    backward=(busy_s - forward_s) / count,
                    idle=max(0.0, times.window_s - busy_s) / count,
                )
                for batch in range(count):
                    batches[step.step, step.batch + batch] = known
    return {rank: batches for rank, batches in found.items() if batches}


def _mean_times(times: Collection[ChunkTimes]) -> ChunkTimes:
    return ChunkTimes(
        forward=fmean(each.forward for each in times),
        backward=fmean(each.backward for each in times),
        idle=fmean(each.idle for each in times),
    )


def _divide(row: dict[str, float], chunks: ChunkTimes) -> dict[str, float]:
    """Divide the recorded phases of a step by its chunks; the sum stays the same.

    A rank waits for its neighbours inside ``forward``, in which the whole schedule runs. Where
    forward and backward together are no longer than the chunks, it has recorded the waits as
    communication.
    """
    known = dict(row)
    passes_s = known.get("forward", 0.0) + known.get("backward", 0.0)
    computed_s = chunks.forward + chunks.backward
    idle_s = moved_s = 0.0
    if passes_s < computed_s + chunks.idle / 2:
        for name in ("communication", "other"):
            part = min(known.get(name, 0.0), chunks.idle - idle_s)
            if part > 0:
                known[name] -= part
                idle_s += part
    moved_s = min(passes_s, chunks.idle - idle_s)
    share = chunks.forward / computed_s if computed_s > 0 else 1.0
    known["forward"] = share * (passes_s - moved_s)
    known["backward"] = (1 - share) * (passes_s - moved_s)
    known[BUBBLE] = idle_s + moved_s
    return known


def _batch_names(steps: Sequence[StepRecord]) -> list[_NamedBatch]:
    """Return of each record the optimizer step that it belongs to, and which batch of that it is.

    The batch in which ``global_step`` rises is the last of its step.
    """
    names: list[_NamedBatch] = []
    for place, step in enumerate(steps):
        is_last = place == 0 or step.global_step > steps[place - 1].global_step
        number = step.global_step if is_last else step.global_step + 1
        batch = names[-1][1] + 1 if names and names[-1][0] == number else 0
        names.append((number, batch))
    return names


def _columns(
    rank: RankSnapshot, num_steps: int, chunks: dict[_NamedBatch, ChunkTimes] | None
) -> RecentTimes | None:
    indexes: list[int] = []
    seconds: list[float] = []
    rows: list[dict[str, float]] = []
    are_last: list[bool] = []
    recent = rank.steps[-num_steps:]
    before = rank.steps[-len(recent) - 1].global_step if len(rank.steps) > len(recent) else -1
    # The first of these records may be in the middle of an optimizer step.
    batches = _batch_names(rank.steps[-2 * num_steps :])[-len(recent) :] if chunks else []
    mean = _mean_times(chunks.values()) if chunks else None
    for place, step in enumerate(recent):
        row = {phase.name: phase.seconds for phase in step.phases}
        if chunks and mean is not None:
            row = _divide(row, chunks.get(batches[place], mean))
        # A recording can hold any number, also one whose mean is zero.
        if LEAST_S <= step.seconds < math.inf and 0 <= sum(row.values()) < math.inf:
            indexes.append(step.index)
            seconds.append(step.seconds)
            rows.append(row)
            are_last.append(step.global_step > before)
        before = step.global_step
    if not rows:
        return None
    names = tuple(rows[0])
    if any(row.keys() != rows[0].keys() for row in rows):
        names = tuple(dict.fromkeys(name for row in rows for name in row))
        rows = [{name: row.get(name, 0.0) for name in names} for row in rows]
    columns = zip(names, zip(*(row.values() for row in rows), strict=True), strict=True)
    return RecentTimes(
        indexes=tuple(indexes),
        seconds=tuple(seconds),
        phases={name: column for name, column in columns if any(column)},
        are_last=tuple(are_last),
    )


STEP_SAMPLES = 8
"""Ranks whose steps are averaged for the time of a step: synchronous ranks all take as long."""


def optimizer_step_seconds(job: JobSnapshot) -> float | None:
    """Return the time of a recent optimizer step, all of its accumulated batches together."""
    stride = max(1, len(job.ranks) // STEP_SAMPLES)
    found = [seconds for rank in job.ranks[::stride] if (seconds := step_seconds(rank)) is not None]
    return median(found) if found else None


@remember_last
def batches_per_step(job: JobSnapshot) -> int:
    """Return how many batches an optimizer step accumulates, by the first rank that shows it."""
    for rank in job.ranks:
        ends = _step_ends(rank)
        if len(ends) >= 2:
            return max(1, round((ends[-1] - ends[0]) / (len(ends) - 1)))
    return 1


def step_seconds(rank: RankSnapshot) -> float | None:
    """Return the recent time of an optimizer step of one rank."""
    ends = _step_ends(rank, RECENT_STEPS + 1)
    if len(ends) < 2:
        return None
    whole_steps = rank.steps[ends[0] + 1 : ends[-1] + 1]
    return sum(step.seconds for step in whole_steps) / (len(ends) - 1)


def _step_ends(rank: RankSnapshot, most: int | None = None) -> list[int]:
    """Return the places of the newest records with which an optimizer step ends, oldest first."""
    steps = rank.steps
    ends = (
        place
        for place in range(len(steps) - 1, 0, -1)
        if steps[place].global_step > steps[place - 1].global_step
    )
    return list(itertools.islice(ends, most))[::-1]


SPLIT_PHASES = (*PHASES[:-1], BUBBLE, PHASES[-1])
"""The parts of a step in the order in which they are drawn; ``other`` stays the last."""


class PhaseSplit(msgspec.Struct, frozen=True):
    """The mean recent step over the ranks that have one."""

    seconds: float
    phases: tuple[PhaseTime, ...]
    """In the order of ``SPLIT_PHASES``, those that took time; they add up to ``seconds``."""

    def share(self, name: str) -> float:
        """Return the share of the step that a phase takes."""
        return sum(each.seconds for each in self.phases if each.name == name) / self.seconds


@remember_last
def phase_split(job: JobSnapshot) -> PhaseSplit | None:
    """Return the mean recent step of the job, or None before the first.

    Steps that validate, write a checkpoint or warm up count only while there are no others.
    """
    total_s = 0.0
    num_steps = 0
    seconds_by_phase = dict.fromkeys(SPLIT_PHASES, 0.0)
    known = list(recent_times(job).values())
    ordinary = [_ordinary(times) for times in known]
    for times in ordinary if any(times.seconds for times in ordinary) else known:
        total_s += sum(times.seconds)
        num_steps += len(times.seconds)
        for phase, column in times.phases.items():
            # A newer writer may know more phases than this reader has words for.
            name = phase if phase in seconds_by_phase else "other"
            seconds_by_phase[name] += sum(column)
    if num_steps == 0:
        return None
    # Records may leave a rest unnamed; it is shown rather than lost.
    seconds_by_phase["other"] += max(0.0, total_s - sum(seconds_by_phase.values()))
    return PhaseSplit(
        seconds=total_s / num_steps,
        phases=tuple(
            PhaseTime(name, seconds / num_steps)
            for name, seconds in seconds_by_phase.items()
            if seconds > 0
        ),
    )


DEVIATION = 1.4826
"""Makes the median deviation of a normal distribution its standard deviation."""

WARM_UP_BATCHES = 3
"""Batches at the start of a run that are not judged: kernels are chosen, buckets arranged."""

INTERRUPTIONS = ("validation", "checkpoint")


def working_seconds(step: StepRecord) -> float:
    """Return the time without validation and checkpoints."""
    return step.seconds - sum(phase.seconds for phase in step.phases if phase.name in INTERRUPTIONS)


class RankProfile(msgspec.Struct, frozen=True):
    """An ordinary optimizer step of one rank, with all batches that it accumulates."""

    rank: int
    num_batches: int
    """Recent ones that it is computed from."""
    step_s: float
    """Mean."""
    phases: dict[str, float]
    """Mean seconds of each phase in a step."""
    own_s: float
    """Compute time: typical time of a step without exposed communication and the bubble.

    Ranks that work together all take as long as the slowest, so only this differs between them:
    the late rank waits the shortest.
    """
    own_error_s: float
    """Standard error of ``own_s``, by the median deviation of the batches."""
    typical: dict[str, float]
    """Typical seconds of each phase, sums of medians: one odd batch in twenty does not move them.
    The batches with which steps end have a median of their own, for there the optimizer runs."""
    waits: dict[int, float]
    """Exposed communication in seconds by the index of the batch."""


@remember_last
def rank_profiles(job: JobSnapshot) -> dict[int, RankProfile]:
    """Return a profile for each rank that has ordinary steps."""
    return _profiles(recent_times(job), batches_per_step(job))


@remember_last
def judged_profiles(job: JobSnapshot) -> dict[int, RankProfile]:
    """Return the profiles over the longer window in which findings are judged."""
    return _profiles(judged_times(job), batches_per_step(job))


def _profiles(columns: Mapping[int, RecentTimes], batches: int) -> dict[int, RankProfile]:
    return {
        rank: profile
        for rank, times in columns.items()
        if (profile := _profile(rank, times, batches)) is not None
    }


def middle(values: Iterable[float]) -> float:
    """Return the median of ``values``, which are not empty."""
    ordered = sorted(values)
    half = len(ordered) // 2
    return ordered[half] if len(ordered) % 2 else (ordered[half - 1] + ordered[half]) / 2


def _profile(rank: int, times: RecentTimes, batches: int) -> RankProfile | None:
    times = _ordinary(times)
    seconds, phases = times.seconds, times.phases
    count = len(seconds)
    if count == 0:
        return None

    def mean(column: Sequence[float]) -> float:
        return batches * sum(column) / count

    def typical(column: Sequence[float]) -> float:
        usual, last = _medians(column, times.are_last, batches)
        return (batches - 1) * usual + last

    none = (0.0,) * count
    waits = phases.get("communication", none)
    own = list(map(_own, seconds, waits, phases.get(BUBBLE, none)))
    usual_s, last_s = _medians(own, times.are_last, batches)
    deviations = (
        abs(each - (last_s if is_last else usual_s))
        for each, is_last in zip(own, times.are_last, strict=True)
    )
    return RankProfile(
        rank=rank,
        num_batches=count,
        step_s=mean(seconds),
        phases={name: mean(column) for name, column in phases.items()},
        own_s=typical(own),
        own_error_s=batches * DEVIATION * middle(deviations) / math.sqrt(count),
        typical={name: typical(column) for name, column in phases.items()},
        waits=dict(zip(times.indexes, waits, strict=True)),
    )


def _medians(
    column: Sequence[float], are_last: Sequence[bool], batches: int
) -> tuple[float, float]:
    """Return the medians of the batches with which no optimizer step ends, and of the others."""
    last = list(itertools.compress(column, are_last)) if batches > 1 else []
    if len(last) in {0, len(column)}:
        every = middle(column)
        return every, every
    usual = [value for value, is_last in zip(column, are_last, strict=True) if not is_last]
    return middle(usual), middle(last)


def _own(step_s: float, wait_s: float, idle_s: float) -> float:
    return step_s - wait_s - idle_s


def _ordinary(times: RecentTimes) -> RecentTimes:
    """Return the columns without steps that warm up, validate or write a checkpoint."""
    is_interrupted = any(name in times.phases for name in INTERRUPTIONS)
    if times.indexes[0] >= WARM_UP_BATCHES and not is_interrupted:
        return times
    interruptions = [times.phases[name] for name in INTERRUPTIONS if name in times.phases]
    kept = [
        place
        for place, index in enumerate(times.indexes)
        if index >= WARM_UP_BATCHES and not any(column[place] for column in interruptions)
    ]
    columns = {
        name: tuple(column[place] for place in kept) for name, column in times.phases.items()
    }
    return RecentTimes(
        seconds=tuple(times.seconds[place] for place in kept),
        indexes=tuple(times.indexes[place] for place in kept),
        are_last=tuple(times.are_last[place] for place in kept),
        phases={name: column for name, column in columns.items() if any(column)},
    )
