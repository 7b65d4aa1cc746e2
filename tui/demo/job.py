"""The simulated job: snapshots as a reader of its files would return them at one moment."""

import math
import time
from collections.abc import Callable
from itertools import chain

from boltmesh.telemetry.snapshot import (
    SCHEMA_VERSION,
    Chunk,
    Event,
    JobSnapshot,
    JobState,
    MetricPoint,
    PipelinePlan,
    RankSnapshot,
    RankState,
    StepRecord,
)
from boltmesh.tui.demo.model import (
    CONTEXT_BYTES,
    FIRST_PID,
    NAME,
    PEAK_FLOPS_PER_SECOND,
    activation_bytes,
    device_readings,
    expert_loads,
    flops_per_batch,
    gpu_load,
    memory,
    memory_kinds,
    offload,
    tensor_plan,
    uuid,
)
from boltmesh.tui.demo.setup import (
    GPUS_PER_HOST,
    HEAD_START,
    HEAD_WIDTH,
    STEP_S,
    TOKENS_PER_SAMPLE,
    WIDTH,
    Blocks,
    Setup,
    Timeline,
    normal,
)
from boltmesh.tui.demo.traffic import Moment, collectives, expected, moved, newest, peers
from boltmesh.tui.sources.live import Observation

MAX_STEPS = 20_000
STEPS_PER_EPOCH = 2_500
LOG_EVERY = 10
VALIDATE_EVERY = 1_000


def loss(step: int) -> float:
    """A power law, from the entropy of a uniform guess down."""
    return 2.72 + 8.1 * math.pow(1 + step / 90, -0.62)


