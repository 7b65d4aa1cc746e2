"""Cuts a trace into stages: values sent over each boundary, and a stage's handling of events."""

from collections import Counter
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from boltmesh.errors import ConfigError
from boltmesh.strategies.pipeline.runtime.stage import ValueSpec
from boltmesh.strategies.pipeline.stage.event_stages import (
    EventStages,
    refuse_changes_between_calls,
)
from boltmesh.strategies.pipeline.stage.trace import (
    NO_EVENT,
    StepTrace,
    Value,
    write_refused,
)

ANY_STAGE = -1


class StageBoundaries:
    """How values are sent from one stage to the next; by default whole, as stages use them."""

    def running(self) -> AbstractContextManager[None]:
        """Return a context for a stage's run of a step."""
        return nullcontext()

    def dividing(self, trace: StepTrace) -> Callable[[ValueSpec], ValueSpec]:
        """Return a function from the spec of a whole value to that of the part this rank sends."""
        return lambda spec: spec

    def sent(self, value: Tensor, spec: ValueSpec) -> Tensor:
        """Return the plain tensor to send for a value, with the shape of ``spec``."""
        return value

    def received(self, tensor: Tensor, spec: ValueSpec) -> Tensor:
        """Return the value of a received plain tensor, which has the shape of ``spec``."""
        return tensor

    def whole(self, result: Any) -> Any:
        """Return a step's result with every tensor whole."""
        return result

    def largest(self, number: float) -> float:
        """Return the maximum of a number over the ranks that have parts of one value."""
        return number


@dataclass
class EventPlan:
    """Handling of the tensors in one event's result."""

    receive: dict[int, int] = field(default_factory=dict)
    """Received values that replace leaves, by leaf."""
    keep: dict[int, int] = field(default_factory=dict)
    """Numbers under which leaves are kept, to be filled or sent later, by leaf."""
    fill: list[tuple[int, int]] = field(default_factory=list)
    """Kept tensors into which received values are written: number, received value."""
    ends: bool = False
    """Whether the stage's run ends with this event."""
    writes: tuple[str, int] | None = None
    """The parameter that it writes to, and the number of this write to it in the step."""
    is_late: bool = False
    """Whether it writes after all microbatches, because earlier events use the parameter."""


@dataclass(frozen=True)
class StagePlan:
    """Plan of one stage of a step for batches of one signature."""

    stage: int
    num_stages: int
    begin: int
    """First event of the stage; the end of the step if the step is not in order."""
    is_in_order: bool
    """Whether the step calls no unit after one of a later stage."""
    trace: StepTrace
    """The run that was planned; complete, and not changed once plans are made of it."""
    stage_of_call: tuple[int, ...]
    """The stage of each call of a unit, in the order of ``trace.unit_events()``."""
    written_outputs: frozenset[tuple[int, int]]
    """Event and leaf of unit outputs that the step changes in place."""
    handling: dict[int, EventPlan]
    last_watched: int
    """The last event between units that has to be matched by number; -1 if there is none."""
    copies: frozenset[int]
    """Received values that the step changes in place later."""
    received_numbers: tuple[int, ...]
    """Numbers under which received values are kept."""
    values_in: tuple[ValueSpec, ...]
    sent_numbers: tuple[int, ...]
    """Numbers under which the values to send are kept."""
    values_out: tuple[ValueSpec, ...]
    row_values: tuple[bool, ...]
    """Whether each received value is, or may be, computed from the batch's data."""
    parameters: frozenset[str]
    """The parameters that this stage uses, by their first names."""
    changed_buffers: Mapping[str, int]
    """Buffers outside of units that the step changes, with the stage that has their new values;
    ANY_STAGE if these depend on no unit."""
    changed_attributes: frozenset[tuple[str, str]]
    """Attributes that the step changes on modules outside of units: module and name."""
    attributes_of_last: frozenset[tuple[str, str]]
    """Those of them that only the last stage keeps, because this one lacks some of their values."""

    @property
    def is_last(self) -> bool:
        """Whether the stage runs to the end of the step."""
        return self.stage == self.num_stages - 1


