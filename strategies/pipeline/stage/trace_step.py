"""Traces a step without running its layers.

The trace has the step's use of layers' outputs, and its changes of buffers and attributes of
modules outside of units. Outputs of units are found once: ``unit_outputs.py``.
"""

import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from boltmesh.errors import BoltMeshError, ConfigError, UnsupportedError
from boltmesh.strategies.dry_run.metrics import MetricCall, answer, find_metrics, metrics_replaced
from boltmesh.strategies.dry_run.no_side_effects import modules_unchanged
from boltmesh.strategies.dry_run.step import rare_garbage_collection
from boltmesh.strategies.patch import patched
from boltmesh.strategies.pipeline.stage.fake_unit import FakeCall, holds_values, run_on_fakes
from boltmesh.strategies.pipeline.stage.rng import host_random_state
from boltmesh.strategies.pipeline.stage.trace import (
    NO_EVENT,
    MetricTrace,
    Place,
    SavedTensorWatch,
    StateWatch,
    StepTrace,
    TensorSpec,
    UnitOutput,
    version_of,
)
from boltmesh.strategies.pipeline.stage.trace_mode import BetweenUnitsTracer
from boltmesh.strategies.pipeline.stage.unit_outputs import KnownUnits, place_of, recall
from boltmesh.strategies.pipeline.stage.units import ReplacedForwards, outside_of, with_records
from boltmesh.strategies.pytree import own_arguments, replace_tensors, take_apart, tensors_in
from boltmesh.strategies.random_state import (
    generator_states,
    held_generators,
    random_state_unchanged,
    seed_random_state,
)
from boltmesh.strategies.torch_compat.modules import (
    distributions_unchecked,
    without_nested_batches,
)
from boltmesh.strategies.torch_compat.tensors import (
    fake_tensors,
    is_fake,
    make_fake,
)


