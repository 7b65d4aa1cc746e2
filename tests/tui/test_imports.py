"""The dashboard is on the screen at once because it loads so little."""

import subprocess
import sys

import pytest


def _modules_after(code: str) -> set[str]:
    listing = f"{code}\nimport sys; print(' '.join(sys.modules), file=sys.stderr)"
    done = subprocess.run(
        [sys.executable, "-c", listing], capture_output=True, text=True, check=True
    )
    return set(done.stderr.split())


@pytest.mark.parametrize(
    ("code", "unwanted"),
    [
        ("import boltmesh.tui.app, boltmesh.telemetry.reader.reader",
         {"torch", "lightning", "numpy", "pynvml"}),
        ("import boltmesh.tui.commands.top", {"torch", "lightning", "textual", "pynvml"}),
        ("from boltmesh.tui.commands.top import top; assert top(demo=True, once=True) == 0",
         {"torch", "lightning", "textual", "pynvml"}),
        ("from boltmesh.tui.commands.top import jobs; assert jobs() == 0",
         {"torch", "lightning", "textual", "pynvml"}),
    ],
    ids=["app", "command", "once", "jobs"],
)  # fmt: skip
def test_no_more_is_loaded_than_is_needed(code: str, unwanted: set[str]) -> None:
    assert unwanted & _modules_after(code) == set()