def plan_stages(
    trace: StepTrace,
    stage_of_unit: Mapping[str, int],
    parameters_of_unit: Mapping[str, frozenset[str]],
    weight_only: frozenset[str],
    boundaries: StageBoundaries,
    *,
    trains: bool,
) -> tuple[StagePlan, ...]:
    """Return the plans of all stages, first to last.

    Args:
        trace: One run of the step.
        stage_of_unit: The stage of each unit, from 0 without gaps.
        parameters_of_unit: The parameters that each unit holds, by their first names.
        weight_only: Units that consist of weights only, such as an embedding: a later stage may
            call them again, and then shares the weights.
        boundaries: How values are sent from one stage to the next.
        trains: Whether the last stage uses the parameters that the step logs or returns; the tail
            of other steps borrows them.

    Raises:
        ConfigError: The step cannot be cut there.
    """
    cut = _StageCut(trace, stage_of_unit, weight_only, boundaries)
    cut.has_parameters_out = trains
    plans = [_StagePlanner(cut, stage, parameters_of_unit).plan() for stage in range(cut.count)]
    for number, event in enumerate(trace.events):
        users = [plan.stage for plan in plans if event.writes in plan.parameters]
        if event.writes and cut.stages.of(number) > min(users, default=0):
            raise write_refused(event.writes, event.place, "behind the stage that uses it")
    return tuple(plans)


def plan_tail(
    trace: StepTrace,
    stage_of_unit: Mapping[str, int],
    parameters_of_unit: Mapping[str, frozenset[str]],
    weight_only: frozenset[str],
    recomputed: frozenset[int],
    boundaries: StageBoundaries,
) -> tuple[StagePlan, StagePlan]:
    """Return the last stage up to its last unit, and the tail behind it as a stage of its own.

    Arguments as for :func:`plan_stages`. ``recomputed``: numbers, in the trace, of values of code
    between units that the tail computes again from their sources.

    Raises:
        ConfigError: The step cannot be cut there.
    """
    begin = trace.unit_events()[-1] + 1
    cut = _StageCut(trace, stage_of_unit, weight_only, boundaries, tail=begin)
    cut.recompute({id(trace.values[number]) for number in recomputed})
    last, tail = (
        _StagePlanner(cut, stage, parameters_of_unit) for stage in (cut.count - 2, cut.count - 1)
    )
    return last.plan(), tail.plan()


