"""What a finding advises fits the strategy and the evidence."""

import msgspec
import pytest

from boltmesh.telemetry.snapshot import Event, JobSnapshot
from boltmesh.tui.devices import DeviceReading
from boltmesh.tui.metrics.findings.diagnose import diagnose
from boltmesh.tui.metrics.findings.finding import Finding
from tests.tui.loads import steady, team, waiting_for
from tests.tui.samples import NOW, job, rank, state


def _findings(snapshot: JobSnapshot, *devices: DeviceReading) -> dict[str, Finding]:
    shown = msgspec.structs.replace(state(snapshot), devices=devices)
    return {finding.kind: finding for finding in diagnose(shown)}


@pytest.mark.parametrize(
    ("late", "others", "words"),
    [
        (("power limit",), ("power limit",), None),
        (("power limit",), (), "compare the power limit"),
        (("HW thermal",), ("power limit",), "cool that GPU"),
        (("HW power brake", "power limit"), ("power limit",), "throttled"),
        (("idle",), (), None),
    ],
)
def test_what_most_gpus_have_is_no_cause(
    late: tuple[str, ...], others: tuple[str, ...], words: str | None
) -> None:
    def gpu(number: int, reasons: tuple[str, ...]) -> DeviceReading:
        return DeviceReading(kind="gpu", ranks=(number,), name="H100", throttle_reasons=reasons)

    snapshot = team(*waiting_for(0.1, size=3))
    devices = (gpu(0, others), gpu(1, others), gpu(2, late))
    found = _findings(snapshot, *devices)["straggler"]
    assert any("throttled" in fact for fact in found.evidence) == (words is not None)
    assert (words or "other processes") in found.advice


@pytest.mark.parametrize(("strategy", "is_told"), [("DDPStrategy", True), ("ZeROStrategy", False)])
def test_compression_is_advised_where_the_strategy_has_it(strategy: str, *, is_told: bool) -> None:
    snapshot = team(*[steady(communication=0.2)] * 2, strategy=strategy)
    assert ("compression" in _findings(snapshot)["communication"].advice) == is_told


def test_a_process_that_a_signal_stopped_is_to_be_continued() -> None:
    text = "hang: rank 1 never entered all_reduce #4. Rank 1 is stopped by a signal (SIGSTOP)."
    phases = ("communication", "data", "communication")
    ranks = tuple(rank(at, phase=phase, last_seen=NOW - 60) for at, phase in enumerate(phases))
    snapshot = job(ranks=ranks)
    told = msgspec.structs.replace(snapshot, events=(Event(NOW - 20, 0, "warning", text),))
    assert _findings(told)["stalled"].advice == "continue rank 1: `kill -CONT 1001`"
