"""The private parts of torch that telemetry needs; nothing else of it uses any."""

from boltmesh.telemetry.writer.torch_compat.hook import COLLECTIVES, CollectiveObserver, Ticket
from boltmesh.telemetry.writer.torch_compat.operators import (
    ANYBODY,
    PAYLOAD,
    group_ranks,
    uncounted_operators,
)

__all__ = [
    "ANYBODY",
    "COLLECTIVES",
    "PAYLOAD",
    "CollectiveObserver",
    "Ticket",
    "group_ranks",
    "uncounted_operators",
]