class _StageCut:
    """The stage of each event, and the live values at each boundary."""

    def __init__(
        self,
        trace: StepTrace,
        stage_of_unit: Mapping[str, int],
        weight_only: frozenset[str],
        boundaries: StageBoundaries,
        tail: int | None = None,
    ) -> None:
        self.trace = trace
        self.divided = boundaries.dividing(trace)
        self.stages = EventStages(trace, stage_of_unit, weight_only)
        self.count = max(stage_of_unit.values()) + 1
        missing = set(range(self.count)) - set(self.stages.of_call)
        if missing:
            raise ConfigError(
                f"stage {min(missing)} of {self.count} runs no layer in this step: give it one of "
                f"those that the step calls, or use fewer stages."
            )
        self.begins = [self._begin_of(stage) for stage in range(self.count)]
        self._refuse_early_readings()
        self.has_parameters_out = self.has_tail = tail is not None
        """Whether the last stage uses the parameters that the step returns or logs."""
        if tail is not None:  # one more stage, without units
            self.stages.append()
            self.count += 1
            self.begins.append(tail)
        self.alive = [self._alive_at(stage) for stage in range(self.count)]
        self.ends = [self._last_event_of(stage) for stage in range(self.count)]
        if not self.stages.is_in_order:
            refuse_changes_between_calls(trace, self.stages)

    def _begin_of(self, stage: int) -> int:
        if stage == 0:
            return 0
        if not self.stages.is_in_order:
            return len(self.trace.events)
        return self.stages.calls[self.stages.of_call.index(stage)]

    def _last_event_of(self, stage: int) -> int:
        """Return the last event that a stage has to run.

        It is a unit, makes a value to send or to put into a buffer, or writes to a received value.
        """
        calls = zip(self.stages.calls, self.stages.of_call, strict=True)
        own = [event for event, at in calls if at == stage]
        sent = self.alive[stage + 1] if stage + 1 < self.count else []
        own += [each.made_at for each in sent if self.stages.of_value(each) == stage]
        own += [e for e in self.trace.changed_buffers.values() if self.stages.of(e) == stage]
        for value in [*self.alive[stage], *sent]:
            writes = self.trace.writes.get(value.storage, ())
            own += [write for write in writes if self.stages.of(write) <= stage]
        return max(own, default=NO_EVENT)

    def _alive_at(self, stage: int) -> list[Value]:
        """Return the values that earlier stages make and this or a later one uses."""
        if stage == 0:
            return []
        alive = [
            value
            for value in self.trace.values
            if self.stages.of_value(value) < stage
            and (
                any(self.stages.of(use) >= stage for use in value.uses) or self._reads(stage, value)
            )
            and (value.made_at != NO_EVENT or self._is_written_before(value, stage))
        ]
        for value in alive:
            self._refuse_unreachable(value, stage)
        self._refuse_shared_memory(alive, stage)
        return sorted(alive, key=lambda each: (each.made_at, each.leaf))

    def recompute(self, chosen: Collection[int]) -> None:
        """Replace live values of the tail by their sources, by identity of the values.

        Raises:
            ConfigError: A value cannot be computed again from values of the last stage.
        """
        waiting = self.alive[-1]
        kept: list[Value] = []
        on_last_stage = {id(each) for each in self.alive[-2]}
        while waiting:
            value, *waiting = waiting
            event = self.trace.events[value.made_at]
            if id(value) not in chosen or event.is_unit:
                kept += [] if any(value is each for each in kept) else [value]
                continue
            sources = [
                each
                for each in self.trace.values
                if each.made_at < value.made_at and value.made_at in each.uses
            ]
            is_here = all(
                id(each) in on_last_stage or self.stages.of(each.made_at) >= self.count - 2
                for each in sources
            )
            is_written = any(each.storage in self.trace.writes for each in (value, *sources))
            if not is_here or is_written or event.parameters:
                raise ConfigError(
                    f"{value.origin} ({event.place}) is computed between layers, of rows that "
                    f"are not all on the last stage: compute it behind the last layer"
                )
            waiting += sources
        self.alive[-1] = sorted(kept, key=lambda each: (each.made_at, each.leaf))

    def _reads(self, stage: int, value: Value) -> bool:
        """Whether a stage reads a value before its own part of the step, as only a tail may."""
        if not self.has_tail or stage < self.count - 1:
            return False
        return any(value is each for reading in self.trace.readings for each in reading.values)

    def _is_written_before(self, value: Value, stage: int) -> bool:
        writes = self.trace.writes.get(value.storage, ())
        return any(self.stages.of(write) < stage for write in writes)

    def _refuse_unreachable(self, value: Value, stage: int) -> None:
        if value.is_side_effect:
            raise ConfigError(
                f"the step uses {value.origin} on stage {stage} or later, which a layer of an "
                f"earlier stage left there and did not return: other stages cannot see it. Return "
                f"it from the layer, or put both on one stage."
            )
        if value.made_at == NO_EVENT:
            last = self.trace.events[self.trace.writes[value.storage][0]]
            raise ConfigError(
                f"{last.name} at {last.place} writes what a layer computes into a buffer or into "
                f"the batch, and stage {stage} uses it. Write it into a new tensor, or inside a "
                f"layer."
            )

    def _refuse_shared_memory(self, alive: list[Value], stage: int) -> None:
        for value in alive:
            writes = [
                each
                for each in self.trace.writes.get(value.storage, ())
                if self.stages.of(each) >= stage
            ]
            others = [each for each in alive if each.storage == value.storage and each is not value]
            if writes and others:
                event = self.trace.events[writes[0]]
                raise ConfigError(
                    f"{event.name} at {event.place} changes {value.origin} in place, which shares "
                    f"memory with {others[0].origin}; both come from an earlier stage, where they "
                    f"are two tensors. Use the function that makes a new tensor."
                )

    def reaches(self, stage: int, position: int) -> bool:
        """Return whether a stage runs the code behind the first ``position`` events."""
        if self.stages.is_in_order:
            return self.stages.of(position - 1) <= stage
        return stage == self.count - 1 or position <= self.ends[stage] + 1

    def _refuse_early_readings(self) -> None:
        for reading in self.trace.readings:
            stage = self.stages.of(reading.event - 1)
            is_between = not self.stages.is_in_order and reading.event <= self.stages.calls[-1]
            if stage < self.count - 1 or is_between:
                raise ConfigError(
                    f"{reading.name}() of {reading.origin} at {reading.place} looks at a value of "
                    f"stage {stage} that {'other' if is_between else 'later'} stages do not have "
                    f"when they come there. Do it inside a layer, or after the last one."
                )


