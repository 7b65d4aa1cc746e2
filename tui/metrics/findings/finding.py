"""One problem of a job, in words."""

from typing import Literal

import msgspec

Kind = Literal[
    "crashed",
    "loss",
    "stalled",
    "host",
    "memory",
    "traffic",
    "straggler",
    "input",
    "offload",
    "bubble",
    "communication",
    "experts",
    "uneven",
]

Severity = Literal["bad", "warn"]
"""``bad``: the run is lost or makes nothing of worth. ``warn``: it could be better."""


KEPT = 0.75
"""A finding stays until its figure is below this share of the limit."""


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """A problem, the evidence for it, and advice."""

    kind: Kind
    severity: Severity
    headline: str
    evidence: tuple[str, ...]
    """The numbers behind the headline."""
    advice: str
    ranks: tuple[int, ...] = ()
    """The ranks concerned; empty if all are."""
    cost: float = 0.0
    """Share of a step that would be won at most; 0 where it is not a matter of time."""
