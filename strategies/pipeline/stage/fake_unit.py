"""Finds the output of a unit without its parameters' values and without computation."""

import re
from collections.abc import Callable, Iterable, MutableMapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor
from torch.nn import Module, Parameter
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode
from torch.utils.module_tracker import ModuleTracker
from torch.utils.weak import WeakIdKeyDictionary
from typing_extensions import Self, override

from boltmesh.errors import ConfigError, UnsupportedError
from boltmesh.strategies.dry_run.no_side_effects import name_of, writes_to_first
from boltmesh.strategies.dry_run.unsupported import refuse_collective, refuse_derivative
from boltmesh.strategies.pipeline.stage.data_dependent_ops import (
    DERIVATIVES,
    READS,
    SELECTIONS,
    answer_of,
    expert_product,
    guess,
    is_expert_product,
    is_packing,
    norm_of_one_value,
    packed,
    sees_one_value,
    select,
)
from boltmesh.strategies.pipeline.stage.trace import (
    Argument,
    TensorSpec,
    UnitOutput,
    place_of,
    version_of,
)
from boltmesh.strategies.pipeline.stage.units import is_absent
from boltmesh.strategies.pytree import is_constant, take_apart, tensors_in
from boltmesh.strategies.torch_compat.autograd import is_checkpointed
from boltmesh.strategies.torch_compat.modules import needless_conversions_skipped, swapped_state
from boltmesh.strategies.torch_compat.tensors import (
    NEEDS_DATA,
    FakeTensorMode,
    contiguous_fake,
    is_fake,
    make_fake,
    storage_key,
    with_fitting_sizes,
)

Note = Callable[[str, list[Tensor], list[Tensor]], None]
"""Takes the name of a function, and the tensors that it gets and returns."""

MOST_READS = 10_000
"""Limit of reads of data within a unit: a loop until its data end it would not end on a guess."""


@dataclass
class FakeCall:
    """Result of a call of a unit on fake tensors."""

    result: Any
    output: UnitOutput
    answers: list[Any]
    """Values that the unit read from arguments with data."""
    flops: int
    borrowed: list[Parameter] = field(default_factory=list)
    """Parameters of other modules that it used, such as those of a module among its arguments."""
    saved: list[tuple[int | None, int]] = field(default_factory=list)
    """Memory that autograd keeps of it, see ``SavedTensorWatch.saved_since``."""


class _MadeInCall(NamedTuple):
    """Where a tensor was made."""

    call: int
    """Number of the unit's call."""
    is_value: bool
    """Whether it was computed from the contents of values of units."""
    found: tuple[Tensor, ...]
    """Values from which it was computed that the unit has found elsewhere than in its arguments."""