class _StagePlanner:
    """Plans one stage of a cut."""

    def __init__(
        self, cut: _StageCut, stage: int, parameters_of_unit: Mapping[str, frozenset[str]]
    ) -> None:
        self.cut = cut
        self.trace = cut.trace
        self.stage = stage
        self.parameters_of_unit = parameters_of_unit
        self.is_last = stage == cut.count - 1
        self.begin = cut.begins[stage]
        self.end = len(self.trace.events) if self.is_last else cut.begins[stage + 1]
        self.handling: dict[int, EventPlan] = {}
        self.copies: set[int] = set()
        self.watched = NO_EVENT

    def plan(self) -> StagePlan:
        received = self.cut.alive[self.stage]
        sent = [] if self.is_last else self.cut.alive[self.stage + 1]
        numbers = {id(value): number for number, value in enumerate(self.trace.values)}
        for slot, value in enumerate(received):
            self._receive(value, slot, numbers[id(value)])
        for value in sent:
            if not any(value is each for each in received):
                self._at(value.made_at).keep[value.leaf] = numbers[id(value)]
        if self.cut.has_tail and self.stage == self.cut.count - 2:
            self._at(self.end - 1).ends = True
        elif not self.is_last and not self.cut.stages.is_in_order:
            self._at(self.cut.ends[self.stage]).ends = True
        self._write()
        return StagePlan(
            stage=self.stage,
            num_stages=self.cut.count,
            begin=self.begin,
            is_in_order=self.cut.stages.is_in_order,
            trace=self.trace,
            stage_of_call=self.cut.stages.of_call,
            written_outputs=self._written_outputs(),
            handling=self.handling,
            last_watched=self.watched,
            copies=frozenset(self.copies),
            values_in=tuple(self._spec(each, self.begin) for each in received),
            values_out=tuple(self._spec(each, self.end) for each in sent),
            received_numbers=tuple(numbers[id(each)] for each in received),
            sent_numbers=tuple(numbers[id(each)] for each in sent),
            row_values=tuple(each.follows_batch for each in received),
            parameters=self._parameters(),
            changed_buffers={
                name: ANY_STAGE if event == NO_EVENT else self.cut.stages.of(event)
                for name, event in self.trace.changed_buffers.items()
            },
            changed_attributes=self.trace.changed_attributes,
            attributes_of_last=(
                frozenset()
                if self.is_last or self.cut.stages.is_in_order
                else self.trace.attributes_of_units
            ),
        )

    def _at(self, event: int) -> EventPlan:
        if not self.trace.events[event].is_unit:
            self.watched = max(self.watched, event)
        return self.handling.setdefault(event, EventPlan())

    def _receive(self, value: Value, slot: int, number: int) -> None:
        writes = self.trace.writes.get(value.storage, ())
        own = [each for each in writes if self.cut.stages.of(each) >= self.stage]
        before = [each for each in writes if value.made_at < each and each not in own]
        if before:
            self._at(value.made_at).keep[value.leaf] = number
            self._at(before[-1]).fill.append((number, slot))
        else:
            self._at(value.made_at).receive[value.leaf] = slot
        if own:
            self.copies.add(slot)

    def _write(self) -> None:
        """Plan the step's writes to parameters.

        Raises:
            ConfigError: A write is between uses of its parameter.
        """
        counts: Counter[str] = Counter()
        for number, event in enumerate(self.trace.events[: self.end]):
            if not event.writes:
                continue
            uses = self._uses(event.writes)
            is_late = any(use < number for use in uses)
            if is_late and uses[-1] > number:
                raise write_refused(event.writes, event.place, "between uses of it")
            plan = self._at(number)
            plan.writes, plan.is_late = (event.writes, counts[event.writes]), is_late
            counts[event.writes] += 1

    def _uses(self, parameter: str) -> list[int]:
        """Return the events that use a parameter; -1 for one that uses an older value of it."""
        uses = [
            number
            for number, event in enumerate(self.trace.events)
            if parameter in event.parameters
            or (event.is_unit and parameter in self.parameters_of_unit[event.name])
        ]
        is_stale = parameter in self.trace.stale_uses
        return [NO_EVENT, *uses, len(self.trace.events)] if is_stale else uses

    def _written_outputs(self) -> frozenset[tuple[int, int]]:
        return frozenset(
            (value.made_at, value.leaf)
            for value in self.trace.values
            if value.storage in self.trace.writes
        )

    def _parameters(self) -> frozenset[str]:
        used: set[str] = set()
        for event, stage in zip(self.cut.stages.calls, self.cut.stages.of_call, strict=True):
            if stage == self.stage:
                used |= self.parameters_of_unit[self.trace.events[event].name]
        for number, each in enumerate(self.trace.events):
            if each.parameters and self.cut.stages.of(number) == self.stage:
                used |= each.parameters
        for number, names in self.trace.parameter_reads.items():
            if self.cut.reaches(self.stage, number):
                used |= names
        if self.cut.has_parameters_out and self.is_last:
            used |= self.trace.parameters_out
        return frozenset(used)

    def _spec(self, value: Value, event: int) -> ValueSpec:
        spec = value.spec
        whole = ValueSpec(spec.shape, spec.dtype, value.needs_grad_before(event), value.origin)
        return self.cut.divided(whole)
