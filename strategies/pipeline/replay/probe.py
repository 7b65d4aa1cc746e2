"""Runs a step without running its layers, and notes what it does with what they would give."""

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from boltmesh.errors import ConfigError
from boltmesh.strategies.pipeline.replay.changes import StateWatch, outside_of
from boltmesh.strategies.pipeline.replay.fake_unit import FakeCall, run_on_fakes
from boltmesh.strategies.pipeline.replay.glue import GlueWatch
from boltmesh.strategies.pipeline.replay.keeping import Keeping
from boltmesh.strategies.pipeline.replay.randomness import host_random_state
from boltmesh.strategies.pipeline.replay.remembering import key_of, recall, versions
from boltmesh.strategies.pipeline.replay.trace import NO_EVENT, MetricTrace, Trace, UnitOutput
from boltmesh.strategies.pipeline.replay.wrapping import ReplacedForwards
from boltmesh.strategies.random_state import seed_random_state
from boltmesh.strategies.steps.metrics import (
    MetricCall,
    find_metrics,
    metrics_replaced,
)
from boltmesh.strategies.steps.restoring import modules_unchanged, random_state_unchanged
from boltmesh.strategies.steps.stand_ins import answer
from boltmesh.strategies.steps.structure import replace_tensors, take_apart, tensors_in
from boltmesh.strategies.torch_compat import fake_tensors, is_fake, make_fake

LOGGING = ("log", "log_dict")
"""Methods of a LightningModule that hand values out of the step."""


class _Known(BaseException):
    """What was read out of the batch so far belongs to a run that is known in full."""

    def __init__(self, trace: Trace) -> None:
        super().__init__()
        self.trace = trace


def probe(
    root: Module,
    units: Mapping[str, Module],
    step: str,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None = None,
    *,
    seed: int | None = None,
    counts_flops: bool = False,
    notes_kept: bool = False,
    known: Mapping[tuple[Any, ...], Trace] | None = None,
    remembered: dict[Any, UnitOutput] | None = None,
) -> Trace:
    """Return what a step does with one batch, without running any unit and without a trace of it.

    Values that depend on units have shape and type and no data; what is made of the batch and of
    parameters outside of units is computed. Autocast and grad mode are the caller's. Where the step
    looks at data of a unit, it goes on with a guess, twice, and uses of both runs count.

    Args:
        root: The whole model; parameters inside of units may have no values.
        units: What is not run, by name.
        step: The name of the method of ``root``, such as ``training_step``.
        args: What it is called with; the tensors have data.
        kwargs: Also what it is called with.
        seed: What the generators of random numbers start from; as they stand if None.
        counts_flops: Whether to count each unit's floating point operations.
        notes_kept: Whether to note what autograd keeps of each unit; ``torch.func`` fails then.
        known: Earlier traces of batches of the same signature, by what was read out of them. One
            that fits is returned as soon as that is clear.
        remembered: What units gave in earlier probes of batches of the same signature; filled here.

    Raises:
        ConfigError: When a unit cannot be run on tensors without data, or the step does something
            with what units give that other stages could not do.
    """
    counts = {"counts_flops": counts_flops, "notes_kept": notes_kept}
    first = _Probe(root, units, seed=seed, known=known or {}, **counts)
    first.remembered = {} if remembered is None else remembered
    try:
        trace = first.run(step, args, kwargs or {}, answer=False)
        if first.has_recalled:  # nothing known fits: what units leave behind counts as well now
            first = _Probe(root, units, seed=seed, known={}, **counts)
            trace = first.run(step, args, kwargs or {}, answer=False)
        if trace.readings:
            second = _Probe(root, units, seed=seed, known={})
            _merge(trace, second.run(step, args, kwargs or {}, answer=True))
        if remembered is not None:
            remembered.update(first.learned)
    except _Known as found:
        return found.trace
    return trace


