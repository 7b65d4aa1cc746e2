"""Which layouts of a cluster to measure for the validation, and how its runs are described."""

from collections.abc import Sequence
from math import sqrt

from boltmesh.planner.calibration import PredictedLayout, Spread, covariance
from boltmesh.planner.step_time import PredictedStepTime
from tests.planner.rows import Run


def described(run: Run, time: PredictedStepTime) -> PredictedLayout:
    """Return what the error of a run's prediction depends on."""
    model, layout = run.model, run.layout
    sizes = (
        model.hidden, model.layers, model.seq, run.cluster.num_devices, layout.tensor,
        layout.pipeline, layout.context, layout.microbatch, layout.num_microbatches,
    )  # fmt: skip
    kinds = (layout.zero, layout.recompute, layout.offload)
    return PredictedLayout.of(run.cluster_key, time.terms(), layout.dtype, sizes, kinds)


def to_measure(
    layouts: Sequence[PredictedLayout],
    names: Sequence[object],
    spread: Spread,
    *,
    count: int = 2,
) -> list[int]:
    """Return which layouts of a cluster to measure, so that least is unknown of the others.

    One after the other, each the one that leaves the least sum of standard deviations.

    Args:
        layouts: All of them.
        names: Two of the same name are not both measured.
        spread: Spread of the errors.
        count: How many to measure.
    """
    variance = [[covariance(a, b, spread) for b in layouts] for a in layouts]
    noise = spread.noise**2
    chosen: list[int] = []
    for _ in range(count):
        best, least = None, float("inf")
        for at, row in enumerate(variance):
            if names[at] in {names[each] for each in chosen}:
                continue
            own = row[at] + noise
            left = sum(
                sqrt(max(0.0, variance[to][to] - each**2 / own) + noise)
                for to, each in enumerate(row)
            )
            if left < least - 1e-12:
                best, least = at, left
        if best is None:
            break
        chosen.append(best)
        row, own = variance[best], variance[best][best] + noise
        variance = [
            [each - a * b / own for each, b in zip(line, row, strict=True)]
            for line, a in zip(variance, row, strict=True)
        ]
    return chosen