class TensorsOfUnits:
    """Tensors that units make, and those of others that a unit finds but in its arguments.

    Such as values of an earlier layer that a hook has left in a list. Two kinds are left out: what
    does not follow from values, as cached positions, since a layer makes it again where it is
    absent; and values that do not reach the unit's result, as those of a running statistic.

    Args:
        is_value: Returns whether the output of a unit is behind a tensor between units.
    """

    def __init__(self, is_value: Callable[[Tensor], bool]) -> None:
        self._is_value = is_value
        self._made: MutableMapping[Tensor, _MadeInCall] = WeakIdKeyDictionary()
        self._call = 0
        self._given: list[Tensor] = []
        self._found: tuple[Tensor, ...] = ()
        self._is_repeated = False
        """Whether some of them were found where the backward pass finds them again."""

    def begin(self, call: int, given: list[Tensor]) -> None:
        """Begin a unit's call.

        Args:
            call: Number of the call, as ``made_at`` returns it.
            given: Tensors in its arguments.
        """
        self._call, self._given, self._found, self._is_repeated = call, given, (), False

    def note(self, name: str, given: list[Tensor], made: list[Tensor]) -> None:
        """Record the tensors that a function within the unit gets and returns."""
        if writes_to_first(name) and not made:
            made = given[:1]
        if _OF_SHAPE.match(name):
            given = []
        is_value, found = False, list[Tensor]()
        for tensor in given[:1] if name in _LIKE_OTHER else given:
            source = self._made.get(tensor)
            is_given = any(tensor is each for each in self._given)
            is_own = source is not None and source.call == self._call
            is_value |= is_given or self._is_value(tensor)
            if source is not None:
                is_value |= source.is_value
            if is_own and source is not None:
                found += source.found
            elif not is_given and (
                self._is_value(tensor) or (source is not None and source.is_value)
            ):
                found.append(tensor)
        self._found = _without_repetitions([*self._found, *found])
        self._is_repeated |= bool(found) and is_checkpointed()
        for tensor in made:
            before = self._made.get(tensor)
            if before is None:
                self._made[tensor] = _MadeInCall(self._call, is_value, _without_repetitions(found))
            elif before.call == self._call:
                both = _without_repetitions([*before.found, *found])
                self._made[tensor] = _MadeInCall(self._call, before.is_value or is_value, both)

    def found_for(self, unit: str, result: list[Tensor]) -> tuple[Tensor, ...]:
        """Return the values that the current unit has found and that its result depends on.

        Raises:
            UnsupportedError: The unit runs again in its backward pass, and would find others.
        """
        found: list[Tensor] = []
        for tensor in result:
            source = self._made.get(tensor)
            if source is None and not any(tensor is each for each in self._given):
                found += self._found  # made by a function that was not seen
            elif source is not None and source.call == self._call:
                found += source.found
        if found and self._is_repeated:
            raise UnsupportedError(
                f"{unit!r} computes with an earlier layer's output that is not among its arguments "
                f"and runs again in its backward pass (torch.utils.checkpoint), where it would "
                f"find that of another microbatch. Give it to the layer as an argument, or leave "
                f"activation checkpointing out."
            )
        return _without_repetitions(found)

    def made_at(self, tensor: Tensor, otherwise: int) -> int:
        """Return the number of the call in which a tensor was made; ``otherwise`` if unknown."""
        source = self._made.get(tensor)
        return otherwise if source is None else source.call


_OF_SHAPE = re.compile(r"new_|.*_like$")
"""Functions that take a tensor's shape and kind, and not its contents."""

_LIKE_OTHER = frozenset({"type_as", "to", "expand_as", "view_as", "reshape_as"})
"""Functions that take only those of their second argument."""


def holds_values(unit: Module) -> bool:
    """Whether attributes of a unit, or objects in them, hold tensors without data.

    They are values of earlier units.
    """
    for module in unit.modules():
        for key, value in vars(module).items():
            if key in _STATE or is_constant(value):
                continue
            inside = value.values() if isinstance(value, dict) else value
            several = inside if isinstance(value, dict | list | tuple) else [value]
            held = [one for each in several for one in getattr(each, "__dict__", {}).values()]
            if any(map(is_fake, several)) or any(map(is_fake, held)):
                return True
    return False


_STATE = frozenset({"_parameters", "_buffers", "_modules"})


def _without_repetitions(tensors: Iterable[Tensor]) -> tuple[Tensor, ...]:
    return tuple({id(each): each for each in tensors}.values())


class UnitError(ConfigError):
    """A unit cannot be run on fake tensors."""

    unit: str
    """Name of the unit."""


