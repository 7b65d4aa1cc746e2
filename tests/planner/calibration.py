"""Corrects predicted times by layouts that were measured on a cluster.

The logarithm of measured over predicted time is taken as a sum of independent normal errors: one of
the software stack, one of each part of a step by its share of the time, one of products in fp8 and
in fp4, one that layouts share the more the nearer their sizes are, and noise. What measured layouts
say of another one is then its conditional mean: a Gaussian process, Rasmussen and Williams 2006,
equations 2.25 and 2.26, https://gaussianprocess.org/gpml. The standard deviations are fitted to
published runs (``spread.yaml``).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from math import exp, log, log2, sqrt
from pathlib import Path

import numpy as np
import yaml  # type: ignore[import-untyped]

from boltmesh.planner.layout import Layout
from boltmesh.planner.machine import Cluster
from boltmesh.planner.step_time import PredictedStepTime
from boltmesh.planner.transformer import Transformer

DATA = Path(__file__).with_name("spread.yaml")
ELSEWHERE = 0.9
"""Share of these errors that clusters of different accelerators and one stack have in common."""
APART = 4.0
"""Differing types, ZeRO stages, recomputation or offload that put layouts as far apart as
``octaves``, of which one would do."""


@dataclass(frozen=True)
class Spread:
    """Standard deviations of the errors of predictions, as logarithms.

    Attributes:
        stack: A software stack, in all of its layouts.
        part: A part of the step, if it takes all of its time.
        narrow: Products in fp8, or in fp4, if they take all of it.
        layout: A layout; nearer ones have more of this in common.
        noise: A run.
        octaves: Distance of sizes, each as a power of two, over which ``layout`` is shared.
    """

    stack: float
    part: float
    narrow: float
    layout: float
    noise: float
    octaves: float


@cache
def default_spread() -> Spread:
    """Return the spread of published runs."""
    return Spread(**yaml.safe_load(DATA.read_text(encoding="utf-8")))


@dataclass(frozen=True)
class PredictedLayout:
    """Properties of a layout on which the error of its prediction depends.

    Attributes:
        place: The cluster: errors are shared within it, and by a part outside of it.
        shares: Parts of the step over its time, products in fp8 and in fp4 behind them.
        sizes: Sizes of model and layout, as powers of two.
        kinds: Type of the products, ZeRO stage, recomputation and offload.
    """

    place: object
    shares: tuple[float, ...]
    sizes: tuple[float, ...]
    kinds: tuple[object, ...]

    @classmethod
    def of(
        cls,
        model: Transformer,
        cluster: Cluster,
        layout: Layout,
        time: PredictedStepTime,
        place: object,
    ) -> "PredictedLayout":
        """Describe a layout for sizes."""
        parts = time.terms()
        products = parts.pop("compute") + time.recompute
        narrow = [products * (layout.dtype == each) for each in ("fp8", "fp4")]
        sizes = (
            model.hidden, model.layers, model.seq, cluster.num_devices, layout.tensor,
            layout.pipeline, layout.context, layout.microbatch, layout.num_microbatches,
        )  # fmt: skip
        return cls(
            place,
            tuple(each / time.seconds for each in (*parts.values(), *narrow)),
            tuple(map(log2, sizes)),
            (layout.dtype, layout.zero, layout.recompute, layout.offload),
        )


NUM_NARROW = 2
"""Shares at the end that are of products in a narrow type."""


def covariance(one: PredictedLayout, other: PredictedLayout, spread: Spread) -> float:
    """Return the covariance of two layouts' errors, beside the noise of each run."""
    common = [a * b for a, b in zip(one.shares, other.shares, strict=True)]
    distance = sum((a - b) ** 2 for a, b in zip(one.sizes, other.sizes, strict=True))
    differing = sum(a != b for a, b in zip(one.kinds, other.kinds, strict=True))
    found = (
        spread.stack**2
        + spread.part**2 * sum(common[:-NUM_NARROW])
        + spread.narrow**2 * sum(common[-NUM_NARROW:])
        + spread.layout**2 * exp(-distance / spread.octaves**2 - differing / APART**2)
    )
    return found if one.place == other.place else ELSEWHERE * found


def factors(
    measured: Sequence[tuple[PredictedLayout, float]],
    others: Sequence[PredictedLayout],
    spread: Spread,
) -> list[float]:
    """Return the factors on the predicted times of other layouts of the same stack.

    Args:
        measured: Layouts, and their measured over predicted times.
        others: Those that were not measured.
        spread: Spread of the errors.
    """
    seen = [each for each, _ in measured]
    if not seen:
        return [1.0] * len(others)
    left = np.array([[covariance(a, b, spread) for b in seen] for a in seen])
    left += spread.noise**2 * np.eye(len(seen))
    weights = np.linalg.solve(left, [log(ratio) for _, ratio in measured]).tolist()
    return [
        exp(sum(w * covariance(each, one, spread) for w, one in zip(weights, seen, strict=True)))
        for each in others
    ]


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
