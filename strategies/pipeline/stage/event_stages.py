"""Which stage runs each event of a step: calls of units, and the code between them."""

from collections.abc import Mapping

from boltmesh.errors import ConfigError
from boltmesh.strategies.pipeline.stage.trace import NO_EVENT, StepTrace, Value


class EventStages:
    """Which stage runs each event of a step.

    A step is in order if it calls no unit behind one of a later stage. The code behind a unit, up
    to the next one, then runs on that unit's stage. In other steps (several views of a batch
    through one encoder) each event runs on the first stage that has all of its inputs, at any
    position in the step: what a stage computes of one view does not wait for what later stages
    compute of another.

    Args:
        trace: One run of the step.
        stage_of_unit: The stage of each unit, from 0 without gaps.
        weight_only: As of :func:`plan_stages`.

    Raises:
        ConfigError: A unit is not on any stage, or computes with what a later stage gives.
    """

    def __init__(
        self,
        trace: StepTrace,
        stage_of_unit: Mapping[str, int],
        weight_only: frozenset[str] = frozenset(),
    ) -> None:
        self.calls = tuple(trace.unit_events())
        """The events that are calls of units, in order."""
        if not self.calls:
            raise ConfigError("the step calls none of the layers that were given to stages.")
        for event in self.calls:
            name = trace.events[event].name
            if name not in stage_of_unit:
                raise ConfigError(
                    f"the step calls {name!r}, which is on no stage: earlier batches did not call "
                    f"it. Name it in split."
                )
        self._by_event = self._in_order(trace, stage_of_unit, weight_only)
        self.is_in_order = bool(self._by_event)
        if not self.is_in_order:
            self._by_event = self._by_data(trace, stage_of_unit, weight_only)
        self.of_call = tuple(self._by_event[event] for event in self.calls)
        """The stage of each call."""
        self._last = max(self.of_call)

    def of(self, event: int) -> int:
        """Return the stage of an event; the last one for the end of the step."""
        if event == NO_EVENT:
            return 0
        return self._by_event[event] if event < len(self._by_event) else self._last

    def append(self, begin: int) -> None:
        """Give the events from ``begin`` on, behind the last unit, to one more stage."""
        self._last += 1
        self._by_event[begin:] = [self._last] * (len(self._by_event) - begin)

    def _in_order(
        self, trace: StepTrace, stage_of_unit: Mapping[str, int], weight_only: frozenset[str]
    ) -> list[int]:
        """Return the stage of each event, nothing if the step is not in order."""
        stages: list[int] = []
        current = 0
        for event in trace.events:
            if event.is_unit:
                stage = stage_of_unit[event.name]
                if stage < current and event.name not in weight_only:
                    return []
                current = max(stage, current)
            stages.append(current)
        return stages

    def _by_data(
        self, trace: StepTrace, stage_of_unit: Mapping[str, int], weight_only: frozenset[str]
    ) -> list[int]:
        used: dict[int, list[Value]] = {}
        for value in trace.values:
            for use in value.uses:
                used.setdefault(use, []).append(value)
        stages: list[int] = []
        last_units: list[str] = []
        """By event, a unit of its stage on whose result it depends."""
        for number, event in enumerate(trace.events):
            values = used.get(number, ())
            made_at = [each.made_at for each in values if NO_EVENT < each.made_at < number]
            source = max(made_at, key=stages.__getitem__, default=NO_EVENT)
            stage, unit = (0, "") if source == NO_EVENT else (stages[source], last_units[source])
            if event.is_unit:
                own = stage_of_unit[event.name]
                if own < stage and event.name not in weight_only:
                    raise ConfigError(
                        f"{event.name!r} is on stage {own} and the step calls it after {unit!r} of "
                        f"stage {stage} ({event.place}): activations would have to go back. Put "
                        f"both on one stage, or give the second call a layer of its own; to share "
                        f"weights between two layers is fine."
                    )
                stage, unit = max(own, stage), event.name
            stages.append(stage)
            last_units.append(unit)
        return stages