def run_on_fakes(
    name: str,
    unit: Module,
    call: Callable[..., Any],
    mode: FakeTensorMode,
    arguments: tuple[tuple[Any, ...], dict[str, Any]],
    *,
    counts_flops: bool,
    note: Note = lambda name, given, made: None,
) -> FakeCall:
    """Run a unit on fake tensors, which have shape and dtype and no data.

    Args:
        name: The unit's name, for messages.
        unit: The module; its parameters and buffers may have no values here.
        call: The unit's own forward.
        mode: Mode of the fake tensors.
        arguments: The positional and keyword arguments of the call. Tensors that do not come from
            units have data, which the unit may read.
        counts_flops: Whether to count floating point operations as well.
        note: Called for each function in the unit.

    Raises:
        UnitError: The unit fails on fake tensors.
        ConfigError: Shapes of its output depend on its data.
    """
    calls: list[FakeCall] = []
    errors: list[Exception] = []
    for answer in (False, True):
        described = f"{name!r} ({type(unit).__name__})"
        watch = _Watch(described, tensors_in(arguments), answer=answer, note=note)
        counter = _FlopCounter() if counts_flops else None
        counted: AbstractContextManager[Any] = counter or nullcontext()
        state = {
            each: _fake_state(tensor, mode)
            for each, tensor in (*unit.named_parameters(), *unit.named_buffers())
        }
        buffers = {key: state[key] for key, _ in unit.named_buffers()}
        before = {key: (storage_key(each), version_of(each)) for key, each in buffers.items()}
        try:
            with swapped_state(unit, state), needless_conversions_skipped(), watch, counted:
                result = call(*arguments[0], **arguments[1])
                now = dict(unit.named_buffers())
        except UnsupportedError:
            raise
        except Exception as error:  # noqa: BLE001 - the user's layer may raise anything
            errors.append(error)
        else:
            flops = 0 if counter is None else counter.get_total_flops()
            written = tuple(
                key
                for key, each in buffers.items()
                if now.get(key) is not each
                or version_of(each) != before[key][1]
                or before[key][0] in watch.written
            )
            calls.append(_describe(name, unit, result, arguments, mode, watch, flops, written))
        if not watch.has_guessed:
            break
    if not calls:
        failure = UnitError(_explain_failure(name, unit, errors[0]))
        failure.unit = name
        raise failure from errors[0]
    if len(calls) > 1 and _shapes(calls[0]) != _shapes(calls[1]):
        raise ConfigError(
            f"what {name!r} ({type(unit).__name__}) gives has another shape when its data are "
            f"others: {_shapes(calls[0])} or {_shapes(calls[1])}. The next stage has to know it "
            f"beforehand: pad it inside {name!r}."
        )
    calls[-1].borrowed = [each for call in calls for each in call.borrowed]
    return calls[-1]


def _fake_state(tensor: Tensor, mode: FakeTensorMode) -> Tensor:
    """Return a fake parameter or buffer of the same shape and dtype, contiguous if absent."""
    return contiguous_fake(tensor, mode) if is_absent(tensor) else make_fake(tensor, mode)


class _FlopCounter(FlopCounterMode):
    """Counts operations in all. For a count by module, torch puts hooks on the tensors of each."""

    def __init__(self) -> None:
        super().__init__(display=False)
        self.mod_tracker = _NoModules()


class _NoModules(ModuleTracker):
    """Knows no module but the whole."""

    @override
    def __enter__(self) -> Self:
        return self

    @override
    def __exit__(self, *error: object) -> None:
        pass


