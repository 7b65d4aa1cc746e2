"""Text has no height: ``--once`` prints findings and reasons in full."""

import msgspec
import pytest

from boltmesh.telemetry.snapshot import Event, operator_name
from boltmesh.tui.commands.top import job_text
from boltmesh.tui.render.style import ASCII, UNICODE, Style
from boltmesh.tui.state import fold
from tests.tui.loads import steady, team
from tests.tui.samples import NOW, demo, job, rank, state

PATH = "/var/lib/" + "/".join(f"checkpoints-{at}" for at in range(20)) + "/last.ckpt"


@pytest.mark.parametrize("width", [40, 80, 200])
def test_a_crash_keeps_the_path_of_the_checkpoint(width: int) -> None:
    crashed = job(
        state="crashed",
        cause="rank 1 was killed by SIGKILL (by hand, or by the kernel for lack of memory).",
        checkpoint=PATH,
        ranks=(rank(0), rank(1, state="dead", error="killed")),
    )
    text = job_text(state(crashed), width, Style(UNICODE, has_headings=False, has_signs=False))
    assert PATH in text.replace("\n", "").replace(" ", "")
    assert all(len(line) <= width for line in text.splitlines())


def test_every_finding_is_printed_with_its_advice() -> None:
    slow = [steady(data=0.2, communication=0.3), steady(data=0.2, communication=0.3)]
    text = job_text(state(team(*slow)), 80, Style(ASCII, has_headings=False, has_signs=False))
    assert text.count("try:") >= 2
    assert "~" not in text.split("samples/s")[0]


def test_a_stalled_job_keeps_its_evidence() -> None:
    reason = "hang: rank 1 never entered all_reduce #4; " + "it waits " * 40 + "at train.py:31"
    silent = job(
        ranks=tuple(rank(at, last_seen=NOW - 60, phase="communication") for at in range(2)),
        events=(Event(NOW - 20, 0, "warning", reason),),
    )
    text = job_text(state(silent), 80, Style(ASCII, has_headings=False, has_signs=False))
    assert "at train.py:31" in text.split("samples/s")[0].replace("\n", " ")


@pytest.mark.parametrize("width", [60, 80, 200])
def test_events_and_formulas_are_printed_in_full(width: int) -> None:
    seen = demo()
    events = (Event(NOW - 9, 0, "warning", f"it wrote {PATH} and " + "more " * 5 + "than that"),)
    seen = msgspec.structs.replace(seen, job=msgspec.structs.replace(seen.job, events=events))
    text = job_text(fold(None, seen), width, Style(UNICODE, has_headings=False, has_signs=False))
    assert PATH in text.replace("\n", "").replace(" ", "")
    assert "than that" in text
    in_one_line = " ".join(text.split())
    for each in seen.job.expected:
        assert each.why in in_one_line
    assert all(len(line) <= width for line in text.splitlines())


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("allgather_base_", "all_gather"),
        ("reduce_scatter_base", "reduce_scatter"),
        ("send", "send"),
    ],
)
def test_operators_have_no_suffix_of_torch(name: str, shown: str) -> None:
    assert operator_name(name) == shown
