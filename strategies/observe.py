"""Opens a strategy's telemetry: what the job is called, where it runs, which group is which axis."""

from typing import TYPE_CHECKING

from boltmesh.telemetry.recorder import NullRecorder, Recorder

if TYPE_CHECKING:
    from boltmesh.strategies.engine import MeshStrategy


def open_recorder_of(strategy: "MeshStrategy") -> Recorder | NullRecorder:
    return NullRecorder()
