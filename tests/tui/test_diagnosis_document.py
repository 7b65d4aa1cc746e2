"""docs/diagnosis.md names every finding and the thresholds that hold."""

from pathlib import Path
from typing import get_args

import pytest

from boltmesh.telemetry import stall
from boltmesh.tui.metrics import step_time, stragglers, traffic
from boltmesh.tui.metrics.findings import limits, waits
from boltmesh.tui.metrics.findings.finding import KEPT, Kind
from boltmesh.tui.metrics.step_time import WARM_UP_BATCHES

TEXT = " ".join(
    (Path(__file__).parents[2] / "docs" / "diagnosis.md").read_text(encoding="utf-8").split()
)


def test_every_kind_is_described() -> None:
    assert [kind for kind in get_args(Kind) if f"`{kind}` |" not in TEXT] == []


@pytest.mark.parametrize(
    "words",
    [
        (
            f"from {stall.RECENT_STEPS} to {step_time.JUDGED_STEPS} batches of each rank "
            f"({step_time.LEAST_STEPS} with hundreds"
        ),
        f"falls below {KEPT:.0%} of the limit",
        f"{limits.HOST_BUSY:.0%} of its cores are in use, and {limits.OTHERS_BUSY:.0%} by",
        f"The first {WARM_UP_BATCHES} batches",
        f"made from {stragglers.BATCHES_TO_JUDGE} such batches on",
        f"for {stall.STALL_IN_BATCHES:.0f} batches, {stall.STALL_IN_LONGEST:.0f} times the longest",
        f"recent one and {stall.STALL_AT_LEAST_S:.0f} s",
        f"or for {stall.LONG_LIMIT_S / 60:.0f} minutes while",
        f"{limits.DEVICE_NEARLY_FULL:.0%} of a GPU",
        f"{limits.HOST_NEARLY_FULL:.0%} of a host",
        f"by more than {traffic.TOLERANCE:.1%}",
        f"| {waits.INPUT_SHARE:.0%} of a step goes into waiting for the batch",
        f"| {waits.OFFLOAD_SHARE:.0%} goes into the optimizer",
        f"the bubble ratio is {waits.BUBBLE_SHARE:.0%}, or {waits.PART_SHARE:.0%} by",
        f"| {waits.COMMUNICATION_SHARE:.0%} of a step is communication",
        f"wait for {waits.UNEVEN_SHARE:.0%} of a step",
        f"by {stragglers.LATE_SHARE:.0%} of a step, by {1e3 * stragglers.LATE_AT_LEAST_S:.0f} ms,",
        f"and by {stragglers.LATE_DEVIATIONS:.0f} scaled median deviations",
        f"{waits.HOTTER_CELSIUS:.0f} C hotter",
    ],
)
def test_every_threshold_is_the_one_that_holds(words: str) -> None:
    assert words in TEXT