def _called(root: Module, step: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    try:
        return getattr(root, step)(*args, **kwargs)
    except AttributeError as error:
        if not str(error).startswith(f"{type(root).__name__!r} object has no attribute"):
            raise
        raise ConfigError(
            f"{error}. {step} is looked at before the hooks of training run, to find out how the "
            f"model can be divided. Set the attribute in __init__ or setup."
        ) from error


class _KnownReads(BaseException):
    """The values read from the batch so far are those of a known trace."""

    def __init__(self, trace: StepTrace) -> None:
        super().__init__()
        self.trace = trace


@rare_garbage_collection()
def trace_step(
    root: Module,
    units: Mapping[str, Module],
    step: str,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None = None,
    *,
    seed: int | None = None,
    counts_flops: bool = False,
    notes_kept: bool = False,
    known: Mapping[tuple[Any, ...], StepTrace] | None = None,
    remembered: Mapping[Place, UnitOutput] | None = None,
) -> StepTrace:
    """Trace a step on one batch, without running any unit and without side effects.

    Values that depend on units are fake tensors; values of the batch and of parameters outside of
    units are computed. Autocast and grad mode are the caller's. If the step reads data of a unit,
    it continues with a guess, twice, and uses in both runs count.

    Args:
        root: The whole model; parameters inside of units may have no values.
        units: The units, which are not run, by name.
        step: The name of the method of ``root``, such as ``training_step``.
        args: Positional arguments of the step; tensors of any shape, with data.
        kwargs: Keyword arguments of the step.
        seed: Seed of the random generators; None keeps their states.
        counts_flops: Whether to count each unit's floating point operations.
        notes_kept: Whether to record the memory that autograd keeps of each unit; ``torch.func``
            fails then.
        known: Earlier traces of batches of the same signature, by the values read from them. One
            that fits is returned as soon as that is known.
        remembered: Outputs of units in earlier traces of batches of the same signature.

    Raises:
        ConfigError: A unit cannot be run on fake tensors, or the step uses outputs of units in a
            way that is not possible on other stages.
    """
    counts = {"counts_flops": counts_flops, "notes_kept": notes_kept}
    tried: list[_StepTracer] = []

    def run(*, answer: bool, **options: Any) -> StepTrace:
        tried.append(_StepTracer(root, units, seed=seed, **options))
        return tried[-1].run(step, args, kwargs or {}, answer=answer)

    def run_kinds(*, answer: bool = False, **options: Any) -> StepTrace:
        """Run the first unit of each kind, or all units if the step depends on the difference."""
        try:
            trace = run(answer=answer, repeats=True, remembered=remembered, **options)
        except Exception:
            if not tried[-1].has_repeated:
                raise
        else:
            if not (tried[-1].has_repeated and tried[-1].between.has_unreturned):
                return trace
        return run(answer=answer, repeats=False, **options)

    def is_of_guess(error: Exception) -> bool:  # as in ``if loss.isnan(): raise``
        return not isinstance(error, BoltMeshError) and bool(tried[-1].trace.readings)

    cut: StepTrace | None = None
    try:
        for answer in (False, True):
            try:
                trace = run_kinds(answer=answer, known=known, **counts)
                break
            except Exception as error:
                if answer or not is_of_guess(error):
                    raise
                cut = tried[-1].trace
        if cut is not None:
            _merge(trace, cut, is_cut=True)
        elif trace.readings:
            try:
                _merge(trace, run_kinds(answer=True))
            except Exception as error:
                if not is_of_guess(error):
                    raise
    except _KnownReads as known_reads:
        return known_reads.trace
    if left := next(each.left for each in tried if each.trace is trace):
        again = _StepTracer(root, units, seed=seed, repeats=True)
        again.carried = left
        with suppress(Exception):  # with a state the step may do what no trace can follow
            again.run(step, args, kwargs or {}, answer=False)
        _refuse_carried(again, step)
    return trace


def _refuse_carried(tracer: "_StepTracer", step: str) -> None:
    """Refuse a step that passes a state of the batch before to a layer."""
    if tracer.carried_to is not None:
        kept = ", ".join(f"{module}.{name}".lstrip(".") for module, name in tracer.carried)
        raise UnsupportedError(
            f"{step} gives {tracer.carried_to!r} a state of the batch before, kept in {kept!r}. A "
            f"pipeline cuts batches into microbatches, and an earlier stage does not have what a "
            f"later one keeps. Begin each batch with a new state, or use bolt_zero1 to 3 or "
            f"bolt_tensor."
        )


MOST_CALLS = 64
"""Limit of calls of a unit in a step that ends by values, as ``generate`` does, on a guess."""


class _StepTracer:
    """Traces one run of a step without its layers."""

    def __init__(
        self,
        root: Module,
        units: Mapping[str, Module],
        *,
        seed: int | None,
        repeats: bool,
        known: Mapping[tuple[Any, ...], StepTrace] | None = None,
        remembered: Mapping[Place, UnitOutput] | None = None,
        counts_flops: bool = False,
        notes_kept: bool = False,
    ) -> None:
        self.root = root
        self.units = units
        self.seed = seed
        self.counts_flops = counts_flops
        self.known = known or {}
        self.remembered = remembered or {}
        self.repeats = repeats
        self.kinds: KnownUnits | None = None
        """Outputs of units, for others of their kind."""
        self.has_recalled = False
        self.calls: Counter[str] = Counter()
        self.is_inside = False
        self.host_random: tuple[Any, Any] | None = None
        """States of the generators of numpy and Python at the first call of a unit."""
        self.left: dict[tuple[str, str], Any] = {}
        """Values of units that the step leaves in attributes, by module and name."""
        self.carried: dict[tuple[str, str], Any] = {}
        """Values that the step before has left, by module and name."""
        self.carried_to: str | None = None
        """The first unit that is called with values of ``carried``."""
        self.trace = StepTrace()
        self.mode = fake_tensors()
        self.keeping = SavedTensorWatch(root, self.trace, self.mode) if notes_kept else None

    def run(
        self, step: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, answer: bool
    ) -> StepTrace:
        device = next((each.device for each in self.root.parameters()), torch.device("cpu"))
        self.between = BetweenUnitsTracer(
            self.root, self.trace, self.mode, answer=answer, after_read=self._stop_if_known
        )
        forwards = {
            name: partial(self._call, name, with_records(unit.forward))
            for name, unit in self.units.items()
        }
        with ExitStack() as stack:
            around = outside_of(self.root, self.units.values())
            # To the end: the step may read what units set on themselves, and set it, too.
            stack.enter_context(modules_unchanged(self.root.modules()))
            stack.enter_context(random_state_unchanged(device))
            stack.enter_context(without_weight_cache())
            stack.enter_context(distributions_unchecked())
            stack.enter_context(without_nested_batches())
            stack.enter_context(warnings.catch_warnings())
            # torch reads .grad when it describes a tensor beside a fake one.
            warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")
            self.replaced = stack.enter_context(ReplacedForwards(self.units, forwards))
            metrics = find_metrics(self.root)
            stack.enter_context(metrics_replaced(metrics, self._call_metric))
            hand_out = self._hand_out
            stack.enter_context(patched(self.root, log=hand_out, log_dict=hand_out))
            if self.seed is not None:
                seed_random_state(self.seed, device)
            state = StateWatch(around)
            held = held_generators(around.values())
            args, kwargs = own_arguments((args, dict(kwargs)))
            given = [(each, version_of(each)) for each in take_apart((args, kwargs))[0]]
            before = host_random_state(), generator_states(held)
            self.between.follow(self._set_carried(around) if self.carried else (args, kwargs))
            if self.keeping is not None:
                stack.enter_context(self.keeping.watching())
            stack.enter_context(self.between)
            returned = _called(self.root, step, args, kwargs)
            self._hand_out(returned)
            if self.host_random is not None:
                self.trace.draws_host_random = host_random_state() != self.host_random
            if (host_random_state(), generator_states(held)) != before:
                self.trace.draws.append(NO_EVENT)
            self.trace.written_arguments = frozenset(
                at for at, (each, version) in enumerate(given) if version_of(each) != version
            )
            with self.between.paused():
                self.trace.changed_attributes = state.changed_attributes()
                attributes = {
                    (module, name): vars(around[module]).get(name)
                    for module, name in self.trace.changed_attributes
                }
                self.left = {
                    key: value
                    for key, value in attributes.items()
                    if any(map(is_fake, tensors_in(value)))
                }
                self.trace.attributes_of_units = frozenset(self.left)
                self.trace.turned_attributes = state.turned_attributes() - self.left.keys()
                buffers = state.changed_buffers(self.between.is_written)
                for name, each in buffers.items():
                    event = self.trace.changed_buffers[name] = self.between.last_change(each)
                    if event != NO_EVENT and (shape := state.shape_before(name)) != each.shape:
                        raise UnsupportedError(
                            f"The step sets the buffer {name!r}, of shape {tuple(shape)}, to a "
                            f"value of a layer of shape {tuple(each.shape)}, and other stages of "
                            f"the pipeline would not know that shape. Give the buffer its shape in "
                            f"__init__, or make it a plain attribute that each step sets first."
                        )
        self.between.finish()
        if self.between.has_unreturned:
            self.trace.learned.clear()  # units have effects that an output does not have
        return self.trace

    def _set_carried(self, modules: Mapping[str, Module]) -> list[Tensor]:
        """Set the attributes that a step before has left; return their tensors."""

        def make(tensor: Tensor) -> Tensor:
            with self.mode:
                made = TensorSpec.of(tensor).empty()
            return made.requires_grad_(tensor.requires_grad)

        for (module, name), value in self.carried.items():
            vars(modules[module])[name] = replace_tensors(value, make)
        return tensors_in([vars(modules[module])[name] for module, name in self.carried])

    def _call(self, name: str, forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        if self.is_inside:
            return forward(*args, **kwargs)
        self.calls[name] += 1
        if min(self.calls[name], len(self.trace.readings)) > MOST_CALLS:
            raise ConfigError(
                f"the step calls {name!r} until a value of the model ends it, {MOST_CALLS} times "
                f"at least, and stages hand a batch on once. Call it a fixed number of times."
            )
        if self.host_random is None:
            self.host_random = host_random_state()
        with self.between.paused():
            self.is_inside = True
            try:
                arguments = self.between.begin_unit(name, (args, kwargs))
                if self.carried and self.between.follows_batch(tensors_in(arguments)):
                    self.carried_to = self.carried_to or name
                if self.keeping is not None:
                    self.keeping.begin_unit(name, arguments)
                called = self._run_unit(name, forward, arguments)
            finally:
                self.is_inside = False
            self.trace.sees_one_value |= called.output.sees_one_value
            for each in called.answers:
                self.between.note_answer(each)
            unit = self.units[name]
            written = [unit.get_buffer(each) for each in called.output.written_buffers]
            self.between.end_unit(called.result, called.output, called.borrowed, written)
            if self.counts_flops:
                flops = self.trace.flops
                flops[name] = flops.get(name, 0) + called.flops
            return called.result

    def _run_unit(self, name: str, forward: Callable[..., Any], arguments: Any) -> FakeCall:
        unit, answers = self.units[name], self.trace.answers
        place = place_of(name, unit, arguments, call=self.calls[name], answers=answers)
        output = None if place is None or self.counts_flops else self.remembered.get(place)
        if output is not None:
            self.has_recalled = True
            return FakeCall(recall(output, arguments, self.mode), output, [], 0)
        if self.repeats and self.kinds is None:
            self.kinds = KnownUnits(self.units, self.replaced.on_instances())
        first = None
        if self.kinds is not None and not holds_values(unit):
            first = self.kinds.find(name, place)
        if first is not None:
            return self._repeat(first, place, arguments)
        saved = None if self.keeping is None else self.keeping.saved()
        kinds = self.kinds
        watching = nullcontext() if kinds is None else kinds.watched(name, place, arguments)
        with watching as calls:
            called = run_on_fakes(
                name,
                self.units[name],
                forward,
                self.mode,
                arguments,
                counts_flops=self.counts_flops,
                note=self.between.in_units.note,
            )
            if calls is not None:
                calls.append(called)
        if self.keeping is not None and saved is not None:
            called.saved = self.keeping.saved_since(saved, called.result)
        if place is not None and calls and not called.borrowed:  # without effects
            self.trace.learned[place] = called.output
        return called

    def _repeat(self, first: FakeCall, place: Place | None, arguments: Any) -> FakeCall:
        """Return the output of another unit of the same kind, for these arguments."""
        result = recall(first.output, arguments, self.mode)
        if self.keeping is not None:
            self.keeping.repeat(first.saved, result)
        if place is not None and not first.borrowed:
            self.trace.learned[place] = first.output
        return replace(first, result=result)

    @property
    def has_repeated(self) -> bool:
        """Whether the output of a unit was taken from an earlier call or another of its kind."""
        return self.has_recalled or (self.kinds is not None and self.kinds.has_repeated)

    def _hand_out(self, *values: Any, **options: Any) -> None:
        """Record values that leave the step, which the last stage needs at its end.

        Raises:
            UnsupportedError: A layer logs a value.
        """
        if self.is_inside:
            raise UnsupportedError(
                f"A layer logs {values[0]!r}, and other ranks than the one of that layer would not "
                f"have it. Return it from the layer, and log it in the step."
            )
        with self.between.paused():
            self.between.keep_to_end(tensors_in(list(values) + list(options.values())))

    def _call_metric(self, call: MetricCall) -> Any:
        """Record a call of a metric, and return a guess of its result."""
        if self.is_inside:
            raise ConfigError(
                f"a layer calls the metric {call.name!r}, and other ranks than the one of that "
                f"layer would not count. Return what it counts from the layer, and call it in "
                f"the step."
            )
        leaves, _ = take_apart((call.args, call.kwargs))
        shapes = [tuple(each.shape) if isinstance(each, Tensor) else None for each in leaves]
        self.trace.metrics.append(MetricTrace(call.name, call.method, tuple(shapes)))
        given = [each for each in leaves if isinstance(each, Tensor)]
        with self.between.paused():
            self.between.keep_to_end(given)
            args, kwargs = replace_tensors((call.args, call.kwargs), _with_data)
            made = answer(call.metric, call.method, args, kwargs)
            if call.method != "compute" and not any(map(is_fake, given)):
                return made
            made = replace_tensors(made, lambda each: make_fake(each.detach(), self.mode))
            self.between.add_of_metric(tensors_in(made), f"what the metric {call.name!r} gave")
            return made

    def _stop_if_known(self) -> None:
        trace = self.known.get(tuple(self.trace.answers))
        if trace is not None:
            raise _KnownReads(trace)


def _merge(trace: StepTrace, other: StepTrace, *, is_cut: bool = False) -> None:
    """Add the uses of values in a second trace with the other guess.

    Raises:
        ConfigError: It calls other units, or in another order.
    """
    called, otherwise = ([run.events[i].name for i in run.unit_events()] for run in (trace, other))
    if (called[: len(otherwise)] if is_cut else called) != otherwise:
        reading = trace.readings[0]
        raise ConfigError(
            f"{reading.name}() of {reading.origin} ({reading.place}) decides which layers the step "
            f"runs, and other stages do not see it. Decide inside a layer, or by the batch alone."
        )
    trace.draws_host_random |= other.draws_host_random
    trace.written_arguments |= other.written_arguments
    trace.grad_queries |= other.grad_queries
    by_making = {(each.made_at, each.leaf): each for each in other.values}
    for value in trace.values:
        twin = by_making.get((value.made_at, value.leaf))
        first_reading = trace.readings[0].event
        if twin is not None and value.made_at < first_reading:
            late = [use for use in twin.uses if use >= first_reading]
            value.uses += [len(trace.events)] if late else []


def _with_data(tensor: Tensor) -> Tensor:
    if not is_fake(tensor):
        return tensor
    return torch.zeros(tensor.shape, dtype=tensor.dtype, device=tensor.device)


@contextmanager
def without_weight_cache() -> Iterator[None]:
    """Keep casts of fake weights out of autocast's cache, which real steps use."""
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)