class _Watch(TorchFunctionMode):
    """Gives guesses for a unit's reads of fake tensors, and records its reads of others."""

    def __init__(
        self,
        unit: str,
        inputs: Sequence[Tensor],
        *,
        answer: bool,
        note: Note,
    ) -> None:
        super().__init__()
        self.unit = unit
        self.inputs = inputs
        self.answer = answer
        self.note = note
        self.has_guessed = False
        self.sees_one_value = False
        self.answers: list[Any] = []
        self.borrowed: list[Parameter] = []
        self.reads = 0
        self.written: set[int] = set()
        """Storages that were written to."""

    @override
    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        given = tensors_in((args, kwargs))
        result = self._execute(func, args, kwargs, given)
        self.note(name_of(func), given, tensors_in(result))
        return result

    def _execute(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], given: list[Tensor]
    ) -> Any:
        refuse_collective(func, (*args, *kwargs.values()), self.unit)
        # A unit's own parameters have no data while it runs.
        self.borrowed += [one for one in given if isinstance(one, Parameter) and not is_fake(one)]
        name = name_of(func)
        if writes_to_first(name) and args and isinstance(args[0], Tensor):
            self.written.add(storage_key(args[0]))  # also through ``.data``, which is not counted
        if name in READS:
            return self._read(name, func, args, kwargs)
        if name in DERIVATIVES:
            self._refuse_through_units(name, args, kwargs)
        if sees_one_value(func, args, kwargs):
            self.sees_one_value = True
            return norm_of_one_value(func, args, kwargs)
        if is_packing(name, args):
            self.answers.append(answer_of(args[1]))
            return packed(args)
        if is_expert_product(name, args) and any(map(is_fake, args[:2])):
            return expert_product(args, kwargs)
        args, kwargs = with_fitting_sizes(name, args, kwargs)
        if name not in SELECTIONS:
            return func(*args, **kwargs)
        try:
            return func(*args, **kwargs)
        except NEEDS_DATA:
            self.has_guessed = True
            return select(name, args, kwargs, answer=self.answer)

    def _refuse_through_units(
        self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """Refuse derivatives by an input of the unit of which another input may be made.

        ``backward`` differentiates by all that inputs were made of.
        """
        made = [each for each in self.inputs if is_fake(each) and each.requires_grad]
        sources = tensors_in(args[1] if len(args) > 1 else kwargs.get("inputs"))
        by = [each for each in self.inputs if any(each is one for one in sources)]
        if (made and name == "backward") or any(each is not one for each in by for one in made):
            refuse_derivative(self.unit)

    def _read(self, name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.reads += 1
        if self.reads > MOST_READS:
            raise RuntimeError(f"it read its data {MOST_READS} times and did not end")
        if any(map(is_fake, tensors_in(args))):
            self.has_guessed = True
            return guess(name, args, answer=self.answer)
        result = func(*args, **kwargs)
        self.answers.append(answer_of(result))
        return result


def _describe(
    name: str,
    unit: Module,
    result: Any,
    arguments: Any,
    mode: FakeTensorMode,
    watch: _Watch,
    flops: int,
    written: tuple[str, ...],
) -> FakeCall:
    given = take_apart(arguments)[0]
    leaves, build = take_apart(result)
    described: list[object] = []
    kept: list[Any] = []
    for leaf in leaves:
        same = [i for i, each in enumerate(given) if each is leaf and not is_constant(leaf)]
        made = leaf
        if same:
            described.append(Argument(same[0]))
        elif isinstance(leaf, Tensor):
            made = leaf if is_fake(leaf) else make_fake(leaf, mode)
            described.append(TensorSpec.of(made))
        elif is_constant(leaf):
            described.append(leaf)
        else:
            raise ConfigError(
                f"{name!r} ({type(unit).__name__}) gives a {type(leaf).__name__}, which may hold "
                f"tensors that other stages cannot see. Give tensors, numbers, strings and None, "
                f"in tuples, lists, dictionaries or dataclasses."
            )
        kept.append(made)
    needs = tuple(isinstance(each, Tensor) and each.requires_grad for each in kept)
    output = UnitOutput(tuple(described), build, needs, written, watch.sees_one_value)
    return FakeCall(build(kept), output, watch.answers, flops, watch.borrowed)


def _shapes(call: FakeCall) -> list[object]:
    return [
        (each.shape, each.dtype) if isinstance(each, TensorSpec) else each
        for each in call.output.leaves
    ]


def _explain_failure(name: str, unit: Module, error: Exception) -> str:
    return (
        f"{name!r} ({type(unit).__name__}) cannot be run on tensors without data, by which the "
        f"shape of its output is found before other stages need it: {error} "
        f"({place_of(error)}). If it runs otherwise, let it "
        f"compute by torch's own functions, or register a fake implementation of a custom one."
    )
