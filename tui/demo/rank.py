"""One simulated rank at one moment, and the parts of it that are worth keeping."""

from boltmesh.telemetry.snapshot import Chunk, JobState, RankSnapshot, RankState, StepRecord
from boltmesh.tui.demo.blocks import Blocks
from boltmesh.tui.demo.devices import FIRST_PID, NAME, uuid
from boltmesh.tui.demo.history import STEPS_PER_EPOCH, loss
from boltmesh.tui.demo.model import (
    PEAK_FLOPS_PER_SECOND,
    flops_per_batch,
    memory,
    memory_kinds,
    offload,
)
from boltmesh.tui.demo.noise import normal
from boltmesh.tui.demo.progress import Moment, newest
from boltmesh.tui.demo.setup import AXES, GPUS_PER_HOST, TOKENS_PER_SAMPLE, Setup
from boltmesh.tui.demo.timeline import Timeline
from boltmesh.tui.demo.traffic import collectives, peers

MAX_STEP_RECORDS = 32_768
"""Of all ranks together: a large job's rings are as long as its readers can afford."""
_MOST_STEPS = 256


class SimulatedRank:
    """A rank of a job that began at ``started``; ranks may share what they record."""

    def __init__(
        self, setup: Setup, rank: int, steps: Blocks[StepRecord], *, started: float
    ) -> None:
        self.stage, self.data, _ = setup.place(rank)
        self._setup = setup
        self._rank = rank
        self._started = started
        self._steps = steps
        self._num_steps = max(16, min(_MOST_STEPS, MAX_STEP_RECORDS // setup.world_size))
        self._kinds = memory_kinds(setup, rank)
        self._memory = memory(self._kinds)
        self._members = setup.memberships(rank)
        self._coordinates = dict(zip(AXES, setup.place(rank), strict=True))

    def snapshot(
        self, moment: Moment, chunks: tuple[Chunk, ...], *, phase: str, job_state: JobState
    ) -> RankSnapshot:
        """Return what the rank's file says."""
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
    data = setup.place(rank)[1]

    def build(number: int) -> StepRecord:
        # The ranks of one pipeline share a loss: its last stage tells the others.
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
