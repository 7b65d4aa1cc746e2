"""The rows of the table: the jobs of each strategy put together, and losses compared."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

from boltmesh.bench.figures import BenchRun
from boltmesh.bench.running import Ended

LOSS_TOLERANCE = 1e-3
"""Of the loss of the last step, relative. Layouts add in another order, by which a few dozen steps
of Adam come apart by some 1e-5; a share of the data that is not the same shows as 1e-2 and more."""
COARSE_LOSS_TOLERANCE = 2e-2
"""In 16-bit precision, whose rounding is a thousand times larger."""

PERCENT = 100


@dataclass
class BenchRow:
    """One strategy."""

    label: str
    runs: list[BenchRun] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    """What the reader has to know: why there are no figures, or what is odd about them."""
    is_refused: bool = False

    def add(self, ended: Ended) -> None:
        """Take in a job."""
        if ended.run is not None:
            self.runs.append(ended.run)
        if ended.reason is not None:
            kind = "" if ended.run is not None else "refused: " if ended.is_refused else "failed: "
            note = f"{kind}{ended.reason}"
            if note not in self.notes:
                self.notes.append(note)
        self.is_refused = self.is_refused or ended.is_refused

    @property
    def step_s(self) -> list[float]:
        """Of all jobs."""
        return [each for run in self.runs for each in run.step_s]

    def quartiles(self) -> tuple[float, float, float] | None:
        """Of the time of an optimizer step, in seconds: lower quartile, median, upper."""
        times = self.step_s
        if not times:
            return None
        if len(times) == 1:
            return times[0], times[0], times[0]
        low, middle, high = statistics.quantiles(times, n=4, method="inclusive")
        return low, middle, high

    def per_second(self, items: float | None) -> float | None:
        """Items of an optimizer step, by its median time."""
        quartiles = self.quartiles()
        return None if items is None or quartiles is None else items / quartiles[1]

    def memory(self, kind: str, place: str) -> int | None:
        """The most bytes of a kind on one rank."""
        return max((run.memory.get((kind, place), 0) for run in self.runs), default=None)

    def bubble(self) -> float | None:
        """Median over all steps; None where nothing is a pipeline."""
        shares = [each for run in self.runs for each in run.bubble]
        return statistics.median(shares) if shares else None


def compare_losses(rows: Sequence[BenchRow], *, is_coarse: bool) -> None:
    """Note where layouts that saw the same data have another loss after the same steps.

    Layouts are equal for this when they share the data out alike: over as many data ranks.
    """
    tolerance = COARSE_LOSS_TOLERANCE if is_coarse else LOSS_TOLERANCE
    first: dict[tuple[int, int], tuple[str, float]] = {}
    for row in rows:
        for run in row.runs:
            if run.loss is None:
                continue
            key = run.mesh.get("data", 1), run.last_step
            label, loss = first.setdefault(key, (row.label, run.loss))
            if math.isclose(run.loss, loss, rel_tol=tolerance):
                continue
            where = f"that of {label}" if label != row.label else "its own first round"
            note = (
                f"LOSS DIFFERS: {run.loss:.6g} after step {run.last_step}, and {loss:.6g} is "
                f"{where} on the same data"
            )
            if note not in row.notes:
                row.notes.append(note)