class _Probe:
    """One run of a step without its layers."""

    def __init__(
        self,
        root: Module,
        units: Mapping[str, Module],
        *,
        seed: int | None,
        known: Mapping[tuple[Any, ...], Trace],
        counts_flops: bool = False,
        notes_kept: bool = False,
    ) -> None:
        self.root = root
        self.units = units
        self.seed = seed
        self.counts_flops = counts_flops
        self.known = known
        self.remembered: dict[Any, UnitOutput] = {}
        self.learned: dict[Any, UnitOutput] = {}
        self.has_recalled = False
        self.has_run: set[str] = set()
        self.is_inside = False
        self.host_random: tuple[Any, Any] | None = None
        """Where numpy and Python stood when the first unit was called."""
        self.trace = Trace()
        self.mode = fake_tensors()
        self.keeping = Keeping(root, self.trace, self.mode) if notes_kept else None

    def run(
        self, step: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, answer: bool
    ) -> Trace:
        device = next((each.device for each in self.root.parameters()), torch.device("cpu"))
        self.glue = GlueWatch(
            self.root, self.trace, self.mode, answer=answer, after_read=self._stop_if_known
        )
        forwards = {
            name: partial(self._call, name, unit.forward) for name, unit in self.units.items()
        }
        with ExitStack() as stack:
            around = outside_of(self.root, self.units.values())
            stack.enter_context(modules_unchanged(around.values()))
            stack.enter_context(random_state_unchanged(device))
            stack.enter_context(without_weight_cache())
            stack.enter_context(warnings.catch_warnings())
            # Torch looks at .grad when it describes a tensor that meets one without data.
            warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")
            stack.enter_context(ReplacedForwards(self.units, forwards))
            self.stack = stack.enter_context(ExitStack())
            metrics = find_metrics(self.root)
            stack.enter_context(metrics_replaced(metrics, self._call_metric))
            for name in LOGGING:
                if hasattr(self.root, name):
                    vars(self.root)[name] = self._hand_out
            if self.seed is not None:
                seed_random_state(self.seed)
            state = StateWatch(around)
            before = host_random_state()
            self.glue.follow((args, kwargs))
            if self.keeping is not None:
                stack.enter_context(self.keeping.watching())
            stack.enter_context(self.glue)
            returned = getattr(self.root, step)(*args, **kwargs)
            self._hand_out(returned)
            if self.host_random is not None:
                self.trace.draws_host_random = host_random_state() != self.host_random
            if host_random_state() != before:
                self.trace.draws.append(NO_EVENT)
            with self.glue.paused():
                self.trace.changed_attributes = state.changed_attributes()
                self.trace.changed_buffers = {
                    name: self.glue.last_change(each)
                    for name, each in state.changed_buffers().items()
                }
        self.glue.finish()
        return self.trace

    def _call(self, name: str, forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        if self.is_inside:
            return forward(*args, **kwargs)
        if self.host_random is None:
            self.host_random = host_random_state()
        with self.glue.paused():
            self.is_inside = True
            try:
                arguments = self.glue.begin_unit(name, (args, kwargs))
                if self.keeping is not None:
                    self.keeping.begin_unit(name, arguments)
                called = self._run_unit(name, forward, arguments)
            finally:
                self.is_inside = False
            for each in called.answers:
                self.glue.note_answer(each)
            self.glue.end_unit(called.result, called.output)
            if self.counts_flops:
                flops = self.trace.flops
                flops[name] = flops.get(name, 0) + called.flops
            return called.result

    def _run_unit(self, name: str, forward: Callable[..., Any], arguments: Any) -> FakeCall:
        key = key_of(name, arguments)
        if key in self.remembered and not self.counts_flops:
            output = self.remembered[key]
            self.has_recalled = True
            return FakeCall(recall(output, arguments, self.mode), output, [], 0)
        if name not in self.has_run:
            # Until the end: the step may look at what a unit leaves on itself.
            self.has_run.add(name)
            self.stack.enter_context(modules_unchanged(self.units[name].modules()))
        before = versions(arguments)
        called = run_on_fakes(
            name, self.units[name], forward, self.mode, arguments, counts_flops=self.counts_flops
        )
        if key is not None and not called.answers and versions(arguments) == before:
            self.learned[key] = called.output
        return called

    def _hand_out(self, *values: Any, **options: Any) -> None:
        """Note that values leave the step: the last stage has to have them at its end."""
        with self.glue.paused():
            self.glue.keep_to_end(tensors_in(list(values) + list(options.values())))

    def _call_metric(self, call: MetricCall) -> Any:
        """Note that a metric takes values out of the step, and guess what it gives for them."""
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
        with self.glue.paused():
            self.glue.keep_to_end(given)
            args, kwargs = replace_tensors((call.args, call.kwargs), _with_data)
            made = answer(call.metric, call.method, args, kwargs)
            if call.method != "compute" and not any(map(is_fake, given)):
                return made
            made = replace_tensors(made, lambda each: make_fake(each.detach(), self.mode))
            self.glue.add_foreign(tensors_in(made), f"what the metric {call.name!r} gave")
            return made

    def _stop_if_known(self) -> None:
        trace = self.known.get(tuple(self.trace.answers))
        if trace is not None:
            raise _Known(trace)


def _merge(trace: Trace, other: Trace) -> None:
    """Add the uses that a step has when what it read of its layers was something else.

    Raises:
        ConfigError: When it then calls other units, or in another order.
    """
    called, otherwise = ([run.events[i].name for i in run.unit_events()] for run in (trace, other))
    if called != otherwise:
        reading = trace.readings[0]
        raise ConfigError(
            f"{reading.name}() of {reading.origin} ({reading.place}) decides which layers the step "
            f"runs, and other stages do not see it. Decide inside a layer, or by the batch alone."
        )
    trace.draws_host_random |= other.draws_host_random
    by_making = {(each.made_at, each.leaf): each for each in other.values}
    end = len(trace.events)
    for value in trace.values:
        twin = by_making.get((value.made_at, value.leaf))
        first_reading = trace.readings[0].event
        if twin is not None and value.made_at < first_reading:
            late = [use for use in twin.uses if use >= first_reading]
            value.uses += [end] if late else []


def _with_data(tensor: Tensor) -> Tensor:
    return (
        torch.zeros(tensor.shape, dtype=tensor.dtype, device=tensor.device)
        if is_fake(tensor)
        else tensor
    )


@contextmanager
def without_weight_cache() -> Iterator[None]:
    """Keep casts of weights without values out of the cache that real steps read."""
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)
