"""A synthetic job for who has none: seeded, without files, a pure function of the time.

Eight ranks train a GPT of 124 million parameters with DDP. The same seed and the same moment give
the same observation, so tests and the screenshot are made from it too.
"""

import functools
import math
import random
import time
from collections.abc import Callable

from boltmesh.telemetry.snapshot import (
    SCHEMA_VERSION,
    CollectiveInFlight,
    CollectiveTotal,
    Event,
    JobSnapshot,
    Memory,
    MetricPoint,
    PhaseTime,
    RankSnapshot,
    StepRecord,
)
from boltmesh.telemetry.traffic import ExpectedTraffic
from boltmesh.tui.devices import DeviceReading
from boltmesh.tui.source import Observation

WORLD_SIZE = 8
MAX_STEPS = 20_000
HEAD_START = 4_200
"""Steps done when somebody starts to watch, so that every chart has something to show."""
STEP_S = 0.212
STEPS_PER_EPOCH = 2_500
VALIDATE_EVERY = 1_000
LOG_EVERY = 10
RING_STEPS = 256

SAMPLES_PER_STEP = 16
TOKENS_PER_SAMPLE = 1_024
PARAMETER_BYTES = 124_439_808 * 4
BUCKETS = 19
GIB = 2**30

_PHASE_SHARES = (
    ("data", 0.006),
    ("transfer", 0.009),
    ("forward", 0.278),
    ("backward", 0.492),
    ("communication", 0.117),
    ("optimizer", 0.074),
)


class DemoSource:
    """Looks like a job that was started a quarter of an hour ago."""

    def __init__(self, *, seed: int = 0, clock: Callable[[], float] = time.time) -> None:
        self._seed = seed
        self._clock = clock
        self._started = clock() - HEAD_START * STEP_S

    def read(self) -> Observation:
        """Return the job as it is at this moment of the clock."""
        return observe(self._seed, started=self._started, now=self._clock())

    def close(self) -> None:
        """There is nothing to let go of."""


