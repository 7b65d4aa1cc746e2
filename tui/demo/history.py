"""What the simulated job logs: metrics, events, checkpoints."""

import math

from boltmesh.telemetry.snapshot import Event, MetricPoint
from boltmesh.tui.demo.noise import normal
from boltmesh.tui.demo.setup import Setup
from boltmesh.tui.demo.timeline import Timeline

MAX_STEPS = 20_000
STEPS_PER_EPOCH = 2_500
LOG_EVERY = 10
VALIDATE_EVERY = 1_000


def loss(step: int) -> float:
    """A power law, from the entropy of a uniform guess down."""
    return 2.72 + 8.1 * math.pow(1 + step / 90, -0.62)


def logged(seed: int, place: int) -> tuple[MetricPoint, ...]:
    """Return what is logged for the ``place``-th time, counted from 0."""
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
    """Return what the ranks have written for humans."""
    ranks = range(setup.world_size)
    greeting = f"{setup.world_size} ranks, Parallel3DStrategy, bf16-mixed"
    found = [Event(started, rank, "start", greeting) for rank in ranks]
    for number in range(VALIDATE_EVERY, step + 1, VALIDATE_EVERY):
        moment = started + timeline.end(number)
        found += [Event(moment, rank, "validation", f"at step {number:,}") for rank in ranks]
        found.append(Event(moment + 4.0, 0, "checkpoint", f"{checkpoint(number)} (36.4 GB)"))
    return tuple(found)
