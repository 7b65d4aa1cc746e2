"""What one stage does at every event of a step."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from boltmesh.strategies.pipeline.replay.trace import Event, MetricTrace, UnitOutput
from boltmesh.strategies.pipeline.values import ValueSpec

ANY_STAGE = -1


@dataclass
class Handling:
    """What happens to the tensors of one event's result."""

    receive: dict[int, int] = field(default_factory=dict)
    """A leaf is this received value."""
    keep: dict[int, int] = field(default_factory=dict)
    """A leaf is remembered under this number: it is filled or sent later."""
    fill: list[tuple[int, int]] = field(default_factory=list)
    """Remembered tensors into which received values are written."""
    ends: bool = False
    """The stage's run is over when this event is."""


@dataclass(frozen=True)
class StagePlan:
    """How one stage runs the step for batches of one signature."""

    stage: int
    num_stages: int
    begin: int
    """The first event that is the stage's own."""
    events: tuple[Event, ...]
    unit_events: tuple[int, ...]
    """The events that are calls of units, in order."""
    stage_of_call: tuple[int, ...]
    """Which stage runs each of them."""
    outputs: dict[int, UnitOutput]
    written_outputs: frozenset[tuple[int, int]]
    """Event and leaf of what units give and the step changes in place."""
    handling: dict[int, Handling]
    last_watched: int
    """The last event between units that has to be found by its number; -1 where there is none."""
    copies: frozenset[int]
    """Received values that the step changes in place later."""
    received_numbers: tuple[int, ...]
    """What the values that the stage receives are remembered under."""
    values_in: tuple[ValueSpec, ...]
    sent_numbers: tuple[int, ...]
    """What the values that the stage sends are remembered under."""
    values_out: tuple[ValueSpec, ...]
    row_values: tuple[bool, ...]
    """Of each received value whether it was made of the batch's data, or may have been."""
    parameters: frozenset[str]
    """The parameters that this stage uses, by their first names."""
    metrics: tuple[MetricTrace, ...]
    """What metrics the whole step calls."""
    draws_random: bool
    """Whether random numbers between units have to be apart from those inside of them."""
    draws_host_random: bool
    """The same of those that numpy and Python draw."""
    changed_buffers: Mapping[str, int] = field(default_factory=dict)
    """Buffers outside of units that the step changes, with the stage that has what it puts into
    them; ANY_STAGE where that depends on no unit."""
    changed_attributes: frozenset[tuple[str, str]] = frozenset()
    """Attributes that the step changes on modules outside of units: module and name."""

    @property
    def is_last(self) -> bool:
        """Whether the step ends here."""
        return self.stage == self.num_stages - 1
