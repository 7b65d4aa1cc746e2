"""Corrects predicted times by layouts that were measured on a cluster.

The logarithm of measured over predicted time is taken as a sum of independent normal errors: one of
the software stack, one of each part of a step by its share of the time, one of products in fp8 and
in fp4, one that layouts share the more the nearer their sizes are, and noise. What measured layouts
say of another one is then its conditional mean: a Gaussian process, Rasmussen and Williams 2006,
equations 2.25 and 2.26, https://gaussianprocess.org/gpml. The standard deviations are fitted to
published runs (``spread.yaml``).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from math import exp, log, log2
from pathlib import Path

import yaml  # type: ignore[import-untyped]

DATA = Path(__file__).with_name("spread.yaml")
ELSEWHERE = 0.9
"""Share of these errors that clusters of different accelerators and one stack have in common."""
APART = 4.0
"""Differing types, ZeRO stages, recomputation or offload that put layouts as far apart as
``octaves``, of which one would do."""
NARROW = ("fp8", "fp4")
"""Narrow types of products."""


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
        place: object,
        time: Mapping[str, float],
        dtype: str,
        sizes: Sequence[float],
        kinds: Sequence[object],
    ) -> "PredictedLayout":
        """Describe a layout.

        Args:
            place: The cluster.
            time: Seconds of the parts of a step, as of ``PredictedStepTime``.
            dtype: Type of the products.
            sizes: Sizes of model and layout.
            kinds: Other properties.
        """
        seconds = sum(time.values())
        parts = [each for name, each in time.items() if name != "compute"]
        products = time["compute"] + time["recompute"]
        narrow = [products * (dtype == each) for each in NARROW]
        return cls(
            place,
            tuple(each / seconds for each in (*parts, *narrow)),
            tuple(map(log2, sizes)),
            (dtype, *kinds),
        )


def covariance(one: PredictedLayout, other: PredictedLayout, spread: Spread) -> float:
    """Return the covariance of two layouts' errors, beside the noise of each run."""
    common = [a * b for a, b in zip(one.shares, other.shares, strict=True)]
    distance = sum((a - b) ** 2 for a, b in zip(one.sizes, other.sizes, strict=True))
    differing = sum(a != b for a, b in zip(one.kinds, other.kinds, strict=True))
    found = (
        spread.stack**2
        + spread.part**2 * sum(common[: -len(NARROW)])
        + spread.narrow**2 * sum(common[-len(NARROW) :])
        + spread.layout**2 * exp(-distance / spread.octaves**2 - differing / APART**2)
    )
    return found if one.place == other.place else ELSEWHERE * found


class Correction:
    """Factors on predicted times, from measured layouts of the same stack.

    Args:
        measured: Layouts, and their measured over predicted times.
        spread: Spread of the errors.
    """

    def __init__(self, measured: Sequence[tuple[PredictedLayout, float]], spread: Spread) -> None:
        self._seen = [each for each, _ in measured]
        self._spread = spread
        self._weights: list[float] = []
        if measured:
            import numpy as np  # most plans have nothing to correct by

            table = np.array([[covariance(a, b, spread) for b in self._seen] for a in self._seen])
            noise = spread.noise**2 * np.eye(len(table))
            errors = [log(ratio) for _, ratio in measured]
            self._weights = np.linalg.solve(table + noise, errors).tolist()

    def factor(self, layout: PredictedLayout) -> float:
        """Return the factor on the predicted time of a layout."""
        pairs = zip(self._weights, self._seen, strict=True)
        return exp(sum(w * covariance(layout, each, self._spread) for w, each in pairs))