def observe(seed: int, *, started: float, now: float) -> Observation:
    """Return the job that began at ``started``, as seen at ``now``."""
    exact = min((now - started) / STEP_S, float(MAX_STEPS))
    step = max(1, int(exact))
    is_over = step >= MAX_STEPS
    ranks = tuple(_rank(seed, rank, step, exact - step, started) for rank in range(WORLD_SIZE))
    history = _history(seed, step)
    job = JobSnapshot(
        schema=SCHEMA_VERSION,
        id="gpt-demo",
        name="gpt-124m on demo text",
        state="finished" if is_over else "running",
        user="demo",
        command=("boltmesh", "fit", "gpt", "trainer.devices=8"),
        folder="/home/demo/gpt",
        started=started,
        updated=started + step * STEP_S,
        strategy="DDPStrategy",
        mesh={"pipeline": 1, "data": WORLD_SIZE, "tensor": 1},
        world_size=WORLD_SIZE,
        versions={"boltmesh": "0.1.0"},
        hyperparameters={"layers": "12", "width": "768", "heads": "12", "learning_rate": "6e-4"},
        max_steps=MAX_STEPS,
        epoch=step // STEPS_PER_EPOCH,
        global_step=step,
        metrics={point.name: point.value for point in history},
        history=history,
        samples_per_second=None if is_over else _rate(SAMPLES_PER_STEP, ranks),
        tokens_per_second=None if is_over else _rate(SAMPLES_PER_STEP * TOKENS_PER_SAMPLE, ranks),
        ranks=ranks,
        expected=(
            ExpectedTraffic(
                axis="data",
                operator="allreduce",
                payload_bytes=float(PARAMETER_BYTES),
                calls=float(BUCKETS),
                why="gradients of all trainable parameters, once",
            ),
        ),
        communication_note=None,
        events=_events(step, started),
        cause=None,
        checkpoint=_checkpoint(step // VALIDATE_EVERY * VALIDATE_EVERY),
    )
    return Observation(time=now, job=job, devices=_devices(seed, step))


def _rate(amount: int, ranks: tuple[RankSnapshot, ...]) -> float:
    steps = ranks[0].steps
    return amount * WORLD_SIZE * len(steps) / sum(step.seconds for step in steps)


def _random(seed: int, *key: object) -> random.Random:
    return random.Random(f"{seed}/{'/'.join(map(str, key))}")  # noqa: S311 (not for secrets)


def _rank(seed: int, rank: int, step: int, within: float, started: float) -> RankSnapshot:
    steps = tuple(
        _step(seed, rank, number, started)
        for number in range(max(1, step - RING_STEPS + 1), step + 1)
    )
    seconds = sum(record.seconds for record in steps)
    samples_per_second = SAMPLES_PER_STEP * len(steps) / seconds
    is_over = step >= MAX_STEPS
    return RankSnapshot(
        rank=rank,
        pid=41_230 + rank,
        host="demo",
        device=f"cuda:{rank} (NVIDIA H100 80GB HBM3)",
        device_uuid=_uuid(rank),
        state="finished" if is_over else "running",
        coordinates={"pipeline": 0, "data": rank, "tensor": 0},
        phase=None if is_over else _phase_at((within + 0.013 * rank) % 1.0),
        global_step=step,
        epoch=step // STEPS_PER_EPOCH,
        last_seen=started + step * STEP_S,
        steps=steps,
        samples_per_second=samples_per_second,
        tokens_per_second=samples_per_second * TOKENS_PER_SAMPLE,
        memory=Memory(
            host_rss_bytes=int(3.1 * GIB) + rank * 2**20,
            device_allocated_bytes=int(47.8 * GIB),
            device_reserved_bytes=int(58.2 * GIB),
            device_peak_bytes=int(56.9 * GIB),
        ),
        collectives=_collectives(step),
        in_flight=CollectiveInFlight(
            axis="data", operator="allreduce", sequence=step * BUCKETS, is_done=True
        ),
        error=None,
    )


@functools.lru_cache(maxsize=2 * WORLD_SIZE * RING_STEPS)
def _step(seed: int, rank: int, number: int, started: float) -> StepRecord:
    noise = _random(seed, "step", number)
    own = _random(seed, "step", number, rank)
    seconds = STEP_S * noise.gauss(1.0, 0.012)
    weights = [(name, share * own.gauss(1.0, 0.03)) for name, share in _PHASE_SHARES]
    used = 0.976 / sum(weight for _, weight in weights)
    phases = tuple(PhaseTime(name, seconds * weight * used) for name, weight in weights)
    return StepRecord(
        index=number - 1,
        global_step=number,
        epoch=number // STEPS_PER_EPOCH,
        end_time=started + _moment(number),
        seconds=seconds,
        phases=phases,
        loss=_loss(number) * own.gauss(1.0, 0.018),
        samples=SAMPLES_PER_STEP,
        tokens=SAMPLES_PER_STEP * TOKENS_PER_SAMPLE,
    )


def _moment(number: int) -> float:
    """Return when a step ends; the pace swings a little, as it does on a shared file system."""
    return STEP_S * (number + 0.5 * math.sin(number / 17) + 0.3 * math.sin(number / 6.1))


def _phase_at(fraction: float) -> str:
    passed = 0.0
    for name, share in _PHASE_SHARES:
        passed += share
        if fraction < passed:
            return name
    return "other"


def _loss(step: int) -> float:
    """A power law, from the entropy of a uniform guess down."""
    return 2.72 + 8.1 * math.pow(1 + step / 90, -0.62)


def _learning_rate(step: int) -> float:
    warmup = min(1.0, step / 700)
    return 6e-5 + 5.4e-4 * warmup * 0.5 * (1 + math.cos(math.pi * step / MAX_STEPS))


def _history(seed: int, step: int) -> tuple[MetricPoint, ...]:
    points: list[MetricPoint] = []
    for number in range(LOG_EVERY, step + 1, LOG_EVERY):
        noise = _random(seed, "log", number)
        points += (
            MetricPoint("loss", number, _loss(number) * noise.gauss(1.0, 0.012)),
            MetricPoint("grad_norm", number, (0.31 + 6 / (number**0.5)) * noise.gauss(1, 0.15)),
            MetricPoint("learning_rate", number, _learning_rate(number)),
        )
        if number % VALIDATE_EVERY == 0:
            points.append(MetricPoint("val_loss", number, 1.012 * _loss(number) + 0.03))
    return tuple(points)


def _collectives(step: int) -> tuple[CollectiveTotal, ...]:
    is_early = step < 3
    return (
        CollectiveTotal(
            axis="data",
            group="data",
            operator="allreduce",
            calls=BUCKETS * step,
            payload_bytes=PARAMETER_BYTES * step,
            calls_per_step=None if is_early else float(BUCKETS),
            bytes_per_step=None if is_early else float(PARAMETER_BYTES),
            seconds_per_step=None,
        ),
        CollectiveTotal(
            axis="world",
            group="world",
            operator="broadcast",
            calls=step,
            payload_bytes=8 * step,
            calls_per_step=None if is_early else 1.0,
            bytes_per_step=None if is_early else 8.0,
            seconds_per_step=None,
        ),
    )


def _events(step: int, started: float) -> tuple[Event, ...]:
    events = [
        Event(started, rank, "start", f"{WORLD_SIZE} ranks, DDPStrategy, bf16-mixed")
        for rank in range(WORLD_SIZE)
    ]
    for number in range(VALIDATE_EVERY, step + 1, VALIDATE_EVERY):
        moment = started + number * STEP_S
        events += [
            Event(moment, rank, "validation", f"at step {number:,}") for rank in range(WORLD_SIZE)
        ]
        events.append(Event(moment + 4.0, 0, "checkpoint", f"{_checkpoint(number)} (1.4 GB)"))
    return tuple(events)


def _checkpoint(number: int) -> str | None:
    return f"runs/gpt-demo/step={number}.ckpt" if number else None


def _devices(seed: int, step: int) -> tuple[DeviceReading, ...]:
    is_over = step >= MAX_STEPS
    readings = []
    for rank in range(WORLD_SIZE):
        noise = _random(seed, "device", step // 5, rank)
        busy = 0.0 if is_over else min(100.0, 96.5 + noise.gauss(0, 1.5))
        readings.append(
            DeviceReading(
                kind="gpu",
                ranks=(rank,),
                name="NVIDIA H100 80GB HBM3",
                uuid=_uuid(rank),
                utilization_percent=float(round(busy)),
                memory_used_bytes=int((59.1 + 0.2 * noise.random()) * GIB),
                memory_total_bytes=int(79.6 * GIB),
                power_watts=120.0 if is_over else float(round(640 + noise.gauss(0, 18))),
                temperature_celsius=float(round(61 + rank % 4 + noise.gauss(0, 0.7))),
            )
        )
    return tuple(readings)


def _uuid(rank: int) -> str:
    return f"GPU-00000000-0000-0000-0000-00000000000{rank}"
