"""Runs a step as one stage: with values of earlier stages, up to the beginning of the next one.

[Note: The tail of a step]
Behind the last unit there is one more stage without units, the tail. The values sent over the
boundary to it come from the last unit, or from earlier units if they are used again: usually
logits. Microbatches can be joined there, since outputs of units for a row do not depend on other
rows; means, counts and metrics come later. So the tail, run on values of the whole batch, gives the
results of one process, whatever it computes: no rules are needed to combine results of parts.

The values of parts must be in the order that the tail expects (``merge.py``). If code between units
draws random numbers before the tail begins, the tail draws them again when it is run. They are the
same only with the same seed and shapes, so such a batch is not divided.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from typing_extensions import override

from boltmesh.errors import DivergenceError
from boltmesh.strategies.dry_run.no_side_effects import name_of
from boltmesh.strategies.patch import patched
from boltmesh.strategies.pipeline.stage.cut import EventPlan, StageBoundaries, StagePlan
from boltmesh.strategies.pipeline.stage.data_dependent_ops import is_event
from boltmesh.strategies.pipeline.stage.rng import RandomStreams
from boltmesh.strategies.pipeline.stage.trace import (
    Argument,
    TensorSpec,
    TraceEvent,
    line_of_step,
)
from boltmesh.strategies.pipeline.stage.units import ReplacedForwards, is_absent, one_element
from boltmesh.strategies.pytree import is_immutable, own_arguments, take_apart
from boltmesh.strategies.torch_compat.autograd import OwnFunctionMode
from boltmesh.strategies.torch_compat.modules import distributions_unchecked


class ParameterWrites:
    """Executes the writes of a step to parameters once per batch instead of per microbatch.

    A write before all uses of its parameter runs with the first microbatch on each rank, one after
    them when all microbatches have run. Outside of ``of_batch`` writes are skipped.
    """

    def __init__(self) -> None:
        self._done: set[tuple[str, int]] | None = None
        self._late: list[Callable[[], Any]] = []

    @contextmanager
    def of_batch(self) -> Iterator[None]:
        """Return a context for the microbatches of one batch."""
        self._done = set()
        try:
            yield
            with torch.no_grad():
                for write in self._late:
                    write()
        finally:
            self._done = None
            self._late = []

    def left_out(self) -> AbstractContextManager[None]:
        """Return a context for runs of stages other than the batch's microbatches."""
        return patched(self, _done=None)

    def do(self, plan: EventPlan, write: Callable[[], Any]) -> None:
        """Execute a planned write once."""
        assert plan.writes is not None
        if self._done is None or plan.writes in self._done:
            return
        self._done.add(plan.writes)
        if plan.is_late:
            self._late.append(write)
        else:
            write()


class BetweenUnitsReplay(OwnFunctionMode):
    """Counts calls of torch functions between units, and passes some results to a stage.

    Every call is compared with the one in the trace. Active up to the last event that has to be
    matched, and never inside a unit.
    """

    def __init__(
        self,
        plan: StagePlan,
        handle: Callable[[Any, EventPlan], Any],
        write: Callable[[EventPlan, Callable[[], Any]], None],
    ) -> None:
        super().__init__()
        self.plan = plan
        self.events = plan.trace.events
        self.handle = handle
        self.write = write
        self.position = 0
        self.is_on = False

    def start(self) -> None:
        """Intercept calls from here on."""
        self.is_on = True
        self.__enter__()

    def stop(self) -> None:
        """Intercept nothing until ``start``."""
        if self.is_on:
            self.is_on = False
            self.__exit__(None, None, None)

    def pass_unit(self, event: int) -> None:
        """Record a call of a unit.

        Raises:
            DivergenceError: The trace has other calls before it.
        """
        if self.position <= self.plan.last_watched and self.position != event:
            raise DivergenceError(
                explain(self.events, self.position, f"it calls {self.events[event].name!r}")
            )
        self.position = event + 1

    @override
    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        event = self.position
        planned = self.plan.handling.get(event)
        if planned is not None and planned.writes and name_of(func) == self.events[event].name:
            self.position = event + 1
            self.write(planned, partial(func, *args, **(kwargs or {})))
            return None if name_of(func) in {"data.__set__", "__setitem__"} else args[0]
        result = func(*args, **(kwargs or {}))
        return self._follow(name_of(func), result) if is_event(result) else result

    @override
    def call_function(self, name: str, call: Callable[[], Any], arguments: Any) -> Any:
        return self._follow(name, call())

    def _follow(self, name: str, result: Any) -> Any:
        """Compare an event with the plan; return the result for the step."""
        event = self.position
        if event > self.plan.last_watched:
            return result
        expected = self.events[event]
        if expected.is_unit or expected.name != name:
            raise DivergenceError(
                explain(self.events, event, f"it calls {name} ({line_of_step()})")
            )
        self.position = event + 1
        handling = self.plan.handling.get(event)
        return result if handling is None else self.handle(result, handling)