def _trends(
    setup: Setup, timeline: Timeline, step: int, *, memory_bytes: int, started: float
) -> tuple[MetricPoint, ...]:
    """Return the series that ranks record over the run, 250 points of each: means of 8 steps."""
    sent = sum(item.payload_bytes for item in moved(setup, 0))
    every = max(8, step // 250)
    points = []
    for at in range(every, step + 1, every):
        seconds = (timeline.end(at) - timeline.end(at - 8)) / 8
        share = 1 + 0.01 * normal(9, at)
        load = gpu_load(setup, 0, int(timeline.end(at)))
        points += [
            MetricPoint("step_s", at, seconds),
            MetricPoint("tokens_per_s", at, setup.data * setup.tokens_per_step / seconds),
            MetricPoint("memory_bytes", at, memory_bytes * min(1.0, 0.9 + at / 2000)),
            MetricPoint("bytes_per_s", at, sent / seconds),
            MetricPoint("bubble_ratio", at, timeline.bubble_ratio * share),
            MetricPoint("utilisation_percent", at, load.percent),
            MetricPoint("power_watts", at, load.watts),
            MetricPoint("temperature_celsius", at, load.celsius),
            MetricPoint("wall_s", at, started + timeline.end(at)),
        ]
    return tuple(point for point in points if point.value > 1e-6)


def logged(seed: int, place: int) -> tuple[MetricPoint, ...]:
    """Return the metrics that are logged for the ``place``-th time, counted from 0."""
    step = (place + 1) * LOG_EVERY
    norm = (0.31 + 6 / step**0.5) * (1 + 0.15 * normal(seed, 5, step))
    points = [
        MetricPoint("loss", step, loss(step) * (1 + 0.012 * normal(seed, 6, step))),
        MetricPoint("grad_norm", step, norm),
        MetricPoint("learning_rate", step, _learning_rate(step)),
    ]
    if step % VALIDATE_EVERY == 0:
        points.append(MetricPoint("val_loss", step, 1.012 * loss(step) + 0.03))
    return tuple(points)


def _learning_rate(step: int) -> float:
    warmup = min(1.0, step / 700)
    return 6e-5 + 5.4e-4 * warmup * 0.5 * (1 + math.cos(math.pi * step / MAX_STEPS))


def checkpoint(step: int) -> str | None:
    """Return the newest checkpoint after that many steps."""
    number = step // VALIDATE_EVERY * VALIDATE_EVERY
    return f"runs/gpt-demo/step={number}.ckpt" if number else None


def events(setup: Setup, timeline: Timeline, step: int, started: float) -> tuple[Event, ...]:
    """Return the events of the ranks."""
    ranks = range(setup.world_size)
    greeting = f"{setup.world_size} ranks, Parallel3DStrategy, bf16-mixed"
    found = [Event(started, rank, "start", greeting) for rank in ranks]
    for number in range(VALIDATE_EVERY, step + 1, VALIDATE_EVERY):
        moment = started + timeline.end(number)
        found += [Event(moment, rank, "validation", f"at step {number:,}") for rank in ranks]
        found.append(Event(moment + 4.0, 0, "checkpoint", f"{checkpoint(number)} (36.4 GB)"))
    return tuple(found)


MAX_STEP_RECORDS = 32_768
"""Step records of all ranks together: a large job's rings hold what its readers can afford."""
_MOST_STEPS = 256


class SimulatedRank:
    """A rank of a job that began at ``started``; ranks may share their records."""

    def __init__(
        self, setup: Setup, rank: int, steps: Blocks[StepRecord], *, started: float
    ) -> None:
        self._coordinates = dict(setup.place(rank))
        self.stage, self.data = self._coordinates["pipeline"], self._coordinates["data"]
        self._setup = setup
        self._rank = rank
        self._started = started
        self._steps = steps
        self._num_steps = max(16, min(_MOST_STEPS, MAX_STEP_RECORDS // setup.world_size))
        self._kinds = memory_kinds(setup, rank)
        self._memory = memory(self._kinds)
        self._members = setup.memberships(rank)

    def _output(self, step: int, error: str | None) -> tuple[str, ...]:
        """Return the output of the rank: rank 0 prints a line every 100 steps."""
        begun = time.strftime("%H:%M:%S", time.localtime(self._started))
        lines = [f"{begun} rank {self._rank} of {self._setup.world_size} on {NAME}"]
        if self._rank == 0:
            for logged in range(max(100, step // 100 * 100 - 700), step + 1, 100):
                clock = time.localtime(self._started + logged * STEP_S)
                lines.append(f"{time.strftime('%H:%M:%S', clock)} step {logged:,} is done")
        if error is not None:
            end = time.strftime("%H:%M:%S", time.localtime(self._started + step * STEP_S))
            lines.append(f"{end} {error}")
        return tuple(lines)

    def snapshot(
        self, moment: Moment, chunks: tuple[Chunk, ...], *, phase: str, job_state: JobState
    ) -> RankSnapshot:
        """Return the content of the rank's file."""
        setup, rank, step = self._setup, self._rank, moment.step
        steps = self._steps.between(max(1, step - self._num_steps + 1), step)
        seconds = sum(record.seconds for record in steps)
        rate = setup.samples_per_step * len(steps) / seconds if steps else None
        groups = moment.groups(rank, self.stage, self._members, self._started)
        state, error = self._end(job_state)
        is_killed = state == "dead" or (moment.is_hung and rank == setup.victim)
        return RankSnapshot(
            rank=rank,
            pid=FIRST_PID + rank % GPUS_PER_HOST,
            host=setup.host(rank),
            device=f"cuda:{rank % GPUS_PER_HOST} ({NAME})",
            device_uuid=uuid(rank),
            state=state,
            coordinates=self._coordinates,
            phase="backward" if is_killed else phase if state == "running" else _LAST[state],
            global_step=step,
            epoch=step // STEPS_PER_EPOCH,
            last_seen=self._started + moment.seconds,
            output=self._output(step, error),
            steps=steps,
            samples_per_second=rate,
            tokens_per_second=None if rate is None else rate * TOKENS_PER_SAMPLE,
            memory=self._memory,
            collectives=collectives(setup, self.stage, step, self._members),
            in_flight=newest(groups),
            error=error,
            groups=groups,
            peers=peers(setup, rank, step),
            memory_kinds=self._kinds,
            offload=offload(setup, rank, step),
            chunks=chunks,
            experts=expert_loads(setup, rank, step),
            flops_per_batch=flops_per_batch(setup, self.stage),
            peak_flops_per_second=PEAK_FLOPS_PER_SECOND,
        )

    def _end(self, job_state: JobState) -> tuple[RankState, str | None]:
        """Return whether the rank still runs, or how it ended."""
        if job_state != "crashed":
            return ("finished" if job_state == "finished" else "running"), None
        if self._rank == self._setup.victim:
            return "dead", "killed by SIGKILL"
        return "failed", "Connection closed by peer"


_LAST: dict[RankState, str | None] = {"failed": "communication", "finished": None}


def step_records(setup: Setup, timeline: Timeline, rank: int, started: float) -> Blocks[StepRecord]:
    """Return all steps of a rank, by their number."""
    data = setup.place(rank)["data"]

    def build(number: int) -> StepRecord:
        # The ranks of one pipeline share a loss: its last stage sends it to the others.
        noise = 1 + 0.018 * normal(setup.seed, 10, number, data)
        return StepRecord(
            index=number - 1,
            global_step=number,
            epoch=number // STEPS_PER_EPOCH,
            end_time=started + timeline.end(number),
            seconds=timeline.end(number) - timeline.end(number - 1),
            phases=timeline.phases(number, rank),
            loss=loss(max(number, 1)) * noise,
            samples=setup.samples_per_step,
            tokens=setup.tokens_per_step,
        )

    return Blocks(build)


_DISTINCT_PIPELINES = 4
"""Beyond these a pipeline repeats the times of another, or a thousand ranks would cost much."""
_CHUNK_STEPS = 4
_CHUNK_STEPS_OF_MANY_RANKS = 1


class SimulatedJob:
    """One job; its snapshots depend on the time alone, its caches only save work."""

    def __init__(self, setup: Setup, started: float) -> None:
        self._setup = setup
        self._started = started
        self._timeline = Timeline(setup)
        self._logged = Blocks(lambda place: logged(setup.seed, place))
        victim_at = setup.place(setup.victim)["data"]
        drawn = {victim_at, *range(min(setup.data, _DISTINCT_PIPELINES))}
        others = sorted(drawn - {victim_at})
        self._drawn_for = [
            data if data in drawn else others[data % len(others)] for data in range(setup.data)
        ]
        self._ranks = self._make_ranks()
        self._pipelines = {data: Blocks(self._chunks_of(data), size=1) for data in drawn}
        self._chunk_steps = _CHUNK_STEPS if setup.world_size <= 64 else _CHUNK_STEPS_OF_MANY_RANKS
        self._end = self._find_end()

    def observe(self, now: float) -> Observation:
        """Return the job as seen at ``now``, by the wall clock."""
        seconds = max(0.0, now - self._started)
        is_over = seconds >= self._end
        is_hung = is_over and self._setup.scenario == "hang"
        state: JobState = "running"
        if is_over and not is_hung:
            state = "crashed" if self._setup.scenario == "crashed" else "finished"
        moment = Moment(self._setup, self._timeline, min(seconds, self._end), is_hung=is_hung)
        return Observation(
            time=now,
            job=self._snapshot(moment, state),
            devices=(
                device_readings(self._setup, int(now), is_hung=is_hung)
                if state == "running"
                else ()
            ),
        )

    def _make_ranks(self) -> list[SimulatedRank]:
        setup = self._setup
        records: dict[int, Blocks[StepRecord]] = {}
        ranks = []
        for rank in range(setup.world_size):
            place = setup.place(rank)
            drawn = setup.rank_at({**place, "data": self._drawn_for[place["data"]]})
            if drawn not in records:
                records[drawn] = step_records(setup, self._timeline, drawn, self._started)
            ranks.append(SimulatedRank(setup, rank, records[drawn], started=self._started))
        return ranks

    def _find_end(self) -> float:
        """Return when the job ends, or when it stops in the middle of a step."""
        timeline, step = self._timeline, HEAD_START + 1
        if self._setup.scenario == "crashed":
            start = timeline.window_start(step)
            return start + 0.6 * (timeline.window_end(step) - start)
        if self._setup.scenario == "hang":
            start = timeline.window_end(step)
            return start + 0.5 * (timeline.reduce_end(step) - start)
        return timeline.end(MAX_STEPS)

    def _snapshot(self, moment: Moment, state: JobState) -> JobSnapshot:
        setup, step = self._setup, moment.step
        history = tuple(chain.from_iterable(self._logged.between(0, step // LOG_EVERY - 1)))
        ranks = self._look_at_ranks(moment, state)
        rate, tokens = ranks[0].samples_per_second, ranks[0].tokens_per_second
        return JobSnapshot(
            schema=SCHEMA_VERSION,
            id="gpt-demo",
            name="gpt-3b on demo text",
            state=state,
            user="demo",
            command=("boltmesh", "fit", "gpt.yaml", f"trainer.devices={setup.world_size}"),
            folder="/home/demo/gpt",
            started=self._started,
            updated=self._started + moment.seconds,
            strategy="Parallel3DStrategy",
            mesh=setup.mesh,
            world_size=setup.world_size,
            versions={"boltmesh": "0.1.0"},
            hyperparameters={
                "layers": str(setup.num_layers),
                "width": str(WIDTH),
                "heads": str(WIDTH // HEAD_WIDTH),
                "learning_rate": "6e-4",
            },
            max_steps=MAX_STEPS,
            epoch=step // STEPS_PER_EPOCH,
            global_step=step,
            trends=_trends(
                setup,
                self._timeline,
                step,
                memory_bytes=(ranks[0].memory.device_reserved_bytes or 0) + CONTEXT_BYTES,
                started=self._started,
            ),
            metrics={point.name: point.value for point in history},
            history=history,
            samples_per_second=None if rate is None else rate * setup.data,
            tokens_per_second=None if tokens is None else tokens * setup.data,
            ranks=ranks,
            expected=expected(setup),
            communication_note=None,
            events=self._events(moment, state),
            cause=self._cause(step) if state == "crashed" else None,
            checkpoint=checkpoint(step),
            recipe="gpt.yaml",
            pipeline=self._plan(),
            tensor_plan=tensor_plan(setup),
        )

    def _look_at_ranks(self, moment: Moment, state: JobState) -> tuple[RankSnapshot, ...]:
        first = max(1, moment.step - self._chunk_steps + 1)
        by_pipeline = {
            data: pipeline.between(first, moment.step + 1)
            for data, pipeline in self._pipelines.items()
        }
        now = self._started + moment.seconds
        # The tensor peers of a rank work on the same chunks at the same time.
        chunks: dict[tuple[int, int], tuple[Chunk, ...]] = {}
        phases: dict[tuple[int, int], str] = {}
        for data, steps in by_pipeline.items():
            for stage in range(self._setup.pipeline):
                rows = [step[stage] for step in steps]
                begun = tuple(chunk for chunk in rows[-1] if chunk.end <= now)
                chunks[data, stage] = (*chain.from_iterable(rows[:-1]), *begun)
                phases[data, stage] = moment.phase(rows[-1], now)
        has_plan = self._setup.pipeline > 1
        return tuple(
            rank.snapshot(
                moment,
                chunks[self._drawn_for[rank.data], rank.stage] if has_plan else (),
                phase=phases[self._drawn_for[rank.data], rank.stage],
                job_state=state,
            )
            for rank in self._ranks
        )

    def _chunks_of(self, data: int) -> Callable[[int], tuple[tuple[Chunk, ...], ...]]:
        def build(step: int) -> tuple[tuple[Chunk, ...], ...]:
            return self._timeline.chunks(step, data, started=self._started)

        return build

    def _plan(self) -> PipelinePlan | None:
        setup = self._setup
        if setup.pipeline == 1:
            return None
        crossing = setup.num_microbatches * activation_bytes(setup)
        return PipelinePlan(
            "1f1b",
            setup.pipeline,
            setup.num_microbatches,
            self._timeline.order,
            rank_of_stage=tuple(range(setup.pipeline)),
            border_bytes=((crossing, crossing),) * (setup.pipeline - 1),
        )

    def _cause(self, step: int) -> str:
        axis = "data" if self._setup.data > 1 else "tensor"
        return (
            f"rank {self._setup.victim} was killed by SIGKILL, in backward after step {step}, "
            f"inside all_reduce of {axis}."
        )

    def _events(self, moment: Moment, state: JobState) -> tuple[Event, ...]:
        found = events(self._setup, self._timeline, moment.step, self._started)
        if state != "crashed":
            return found
        survivor = 0 if self._setup.victim else 1
        lost = Event(
            self._started + moment.seconds,
            survivor,
            "error",
            "RuntimeError: Connection closed by peer",
        )
        return (*found, lost)
