"""The private parts of torch that telemetry needs; nothing else of it uses any."""

from boltmesh.telemetry.recording.torch_compat.hook import COLLECTIVES, CollectiveObserver, Ticket
from boltmesh.telemetry.recording.torch_compat.operators import (
    ANYBODY,
    PAYLOAD,
    group_ranks,
    uncounted_operators,
)
from boltmesh.telemetry.recording.torch_compat.store import default_store

__all__ = [
    "ANYBODY",
    "COLLECTIVES",
    "PAYLOAD",
    "CollectiveObserver",
    "Ticket",
    "default_store",
    "group_ranks",
    "uncounted_operators",
]