def explain(events: Sequence[TraceEvent], event: int, what: str) -> str:
    """Return a message for a step that differs from its trace."""
    expected = f"{events[event].name} ({events[event].place})" if event < len(events) else "its end"
    return (
        f"the step does other things than for an earlier batch of the same shapes, or when it was "
        f"looked at without data of layers: {what}, where {expected} was expected. Let it depend "
        f"on the batch and on train or eval mode alone, not on what a layer gives, or decide "
        f"inside a layer."
    )


NOT_READY = object()
NOTHING = EventPlan()


class _NextStage(BaseException):
    """Ends the step where the next stage begins; no ``except Exception`` of a user catches it."""


@dataclass(slots=True, eq=False)
class _UnitCall:
    """Handling of one call of a unit by a stage."""

    name: str
    event: int
    handling: EventPlan
    is_own: bool
    """Whether this stage runs it."""
    ends_run: bool
    """Whether the stage's run ends here, because a later stage runs the call."""
    ready: Any = NOT_READY
    """Constant result of another stage's unit, if it has one."""
    numbers: tuple[tuple[int, float], ...] = ()
    """Numbers in its output, by leaf, for which later stages use the traced values."""


class StageRun:
    """One stage of a step, for batches of one signature. Not thread-safe."""

    def __init__(
        self,
        root: Module,
        units: Mapping[str, Module],
        step: str,
        plan: StagePlan,
        boundaries: StageBoundaries,
        writes: ParameterWrites,
    ) -> None:
        """Prepare the stage.

        Args:
            root: The whole model, whose method ``step`` runs.
            units: All units by name.
            step: The name of the method.
            plan: Plan of the stage.
            boundaries: How values are sent from one stage to the next.
            writes: Executes the step's writes to parameters.
        """
        self.boundaries = boundaries
        self.writes = writes
        self.root = root
        self.units = units
        self.step = step
        self.plan = plan
        self.trace = plan.trace
        self.device = next((each.device for each in root.parameters()), torch.device("cpu"))
        self.calls = [self._prepare(*each) for each in self._events_up_to_next_stage()]
        self._forwards = ReplacedForwards(
            units, {name: partial(self._call, name) for name in units}
        )

    def forward(
        self,
        received: Sequence[Tensor],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any] | None = None,
        *,
        seed: int | None = None,
    ) -> Any:
        """Run the stage on one batch.

        Args:
            received: Values of the boundary before this stage, of the shapes and dtypes in
                ``plan.values_in``. Those that need a gradient get ``requires_grad``.
            args: Positional arguments of the step.
            kwargs: Keyword arguments of the step.
            seed: Seed of random numbers: equal on all stages, different for each microbatch.
                torch's generators are restored afterwards; those of numpy and Python are not, see
                :class:`RandomStreams`. None draws from their current states.

        Returns:
            A tuple of tensors for the next stage, of the shapes and dtypes in
            ``plan.values_out``; on the last stage the result of the step.

        Raises:
            DivergenceError: The step calls other units than in its trace, or in another order.
        """
        args, kwargs = own_arguments((args, dict(kwargs or {})), self.trace.written_arguments)
        self.received = list(map(self._prepare_received, range(len(received)), received))
        self.kept = dict(zip(self.plan.received_numbers, self.received, strict=True))
        self.remaining: Iterator[_UnitCall] = iter(self.calls)
        self.is_inside = False
        self.watch = (
            None
            if self.plan.last_watched < 0
            else BetweenUnitsReplay(self.plan, self._handle, self._write)
        )
        self.streams = (
            None
            if seed is None
            else RandomStreams(
                seed,
                self.plan.stage,
                self.device,
                is_mixed=self.trace.draws_random,
                is_mixed_on_host=self.trace.draws_host_random,
            )
        )
        try:
            with (
                self.boundaries.running(),
                distributions_unchecked(),
                self._forwards,
                self.streams or nullcontext(),
            ):
                result = self._run_step(args, kwargs)
            return self._finish(self.boundaries.whole(result))
        except _NextStage:
            return self._sent()
        finally:
            self._forget()

    def _run_step(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        step = getattr(self.root, self.step)
        if self.watch is None:
            return step(*args, **kwargs)
        self.watch.start()
        try:
            return step(*args, **kwargs)
        finally:
            self.watch.stop()

    def _events_up_to_next_stage(self) -> list[tuple[int, int]]:
        """Return the unit calls of the stage's run, each with its stage relative to this one."""
        stages = [each - self.plan.stage for each in self.plan.stage_of_call]
        count = len(stages)
        if self.plan.is_in_order:
            count = next((i + 1 for i, stage in enumerate(stages) if stage > 0), count)
        return list(zip(self.trace.unit_events()[:count], stages[:count], strict=True))

    def _prepare(self, event: int, stage: int) -> _UnitCall:
        handling = self.plan.handling.get(event, NOTHING)
        name, ends_run = self.trace.events[event].name, stage > 0 and self.plan.is_in_order
        call = _UnitCall(name, event, handling, is_own=stage == 0, ends_run=ends_run)
        output = self.trace.outputs[event]
        changes = [leaf for made_at, leaf in self.plan.written_outputs if made_at == event]
        has_arguments = any(isinstance(leaf, Argument) for leaf in output.leaves)
        is_other = not (call.is_own or call.ends_run)
        if is_other and handling is NOTHING and not changes and not has_arguments:
            ready = output.build([self._stand_in(event, i) for i in range(len(output.leaves))])
            call.ready = ready if is_immutable(ready) else NOT_READY
        if call.is_own and self.plan.stage < max(self.plan.stage_of_call):
            call.numbers = tuple(
                (at, leaf)
                for at, leaf in enumerate(output.leaves)
                if isinstance(leaf, (int, float)) and not isinstance(leaf, bool)
            )
        return call

    def _stand_in(self, event: int, leaf: int) -> Any:
        output = self.trace.outputs[event]
        made = output.leaves[leaf]
        if not isinstance(made, TensorSpec):
            return made
        if (event, leaf) in self.plan.written_outputs:
            return made.empty()
        # An unexpected use shows as NaN in the loss.
        stand_in = one_element(made.shape, made.dtype, made.device)
        if output.needs_grad[leaf] and (event, leaf) in self.trace.grad_queries:
            stand_in.requires_grad_()  # code between units reads it, as in VectorQuantize
        return stand_in

    def _prepare_received(self, slot: int, tensor: Tensor) -> Tensor:
        spec = self.plan.values_in[slot]
        if spec.needs_grad and not tensor.requires_grad:
            tensor.requires_grad_()
        # The step changes it in place, which a leaf that needs a gradient does not allow.
        tensor = tensor.clone() if slot in self.plan.copies else tensor
        return self.boundaries.received(tensor, spec)

    def _call(self, name: str, /, *args: Any, **kwargs: Any) -> Any:
        if self.is_inside:
            return self._forwards.own(name)(*args, **kwargs)
        call = next(self.remaining, None)
        if call is None or call.name != name:
            event = len(self.trace.events) if call is None else call.event
            raise DivergenceError(explain(self.trace.events, event, f"it calls {name!r}"))
        if self.watch is None:
            return self._act(call, args, kwargs)
        self.watch.pass_unit(call.event)
        self.watch.stop()
        result = self._act(call, args, kwargs)
        if call.event < self.plan.last_watched:
            self.watch.start()
        return result

    def _act(self, call: _UnitCall, args: tuple[Any, ...], kwargs: Any) -> Any:
        if call.ends_run:
            raise _NextStage
        if not call.is_own:
            return call.ready if call.ready is not NOT_READY else self._skip(call, args, kwargs)
        forward = self._forwards.own(call.name)
        streams = self.streams
        self.is_inside = True
        try:
            if streams is None or streams.goes_on:
                result = forward(*args, **kwargs)
            else:
                with streams.around_unit():
                    result = forward(*args, **kwargs)
        finally:
            self.is_inside = False
        if call.numbers:
            _compare_numbers(call, result)
        return result if call.handling is NOTHING else self._handle(result, call.handling)

    def _skip(self, call: _UnitCall, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        output = self.trace.outputs[call.event]
        given: list[Any] = []
        if any(isinstance(leaf, Argument) for leaf in output.leaves):
            given = take_apart((args, kwargs))[0]
        leaves = [
            given[made.index]
            if isinstance(made, Argument)
            else None
            if leaf in call.handling.receive
            else self._stand_in(call.event, leaf)
            for leaf, made in enumerate(output.leaves)
        ]
        return output.build(self._handle_leaves(leaves, call.handling))

    def _handle(self, result: Any, handling: EventPlan) -> Any:
        """Put received values into a result and keep values that are filled or sent later."""
        leaves, build = take_apart(result)
        made = self._handle_leaves(leaves, handling)
        return build(made) if handling.receive else result

    def _write(self, planned: EventPlan, write: Callable[[], Any]) -> None:
        assert planned.writes is not None
        if not is_absent(self.root.get_parameter(planned.writes[0])):
            self.writes.do(planned, write)

    def _handle_leaves(self, leaves: list[Any], handling: EventPlan) -> list[Any]:
        made = list(leaves)
        for leaf, slot in handling.receive.items():
            made[leaf] = self.received[slot]
        for leaf, number in handling.keep.items():
            self.kept[number] = made[leaf]
        for number, slot in handling.fill:
            self.kept[number].copy_(self.received[slot])
        if handling.ends:
            raise _NextStage
        return made

    def _sent(self) -> tuple[Tensor, ...]:
        pairs = zip(self.plan.sent_numbers, self.plan.values_out, strict=True)
        sent = [self.boundaries.sent(self.kept[number], spec) for number, spec in pairs]
        # A leaf that only passes through needs a node in the graph, as other sent values have.
        return tuple(
            each.view_as(each) if each.requires_grad and each.is_leaf else each for each in sent
        )

    def _finish(self, result: Any) -> Any:
        missing = next(self.remaining, None)
        if missing is not None:
            raise DivergenceError(explain(self.trace.events, missing.event, "it ends"))
        return result

    def _forget(self) -> None:
        """Free all activations at the end of the run."""
        self.received = []
        self.kept = {}
        self.watch = None
        self.streams = None


@dataclass(frozen=True, eq=False)
class Tail:
    """A step that is cut behind its last unit, too, for batches of one signature.

    ``last.forward(received, args, seed=...)`` runs the last stage's units and returns the values
    of ``end.plan.values_in``. ``end.forward(values, args, seed=...)`` runs the step without units,
    with these values in place of their outputs, and returns its result. The values may come from
    several microbatches of the last stage joined to one batch; in grad mode, those that need a
    gradient get one. ``end.plan.parameters`` are the parameters outside of units that it uses.
    """

    last: StageRun
    end: StageRun
    draws_before: bool
    """Whether code between units draws random numbers before ``end`` begins: ``end`` draws others
    if its batch or seed differs from that of ``last``."""


def _compare_numbers(call: _UnitCall, result: Any) -> None:
    """Refuse a number other than the one that later stages have."""
    leaves, _ = take_apart(result)
    for at, known in call.numbers:
        value = leaves[at] if at < len(leaves) else None
        if value != known and not (math.isnan(known) and isinstance(value, float)):
            raise DivergenceError(
                f"{call.name!r} returns {value}, and returned {known} when the step was traced for "
                f"batches of these shapes. Later stages still have that number: return a tensor, "
                f"which is sent to them."
            )
