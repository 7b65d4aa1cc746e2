"""Assigns each event of a step to a stage: calls of units, and the code between them."""

from collections import Counter
from collections.abc import Mapping

from boltmesh.errors import ConfigError
from boltmesh.strategies.pipeline.stage.trace import NO_EVENT, StepTrace, Value, write_refused


class EventStages:
    """The stage of each event of a step.

    A step is in order if it calls no unit after one of a later stage. The code behind a unit, up to
    the next one, then runs on that unit's stage. In other steps (several views of a batch through
    one encoder) each event runs on the first stage that has all of its inputs, at any position in
    the step: a stage's work on one view does not wait for later stages' work on another. The code
    behind the last unit runs on the last stage in every step.

    Args:
        trace: One run of the step.
        stage_of_unit: The stage of each unit, from 0 without gaps.
        weight_only: See :func:`plan_stages`.

    Raises:
        ConfigError: A unit is not on any stage, or computes with a value of a later stage.
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
        self._last = max(stage_of_unit.values())
        in_order = self._in_order(trace, stage_of_unit, weight_only)
        self.is_in_order = in_order is not None
        self._by_event = in_order or self._by_data(trace, stage_of_unit, weight_only)
        self.of_call = tuple(self._by_event[event] for event in self.calls)
        """The stage of each call."""
        for begun, end in trace.functions:
            stages = {self._by_event[each]: each for each in self.calls if begun <= each < end}
            if len(stages) > 1:
                (one, first), *_, (other, last) = sorted(stages.items())
                raise ConfigError(
                    f"{trace.events[end].name} ({trace.events[end].place}) calls "
                    f"{trace.events[first].name!r} of stage {one} and {trace.events[last].name!r} "
                    f"of stage {other}, and what goes back through a torch.autograd.Function is "
                    f"computed in one place. Set split so that one stage has all of its layers, or "
                    f"use bolt_ddp, bolt_zero2 or bolt_tensor."
                )

    def of(self, event: int) -> int:
        """Return the stage of an event; the last one for the end of the step."""
        if event == NO_EVENT:
            return 0
        return self._by_event[event] if event < len(self._by_event) else self._last

    def of_value(self, value: Value) -> int:
        """Return the stage that makes a value."""
        if value.is_of_metric and not self.is_in_order:
            return self._last
        return self.of(value.made_at)

    def append(self) -> None:
        """Assign the events behind the last unit to one more stage."""
        begin = self.calls[-1] + 1
        self._last += 1
        self._by_event[begin:] = [self._last] * (len(self._by_event) - begin)

    def _in_order(
        self, trace: StepTrace, stage_of_unit: Mapping[str, int], weight_only: frozenset[str]
    ) -> list[int] | None:
        """Return the stage of each event, None if the step is not in order."""
        stages: list[int] = []
        current = 0
        for event in trace.events:
            if event.is_unit:
                stage = stage_of_unit[event.name]
                if stage < current and event.name not in weight_only:
                    return None
                current = max(stage, current)
            stages.append(current)
        return stages

    def _by_data(
        self, trace: StepTrace, stage_of_unit: Mapping[str, int], weight_only: frozenset[str]
    ) -> list[int]:
        inputs = _inputs(trace)
        stages: list[int] = []
        last_units: list[str] = []
        """A unit of the event's stage on whose result it depends, by event."""
        for number, event in enumerate(trace.events[: self.calls[-1] + 1]):
            stage, unit = 0, ""
            for value in inputs.get(number, ()):
                if value.is_of_metric:
                    stage, unit = self._last, value.origin
                elif value.made_at != NO_EVENT and stages[value.made_at] >= stage:
                    stage, unit = stages[value.made_at], last_units[value.made_at]
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
        return stages + [self._last] * (len(trace.events) - len(stages))


def _inputs(trace: StepTrace) -> dict[int, list[Value]]:
    """Return the inputs of each event; reads of values by Python are no inputs."""
    looks = Counter(
        (id(value), reading.event - 1) for reading in trace.readings for value in reading.values
    )
    inputs: dict[int, list[Value]] = {}
    for value in trace.values:
        for use in value.uses:
            if looks[id(value), use]:
                looks[id(value), use] -= 1
            else:
                inputs.setdefault(use, []).append(value)
    return inputs


def refuse_changes_between_calls(trace: StepTrace, stages: EventStages) -> None:
    """Refuse writes that depend on the order of a step, which stages do not keep.

    A stage may write to a value that it made, before others use it.

    Raises:
        ConfigError: Naming the line.
    """
    first, last = stages.calls[0], stages.calls[-1]
    for number, event in enumerate(trace.events):
        if event.writes and first < number < last:
            raise write_refused(event.writes, event.place, "between calls of layers")
    for storage, all_writes in trace.writes.items():
        writes = [each for each in all_writes if each <= last]
        values = [each for each in trace.values if each.storage == storage and writes]
        writers = {stages.of(each) for each in writes}
        writers |= {stages.of_value(each) for each in values}
        is_used_before = any(
            use < writes[-1] and stages.of(use) not in writers
            for value in values
            for use in value.uses
        )
        was_there = any(each.made_at == NO_EVENT for each in values)
        if writes and (len(writers) > 1 or is_used_before or was_there):
            event = trace.events[writes[-1]]
            what = "its argument" if event.is_unit else "a tensor"
            raise ConfigError(
                f"{event.name} at {event.place} changes {what} in place, and the step calls layers "
                f"of a stage again after those of a later one, which stages run in another order. "
                f"Use the function that makes a new tensor."
            )
