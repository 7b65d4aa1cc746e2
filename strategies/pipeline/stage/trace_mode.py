"""Traces the code between units: the values that it makes, uses and changes."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from torch import Tensor
from torch.nn import Module, Parameter
from typing_extensions import override

from boltmesh.errors import ConfigError, UnsupportedError
from boltmesh.strategies.dry_run.no_side_effects import name_of, writes_to_first
from boltmesh.strategies.dry_run.unsupported import refuse_collective, refuse_derivative
from boltmesh.strategies.pipeline.stage.data_dependent_ops import (
    DERIVATIVES,
    GRADIENT_HOOKS,
    RANDOM,
    READS,
    SELECTIONS,
    SIZES_ALONE,
    answer_of,
    counts_of_bins,
    draws,
    guess,
    has_mask,
    is_event,
    norm_of_one_value,
    resolve_masks,
    scores_of_ctc,
    sees_one_value,
    select,
)
from boltmesh.strategies.pipeline.stage.fake_unit import TensorsOfUnits
from boltmesh.strategies.pipeline.stage.trace import (
    NO_EVENT,
    StepTrace,
    TensorSpec,
    TraceEvent,
    UnitOutput,
    Value,
    ValueRead,
    holder_of,
    line_of_step,
    version_of,
    write_refused,
)
from boltmesh.strategies.pipeline.stage.units import AbsentError, is_absent
from boltmesh.strategies.pytree import replace_tensors, take_apart, tensors_in
from boltmesh.strategies.torch_compat.autograd import OwnFunctionMode
from boltmesh.strategies.torch_compat.tensors import (
    NEEDS_DATA,
    FakeTensorMode,
    count_write,
    is_fake,
    local_tensor,
    make_fake,
    storage_key,
    under_transforms,
)


class BetweenUnitsTracer(OwnFunctionMode):
    """Records in a trace what torch functions do with values of units.

    Values of units are fake tensors; all others have data. A tensor with data into which the step
    writes a value of a unit counts as a value of that unit from then on.
    """

    def __init__(
        self,
        root: Module,
        trace: StepTrace,
        mode: FakeTensorMode,
        *,
        answer: bool,
        after_read: Callable[[], None],
    ) -> None:
        super().__init__()
        self.root, self.trace, self.mode = root, trace, mode
        self.answer, self.after_read = answer, after_read
        named = list(root.named_parameters())
        self.from_parameters = {id(parameter): frozenset({name}) for name, parameter in named}
        self.parameter_memory = {
            storage_key(local_tensor(parameter)): name for name, parameter in named
        }
        self.stale: dict[int, str] = {}
        """Name of the parameter, by tensors computed from it before the step wrote to it."""
        self.values: dict[int, Value] = {}
        self.values_of_storage: dict[int, list[tuple[Tensor, Value]]] = {}
        self.made: dict[int, tuple[int, int]] = {}
        self.twins: dict[int, Tensor] = {}
        self.tainted: set[int] = set()
        self.written_by_units: dict[int, list[int]] = {}  # buffers, by memory
        self.data_writes: dict[int, int] = {}
        """The last event that wrote into a storage, with any value, by storage."""
        self.storage_behind: dict[int, int] = {}
        """The storage with data that a storage without data represents."""
        self.from_batch: set[int] = set()
        """Storages of values computed from the batch."""
        self.from_sizes: set[int] = set()
        """Storages whose contents follow from the sizes of the batch, such as positions."""
        self.kept: list[Tensor] = []
        """All tensors seen, so that addresses stay unique."""
        self.to_end: list[Value] = []
        self.in_units = TensorsOfUnits(lambda tensor: id(tensor) in self.values)
        self.has_unreturned = False
        """Whether a value came from a unit other than in its result, or into one."""

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Return a context without tracing."""
        self.__exit__(None, None, None)
        try:
            yield
        finally:
            self.__enter__()

    @override
    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        args, kwargs = self._with_twins((args, kwargs or {}))
        refuse_collective(func, (*args, *kwargs.values()), f"the step ({line_of_step()})")
        name = name_of(func)
        given = tensors_in((args, kwargs))
        has_fakes = any(map(is_fake, given))
        if not has_fakes and any(is_fake(under_transforms(tensor)) for tensor in given):
            raise ConfigError(
                f"{name} at {line_of_step()} is called within torch.vmap or another transform of "
                f"torch.func, on the output of a layer, which later stages could not be given. Do "
                f"it inside a layer, or write it without the transform."
            )
        if name in READS:
            return self._read(name, func, args, kwargs, given)
        if name == "requires_grad.__get__" and (asked := self.values.get(id(args[0]))):
            self.trace.grad_queries.add((asked.made_at, asked.leaf))
        if name == "__format__" and has_fakes:
            return "0"  # printed, not decided by
        if name in DERIVATIVES and has_fakes:
            self._refuse_through_units(args, kwargs)
        if name in GRADIENT_HOOKS and has_fakes:
            raise UnsupportedError(
                f"The step ({line_of_step()}) calls {name} of what layers give, and several stages "
                f"of a pipeline run the code between two layers: each would change the gradient. "
                f"Do it inside of a layer, or train with bolt_ddp, bolt_zero3 or bolt_tensor."
            )
        if args and writes_to_first(name) and (parameter := self._parameter_behind(args[0])):
            return self._note_parameter_write(name, parameter, args[0], given)
        before = [(tensor, version_of(tensor)) for tensor in given]
        result = self._execute(name, func, args, kwargs, has_fakes=has_fakes)
        self._refuse_writes(tensor for tensor, version in before if version_of(tensor) != version)
        if is_event(result):
            parameters = self._parameters_of(given)
            used = parameters if has_fakes else frozenset()
            index = self._add(TraceEvent(name, False, used, line_of_step()), given, before)
            self._note_results(index, take_apart(result)[0], name, given, parameters)
            if self.trace.outputs and RANDOM.match(name):
                self.trace.draws_random = True
            if draws(name, args, kwargs):
                self.trace.draws.append(index)
        return result

    @override
    def call_function(self, name: str, call: Callable[[], Any], arguments: Any) -> Any:
        """Record a call of a user's function: its results differ from those in its forward."""
        begun, given = len(self.trace.events), tensors_in(arguments)
        result = call()
        parameters = self._parameters_of(given)
        used = parameters if any(map(is_fake, given)) else frozenset()
        index = self._add(TraceEvent(name, False, used, line_of_step()), given, [])
        made = tensors_in(result)
        if any(tensor.requires_grad for tensor in made):
            self.trace.functions.append((begun, index))
        for key in {id(tensor) for tensor in made} - {id(tensor) for tensor in given}:
            self.made.pop(key, None)
            self.values.pop(key, None)
        self._note_results(index, take_apart(result)[0], name, given, parameters)
        return result

    def follow(self, batch: Any) -> None:
        """Record tensors computed from those of the batch from now on."""
        self.kept += tensors_in(batch)
        self.from_batch.update(map(storage_key, tensors_in(batch)))

    def begin_unit(self, name: str, arguments: Any) -> Any:
        """Record the beginning of a unit's call; return the arguments for the unit."""
        arguments = self._with_twins(arguments)
        given = tensors_in(arguments)
        for tensor in given:
            if is_fake(tensor):
                self._value_of(tensor)  # the unit may have left it behind, and does so again
        self.unit_before = [(tensor, version_of(tensor)) for tensor in given]
        self.in_units.begin(len(self.trace.events), given)
        self.unit_event = TraceEvent(name, True, self._parameters_of(given), line_of_step())
        return arguments

    def end_unit(
        self, result: Any, output: UnitOutput, borrowed: list[Parameter], written: list[Tensor]
    ) -> None:
        """Record a unit's result, parameters of others that it used, and tensors that it wrote."""
        found = self.in_units.found_for(self.unit_event.name, tensors_in(result))
        given = [*(tensor for tensor, _ in self.unit_before), *found]
        self.has_unreturned |= bool(found)
        event = self.unit_event
        event = replace(event, parameters=event.parameters | self._parameters_of([*borrowed]))
        index = self._add(event, given, self.unit_before)
        self.trace.outputs[index] = output
        origin = f"the output of {event.name!r}"
        self._note_results(index, take_apart(result)[0], origin, given, frozenset())
        for memory in map(storage_key, written):
            self.tainted.add(memory)  # what reads it from now on has a value of the unit
            self.written_by_units.setdefault(memory, []).append(index)
            if memory in self.values_of_storage:
                self._note_write(index, memory)

    def note_answer(self, answer: Any) -> None:
        """Record a value read from the batch."""
        self.trace.answers.append(answer)
        self.after_read()

    def add_of_metric(self, tensors: list[Tensor], origin: str) -> None:
        """Record fake tensors that a metric computed from values of units."""
        for number, tensor in enumerate(tensors):
            self.kept.append(tensor)
            made_at = len(self.trace.events)
            self.made[id(tensor)] = (made_at, number)
            storage = self._storage_of(tensor)
            value = Value(made_at, number, origin, TensorSpec.of(tensor), storage, True, True)
            value.needs_grad.append((NO_EVENT, tensor.requires_grad))
            self._keep_value(tensor, value)

    def keep_to_end(self, tensors: list[Tensor]) -> None:
        """Record tensors that the step returns or logs."""
        current = [self.twins.get(id(tensor), tensor) for tensor in tensors]
        self.to_end += [self._value_of(tensor) for tensor in current if is_fake(tensor)]
        self.trace.parameters_out |= self._parameters_of(current)

    def last_change(self, tensor: Tensor) -> int:
        """Return the last event that put a unit's value, or one from behind a unit, into a tensor.

        NO_EVENT if none did: every stage runs the code before all units.
        """
        made_at = self.values[id(tensor)].made_at if id(tensor) in self.values else NO_EVENT
        writes = self.trace.writes.get(self._storage_of(tensor), [])
        other = self.made.get(id(tensor), (NO_EVENT, 0))[0]
        other = max(other, self.data_writes.get(storage_key(tensor), NO_EVENT))
        is_behind = other > next(iter(self.trace.outputs), len(self.trace.events))
        return max(made_at, *writes[-1:], other if is_behind else NO_EVENT)

    def is_written(self, tensor: Tensor) -> bool:
        """Whether the step put a unit's value into a tensor with data, in any way."""
        return storage_key(tensor) in self.tainted

    def finish(self) -> None:
        """Record the end of the step."""
        for value in self.to_end:
            value.uses.append(len(self.trace.events))
        for value in self.trace.values:
            # Numbers that Python reads from a batch may be used anywhere.
            value.follows_batch = value.storage in self.from_batch or bool(self.trace.answers)

    def _execute(
        self, name: str, func: Any, args: Any, kwargs: dict[str, Any], *, has_fakes: bool
    ) -> Any:
        if name == "data.__set__" and has_fakes and not is_fake(args[0]):
            return self._set_data(*args)
        if has_fakes and sees_one_value(func, args, kwargs):
            self.trace.sees_one_value = True
            return norm_of_one_value(func, args, kwargs)
        selects = name in SELECTIONS and (name != "__getitem__" or has_mask(args[1]))
        if not selects:
            try:
                return func(*args, **kwargs)
            except NEEDS_DATA as error:
                if name == "ctc_loss":
                    return scores_of_ctc(args, kwargs)
                if name == "bincount" and (bins := counts_of_bins(args, kwargs)) is not None:
                    return bins
                origin = next(
                    self._value_of(e).origin for e in tensors_in((args, kwargs)) if is_fake(e)
                )
                raise ConfigError(
                    f"{name} at {line_of_step()} makes something of {origin} whose shape depends "
                    f"on data, and later stages have to know it beforehand. Do it inside a layer, "
                    f"together with what uses it."
                ) from error
        if not has_fakes:
            result = func(*args, **kwargs)
            if not self._follows_sizes(tensors_in((args, kwargs))):
                self.note_answer(tuple(tuple(tensor.shape) for tensor in tensors_in(result)))
            return result
        if name == "__getitem__":
            args = resolve_masks(args, lambda value: not is_fake(value))
            indices = [tensor for tensor in tensors_in(args[1]) if not is_fake(tensor)]
            self.note_answer(tuple(tuple(tensor.shape) for tensor in indices))
        try:
            return func(*args, **kwargs)
        except NEEDS_DATA:
            self._note_reading(name, tensors_in((args, kwargs)))
            return select(name, args, kwargs, answer=self.answer)

    def _refuse_through_units(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Refuse derivatives by inputs of units: a stage has only a part of their graph."""
        by = tensors_in(args[1] if len(args) > 1 else kwargs.get("inputs"))
        last = self.trace.unit_events()[-1]
        first_uses = [
            min(self._value_of(tensor).uses, default=last + 1)
            if is_fake(tensor)
            else self.made.get(id(tensor), (NO_EVENT, 0))[0]  # whatever uses it comes later
            for tensor in by
        ]
        if min(first_uses, default=NO_EVENT) <= last:
            refuse_derivative(f"The step ({line_of_step()})")

    def _set_data(self, tensor: Tensor, value: Tensor) -> None:
        """Count ``tensor.data = value`` as a write: ``value`` has no memory."""
        if tensor.shape != value.shape or tensor.dtype != value.dtype:
            raise ConfigError(
                f".data of a tensor of the shape {tuple(tensor.shape)} in {tensor.dtype} is set at "
                f"{line_of_step()} to one of the shape {tuple(value.shape)} in {value.dtype}, and "
                f"other stages would not have it. Set it to one of the same shape and type."
            )
        count_write(tensor)

    def _parameter_behind(self, tensor: Any) -> str | None:
        """Return the parameter whose memory a tensor has."""
        is_real = isinstance(tensor, Tensor) and not is_fake(tensor)
        return self.parameter_memory.get(storage_key(local_tensor(tensor))) if is_real else None

    def _note_parameter_write(
        self, name: str, parameter: str, written: Tensor, given: list[Tensor]
    ) -> Tensor | None:
        """Record a write that stages do once for a batch, without executing it."""
        trace, place = self.trace, line_of_step()
        is_own = self._parameters_of(given) <= {parameter} and not any(map(is_fake, given))
        if not is_own or self.follows_batch(given) or trace.draws or RANDOM.match(name):
            raise write_refused(parameter, place, "with other values than its own")
        if trace.answers or trace.readings:
            raise write_refused(parameter, place, "after it has read numbers out of tensors")
        made_before = [key for key, names in self.from_parameters.items() if parameter in names]
        aliases = {
            id(tensor) for tensor in self.kept if self._parameter_behind(tensor) == parameter
        }
        aliases.add(id(self.root.get_parameter(parameter)))
        self.stale |= dict.fromkeys(set(made_before) - aliases, parameter)
        trace.events.append(TraceEvent(name, False, place=place, writes=parameter))
        return None if name in {"data.__set__", "__setitem__"} else written

    def _refuse_writes(self, written: Iterable[Tensor]) -> None:
        for tensor in written:
            if name := self._parameter_behind(tensor):
                raise write_refused(name, line_of_step(), "beside other tensors")

    def _read(
        self, name: str, func: Any, args: Any, kwargs: dict[str, Any], given: list[Tensor]
    ) -> Any:
        if any(map(is_fake, given)):
            self._note_reading(name, given)
            return guess(name, args, answer=self.answer)
        result = func(*args, **kwargs)
        if parameters := self._parameters_of(given):
            self._note_parameter_read(name, parameters)
        if not self._follows_sizes(given):
            self.note_answer(answer_of(result))
        return result

    def _note_reading(self, name: str, given: list[Tensor]) -> None:
        done = len(self.trace.events)
        read = [self._value_of(tensor) for tensor in given if is_fake(tensor)]
        for value in read:
            value.uses.append(done - 1)
        self.trace.readings.append(ValueRead(done, name, line_of_step(), read[0].origin, read))

    def _note_parameter_read(self, name: str, parameters: frozenset[str]) -> None:
        values = dict(self.root.named_parameters())
        if gone := [name for name in sorted(parameters) if is_absent(values[name])]:
            raise AbsentError(
                f"{name}() of {gone[0]!r} ({line_of_step()}), of which this rank holds no values: "
                f"earlier batches did not read it. Read it for every batch, or inside a layer."
            )
        done = len(self.trace.events)
        reads = self.trace.parameter_reads
        reads[done] = reads.get(done, frozenset()) | parameters

    def _with_twins(self, arguments: Any) -> Any:
        """Replace tensors with data that hold values of units by tensors without data."""
        if not self.tainted:
            return arguments
        return replace_tensors(arguments, self._twin_of)

    def _twin_of(self, tensor: Tensor) -> Tensor:
        if is_fake(tensor) or storage_key(tensor) not in self.tainted:
            return tensor
        twin = self.twins.get(id(tensor))
        if twin is None:
            twin = make_fake(tensor.detach(), self.mode)
            if tensor.requires_grad:  # of a leaf nothing may be written in place
                twin = twin.requires_grad_().clone()
            self.twins[id(tensor)] = twin
            self.kept += [tensor, twin]
            self.storage_behind[storage_key(twin)] = storage_key(tensor)
            calls = self.written_by_units.get(storage_key(tensor), [])
            units = [repr(self.trace.events[call].name) for call in calls]
            origin = f"a buffer of {units[0]}" if units else "a tensor of the step"
            self._add_value(tensor, origin, of=twin).is_side_effect = bool(units)
            for call in calls:
                self._note_write(call, storage_key(tensor))
        return twin

    def _parameters_of(self, given: list[Tensor]) -> frozenset[str]:
        names = [self.from_parameters.get(id(tensor), frozenset()) for tensor in given]
        for tensor in given if self.stale else ():
            if id(tensor) in self.stale:
                self.trace.stale_uses.setdefault(self.stale[id(tensor)], len(self.trace.events))
        return frozenset().union(*names)

    def _add(self, event: TraceEvent, given: list[Tensor], before: list[tuple[Tensor, int]]) -> int:
        """Add an event with the values that it uses and changes; return its number."""
        index = len(self.trace.events)
        self.trace.events.append(event)
        for tensor in given:
            if is_fake(tensor):
                self._value_of(tensor).uses.append(index)
        has_values = event.is_unit or any(map(is_fake, given))
        follows_batch = self.follows_batch(given)
        for tensor, version in before:
            if version_of(tensor) == version:
                continue
            self.from_sizes.discard(self._storage_of(tensor))
            self.data_writes[storage_key(tensor)] = index
            if follows_batch:
                self.from_batch.add(self._storage_of(tensor))
            if is_fake(tensor):
                self._note_write(index, self._storage_of(tensor))
            elif has_values:
                self.tainted.add(storage_key(tensor))
                self._value_of(self._twin_of(tensor))
                self._note_write(index, self._storage_of(tensor))
            elif parameters := self._parameters_of(given):
                self.from_parameters[id(tensor)] = parameters
        return index

    def follows_batch(self, given: list[Tensor]) -> bool:
        """Whether some of the tensors were made of those of ``follow``."""
        return any(self._storage_of(tensor) in self.from_batch for tensor in given)

    def _follows_sizes(self, given: list[Tensor]) -> bool:
        """Whether all of these tensors have the same values for batches of one signature."""
        return bool(given) and all(self._storage_of(tensor) in self.from_sizes for tensor in given)

    def _note_write(self, index: int, storage: int) -> None:
        self.trace.writes.setdefault(storage, []).append(index)
        for tensor, value in self.values_of_storage.get(storage, ()):
            value.needs_grad.append((index, tensor.requires_grad))

    def _storage_of(self, tensor: Tensor) -> int:
        key = storage_key(tensor)
        return self.storage_behind.get(key, key)

    def _note_results(
        self,
        index: int,
        leaves: list[Any],
        origin: str,
        given: list[Tensor],
        parameters: frozenset[str],
    ) -> None:
        made = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        if self.follows_batch(given):
            self.from_batch.update(map(self._storage_of, made))
        elif (origin in SIZES_ALONE and not given) or (
            self._follows_sizes(given) and not RANDOM.match(origin)
        ):
            self.from_sizes.update(map(self._storage_of, made))
        known = {id(tensor) for tensor in given}
        for number, leaf in enumerate(leaves):
            if not isinstance(leaf, Tensor) or any(
                id(leaf) in ids for ids in (known, self.made, self.values)
            ):
                continue
            self.made[id(leaf)] = (index, number)
            self.kept.append(leaf)
            if is_fake(leaf):
                self._add_value(leaf, origin, of=leaf)
            elif parameters:
                self.from_parameters.setdefault(id(leaf), parameters)

    def _value_of(self, fake: Tensor) -> Value:
        value = self.values.get(id(fake))
        if value is None:
            self.has_unreturned = True
            self.kept.append(fake)
            first = min(self.trace.outputs, default=NO_EVENT)  # refused wherever it may be wrong
            made_at = self.in_units.made_at(fake, first)
            unit = "no layer" if made_at == NO_EVENT else repr(self.trace.events[made_at].name)
            origin = holder_of(fake, self.root) or f"a tensor of {unit}"
            value = self._add_value(fake, origin, of=fake)
            value.is_side_effect = True
            value.made_at = made_at
        return value

    def _add_value(self, tensor: Tensor, origin: str, *, of: Tensor) -> Value:
        made_at, leaf = self.made.get(id(tensor), (NO_EVENT, 0))
        if made_at != NO_EVENT and not self.trace.events[made_at].is_unit:
            origin = f"{self.trace.events[made_at].name} at {self.trace.events[made_at].place}"
        value = Value(made_at, leaf, origin, TensorSpec.of(tensor), self._storage_of(tensor))
        value.needs_grad.append((made_at, tensor.requires_grad))
        self._keep_value(of, value)
        return value

    def _keep_value(self, fake: Tensor, value: Value) -> None:
        self.values[id(fake)] = value
        self.values_of_storage.setdefault(value.storage, []).append((fake, value))
        self.trace.values.append(value)
