"""Figures in one line: a bar, a stacked bar, a sparkline; and the levels of shares."""

import math
from collections.abc import Sequence
from typing import Final, Literal

import msgspec

from boltmesh.telemetry.snapshot import PhaseTime
from boltmesh.tui.render.line import Line, Role
from boltmesh.tui.render.style import Glyphs


def bar(fraction: float, width: int, glyphs: Glyphs, *, role: Role = "accent") -> Line:
    """A share of ``width``, in steps of half a cell."""
    share = min(1.0, max(0.0, fraction)) if math.isfinite(fraction) else 0.0
    halves = round(share * width * 2)
    full, half = divmod(halves, 2)
    line = Line(glyphs.bar_full * full + glyphs.bar_half * half, role)
    return line.pad_to(width, glyphs.bar_rest, "faint")


Level = Literal["good", "warn", "bad"]


class Limits(msgspec.Struct, frozen=True):
    """From which value on a share is amber and red; where ``bad < warn`` low values are worse."""

    warn: float
    bad: float

    def level(self, value: float) -> Level:
        """Return the level of a value."""
        sign = 1 if self.bad > self.warn else -1
        if sign * value >= sign * self.bad:
            return "bad"
        return "warn" if sign * value >= sign * self.warn else "good"


MFU: Final = Limits(warn=0.35, bad=0.15)
UTILISATION: Final = Limits(warn=0.8, bad=0.5)
MEMORY: Final = Limits(warn=0.9, bad=0.97)
BUBBLE: Final = Limits(warn=0.2, bad=0.4)
EXPOSED: Final = Limits(warn=0.15, bad=0.3)

LEAST_RANGE = 0.02
"""Share of the largest value: smaller differences are a flat line, not noise at full height."""


def sparkline(values: Sequence[float], width: int, glyphs: Glyphs) -> Line:
    """The newest ``width`` values as columns from minimum to maximum, at the right edge.

    A NaN is as low as the lowest value, an infinite one as high as the highest.
    """
    values = values[-width:] if width > 0 else ()
    finite = [value for value in values if math.isfinite(value)] or [0.0]
    low, high = min(finite), max(finite)
    # Half of each, for a difference of huge values is no number.
    spare = max(0.0, LEAST_RANGE * max(abs(low), abs(high)) / 2 - (high / 2 - low / 2)) or 0.0
    base, span = low / 2 - spare / 2, high / 2 - low / 2 + spare
    last = len(glyphs.levels) - 1

    def level(value: float) -> int:
        if math.isnan(value) or value == -math.inf:
            return 0
        if value == math.inf:
            return last
        return round(min(1.0, max(0.0, (value / 2 - base) / span)) * last) if span > 0 else 0

    columns = "".join(glyphs.levels[level(value)] for value in values)
    return Line(" " * (width - len(columns))).add(columns, "faint")


def stacked_bar(phases: Sequence[PhaseTime], width: int, glyphs: Glyphs) -> Line:
    """Phases side by side; one that takes time but less than a cell is left to the legend."""
    return stack(
        [(phase.seconds, glyphs.phases[phase.name], phase_role(phase.name)) for phase in phases],
        width,
    )


def stack(parts: Sequence[tuple[float, str, Role]], width: int) -> Line:
    """Amounts side by side, in cells by the largest remainder, so that they fill ``width``."""
    # Shares of the largest first, for a sum of huge amounts is no number.
    largest = max((amount for amount, _, _ in parts if math.isfinite(amount)), default=0.0)
    line = Line()
    if largest <= 0 or width <= 0:
        return line
    amounts = [amount / largest if 0 < amount < math.inf else 0.0 for amount, _, _ in parts]
    exact = [amount / sum(amounts) * width for amount in amounts]
    cells = [int(share) for share in exact]
    by_remainder = sorted(range(len(exact)), key=lambda place: cells[place] - exact[place])
    for place in by_remainder[: width - sum(cells)]:
        cells[place] += 1
    for (_, pattern, role), size in zip(parts, cells, strict=True):
        line.add(pattern * size, role)
    return line


def phase_role(name: str) -> Role:
    """Return the role that colours a phase; roles carry the names of the phases."""
    roles: dict[str, Role] = {
        "data": "data",
        "transfer": "transfer",
        "forward": "forward",
        "backward": "backward",
        "communication": "communication",
        "optimizer": "optimizer",
        "validation": "validation",
        "checkpoint": "checkpoint",
        "bubble": "bubble",
    }
    return roles.get(name, "other")
