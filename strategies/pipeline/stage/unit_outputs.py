"""Outputs of units that are known without a run: from an earlier call, a block, or another rank.

[Note: Blocks of one kind]
A trace of a model of 80 equal layers would run all 80 on fake tensors. So the first of a kind runs,
and the others get its output if they are equal in everything that matters: classes, settings,
shapes and dtypes of parameters and buffers, hooks, wrappers of a tensor plan, layouts of arguments,
and torch's modes. A setting in which they differ, such as a layer's number, must not have been read
by the first one. If the first one has side effects (attributes set, random numbers drawn, data read
or written), all of them are run.
"""

import io
import pickle
from collections import Counter
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from typing_extensions import override

from boltmesh.strategies.pipeline.stage.fake_unit import FakeCall
from boltmesh.strategies.pipeline.stage.rng import host_random_state
from boltmesh.strategies.pipeline.stage.trace import (
    Argument,
    Place,
    TensorSpec,
    UnitOutput,
    version_of,
)
from boltmesh.strategies.pytree import is_constant, nesting, take_apart, tensors_in
from boltmesh.strategies.torch_compat.tensors import (
    FakeTensorMode,
    functions_unwatched,
    is_fake,
    storage_key,
)

Key = tuple[Hashable, ...]

Setting = tuple[str, str]
"""A constant attribute within a unit: name of the module in the unit, and of the attribute."""

_OWN_DEVICE = "device"
"""Name of the device of a rank in bytes for others."""

_SETTINGS = frozenset({bool, int, float, str, type(None)})

_TENSORS = ("_parameters", "_buffers")

_DESCRIBED = {"_modules", *_TENSORS}

_STATE_DICT_HOOKS = {"_state_dict_hooks", "_state_dict_pre_hooks"} | {
    f"_load_state_dict_{when}_hooks" for when in ("pre", "post")
}
"""Hooks that do not take part in a forward."""

_HOOKS = {f"_{way}{hooks}" for way in ("forward", "backward") for hooks in ("_hooks", "_pre_hooks")}
_HOOKS |= {f"_forward{which}_hooks_with_kwargs" for which in ("", "_pre")}
_HOOKS |= {"_forward_hooks_always_called"}
"""torch's dictionaries of hooks, whose keys are numbered over all modules of the process."""


def key_of(unit: str, arguments: Any) -> Key | None:
    """Return a key of a unit's output for these arguments; None if they contain other objects."""
    described: list[Hashable] = [unit]
    for leaf in take_apart(arguments)[0]:
        if isinstance(leaf, Tensor):
            described.append((TensorSpec.of(leaf), leaf.requires_grad, is_fake(leaf)))
        elif is_constant(leaf):
            described.append((type(leaf).__qualname__, leaf))
        else:
            return None
    return tuple(described)


def place_of(
    name: str, unit: Module, arguments: Any, *, call: int, answers: Iterable[Hashable]
) -> Place | None:
    """Return the place of a call of a unit; None if its arguments contain other objects.

    Args:
        name: Name of the unit.
        unit: The unit.
        arguments: What it is called with.
        call: Number of its calls in the step so far.
        answers: Values that the step has read from its batch so far.
    """
    key = key_of(name, arguments)
    if key is None:
        return None
    settings = tuple([
        value
        for module in unit.modules()
        for value in vars(module).values()
        if type(value) in _SETTINGS
    ])  # fmt: skip
    tensors = tensors_in(arguments)
    storages = [storage_key(each) for each in tensors]
    identities = [*map(id, tensors)]
    shared = [(identities.index(one), storages.index(other))
              for one, other in zip(identities, storages, strict=True)]  # fmt: skip
    devices = {each.device.type for each in tensors} | {"cpu"}
    modes = (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.get_default_dtype(),
        *((each, torch.is_autocast_enabled(each), torch.get_autocast_dtype(each))
          for each in sorted(devices)),
    )  # fmt: skip
    given = key[1:], nesting(arguments), tuple(shared), modes, call
    return Place(name, settings, given, tuple(answers))


def _content_of(arguments: Any) -> tuple[Any, ...]:
    """Return the leaves of arguments, and the number of writes to each tensor: both may change."""
    return key_of("", arguments), nesting(arguments), [*map(version_of, tensors_in(arguments))]


def recall(output: UnitOutput, arguments: Any, mode: FakeTensorMode) -> Any:
    """Return a unit's earlier result as fake tensors of the same shapes, strides and dtypes."""
    given = take_apart(arguments)[0]
    leaves: list[Any] = []
    for made, needs_grad in zip(output.leaves, output.needs_grad, strict=True):
        if isinstance(made, Argument):
            leaves.append(given[made.index])
        elif isinstance(made, TensorSpec):
            with mode:
                tensor = made.empty()
            # Not a leaf: code between units may change it in place.
            leaves.append(tensor.requires_grad_().clone() if needs_grad else tensor)
        else:
            leaves.append(made)
    return output.build(leaves)


def to_bytes(outputs: Mapping[Place, UnitOutput], device: torch.device) -> list[bytes]:
    """Return outputs for other ranks, without those that hold objects of this one.

    Args:
        outputs: Outputs of units by place.
        device: Device of the model on this rank.
    """
    found = []
    for item in outputs.items():
        if all(isinstance(each, TensorSpec | Argument) or is_constant(each)
               for each in item[1].leaves):  # fmt: skip
            file = io.BytesIO()
            with suppress(Exception):  # objects raise anything
                _Pickler(file, device).dump(item)
                found.append(file.getvalue())
    return found


def from_bytes(outputs: Iterable[bytes], device: torch.device) -> dict[Place, UnitOutput]:
    """Return outputs of another rank of the job.

    Args:
        outputs: What ``to_bytes`` has returned there.
        device: Device of the model on this rank.
    """
    found: dict[Place, UnitOutput] = {}
    for each in outputs:
        with suppress(Exception):  # such as a class that this rank does not have
            place, output = _Unpickler(io.BytesIO(each), device).load()
            found[place] = output
    return found


FEWEST_KNOWN = 3
"""Two batches fix a line, and another one shows whether it is one."""


def needed_to_derive(known: Collection[int], others: Collection[int]) -> list[int]:
    """Return of which further numbers of rows outputs have to be known to derive the others.

    One of those known is no power of two, to which layers may pad.

    Args:
        known: The numbers of rows of which outputs are known.
        others: The numbers of rows that are needed beside them.
    """
    left = sorted(others, key=lambda rows: (_is_power_of_two(rows), rows))
    needed: list[int] = []
    while left:
        chosen = [*known, *needed]
        if len(chosen) >= FEWEST_KNOWN and not all(map(_is_power_of_two, chosen)):
            break
        needed.append(left.pop(0))
    return needed


def _is_power_of_two(number: int) -> bool:
    return number & (number - 1) == 0


def outputs_for_rows(
    known: Mapping[int, Mapping[Place, UnitOutput]], rows: int
) -> dict[Place, UnitOutput]:
    """Return outputs of units for a batch, from those for batches that differ in rows alone.

    Those of which sizes, strides and other integers are linear in the number of rows in all known
    batches, of which there have to be ``FEWEST_KNOWN``, and all else is the same.

    Args:
        known: Outputs of units by place, by number of rows.
        rows: Number of rows of the batch.
    """
    if len(known) < FEWEST_KNOWN:
        return {}
    calls = {
        count: {(place.unit, place.given[-1]): (place, output) for place, output in each.items()}
        for count, each in known.items()
    }
    first, *between, last = sorted(calls)
    found: dict[Place, UnitOutput] = {}
    for call, (_, output) in calls[first].items():
        with suppress(Exception):  # objects raise anything where they are compared
            one, other = (_comparable(*calls[each][call]) for each in (first, last))
            for count in between:
                if _on_line(one, other, first, last, count) != _comparable(*calls[count][call]):
                    raise _NotLinearError
            place, _, leaves, *facts = _on_line(one, other, first, last, rows)
            found[place] = UnitOutput(leaves, output.build, *facts)
    return found


class _NotLinearError(Exception):
    """A value is not linear in the number of rows."""


def _comparable(place: Place, output: UnitOutput) -> tuple[Any, ...]:
    # The function that builds an output may hold more of it: attributes, keys of dictionaries.
    build = pickle.dumps(output.build)
    facts = output.needs_grad, output.written_buffers, output.sees_one_value
    return place, build, output.leaves, *facts


def _on_line(one: Any, other: Any, first: int, last: int, rows: int) -> Any:
    """Return a value for a number of rows, from its values for ``first`` and ``last`` rows."""
    if type(one) is not type(other):
        raise _NotLinearError
    if isinstance(one, TensorSpec):
        sizes = _on_line((one.shape, one.stride), (other.shape, other.stride), first, last, rows)
        kind = _on_line((one.dtype, one.device), (other.dtype, other.device), first, last, rows)
        return TensorSpec(*sizes, *kind)
    if type(one) in (tuple, torch.Size, Place) and len(one) == len(other):
        pairs = zip(one, other, strict=True)
        parts = [_on_line(this, that, first, last, rows) for this, that in pairs]
        return Place(*parts) if isinstance(one, Place) else type(one)(parts)
    if one == other:
        return one
    if type(one) is int:
        added, remainder = divmod((other - one) * (rows - first), last - first)
        if not remainder:
            return one + added
    raise _NotLinearError


class _Pickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO, device: torch.device) -> None:
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self._device = device

    @override
    def persistent_id(self, value: Any) -> str | None:
        if isinstance(value, Tensor):
            raise pickle.PicklingError("outputs for other ranks hold no tensors")
        return _OWN_DEVICE if isinstance(value, torch.device) and value == self._device else None


class _Unpickler(pickle.Unpickler):  # noqa: S301 - from a rank of this job
    def __init__(self, file: io.BytesIO, device: torch.device) -> None:
        super().__init__(file)
        self._device = device

    @override
    def persistent_load(self, name: Any) -> torch.device:
        assert name == _OWN_DEVICE
        return self._device


class KnownUnits:
    """Outputs of units in one run of a step, for other units of their kind.

    Args:
        units: Units by name.
        forwards: Values of an attribute ``forward`` on the instances, by name.
    """

    def __init__(self, units: Mapping[str, Module], forwards: Mapping[str, Any]) -> None:
        self._units = units
        numbers: dict[Hashable, int] = {}
        self._kinds: dict[str, int] = {}
        self._settings: dict[str, dict[Setting, Hashable]] = {}
        for name, unit in units.items():
            kind, self._settings[name] = describe_unit(unit, forwards.get(name))
            self._kinds[name] = numbers.setdefault(kind, len(numbers))
        self._counts = Counter(self._kinds.values())
        self._differing = _differing(self._kinds, self._settings)
        self._calls: dict[
            tuple[int, Hashable], list[tuple[FakeCall, Mapping[Setting, Hashable]]]
        ] = {}
        """First calls, with the settings that they read, among those in which units differ."""
        self.has_repeated = False
        """Whether a unit got the output of another one."""

    def find(self, name: str, place: Place | None) -> FakeCall | None:
        """Return a call of another unit of the same kind at such a place, or None."""
        if place is None or self._counts[self._kinds[name]] == 1:
            return None
        own = self._settings[name]
        for call, read in self._calls.get((self._kinds[name], place[2:]), ()):
            if all(own[each] == value for each, value in read.items()):
                self.has_repeated = True
                return call
        return None

    @contextmanager
    def watched(self, name: str, place: Place | None, arguments: Any) -> Iterator[list[FakeCall]]:
        """Return a context for the run of a unit.

        Its value takes the call, for other units, and is empty afterwards if the call had effects
        beside its output.
        """
        calls: list[FakeCall] = []
        if place is None:
            yield calls
            calls.clear()
            return
        unit, kind = self._units[name], self._kinds[name]
        before = _attributes(unit), _random_state(), _content_of(arguments)
        with _reads_of(unit, self._differing[kind]) as read:
            yield calls
        (call,) = calls
        if (
            call.answers
            or before != (_attributes(unit), _random_state(), _content_of(arguments))
            or not _has_own_memory(call, arguments)
        ):
            calls.clear()
        else:
            own, known = self._settings[name], self._calls.setdefault((kind, place[2:]), [])
            known.append((call, {each: own[each] for each in read}))


def describe_unit(unit: Module, forward: Any) -> tuple[Hashable, dict[Setting, Hashable]]:
    """Return the kind of a unit, and the constants in which units of a kind may differ.

    Args:
        unit: The module.
        forward: Value of an attribute ``forward`` on the instance.
    """
    names = {module: name for name, module in unit.named_modules()}
    kind: list[Hashable] = []
    settings: dict[Setting, Hashable] = {}
    for module, name in names.items():
        own = vars(module)
        parts = [(key, each is not None and names[each]) for key, each in own["_modules"].items()]
        kind.append((name, type(module), tuple(parts)))
        for group in _TENSORS:
            tensors = own[group].items()
            kind.append(tuple((key, each is not None and _layout(each)) for key, each in tensors))
        numbers = _numbers_of_hooks(own)
        for key, value in own.items():
            if key in _DESCRIBED | _STATE_DICT_HOOKS or (module is unit and key == "forward"):
                continue
            if key in _HOOKS:
                hooks = tuple((numbers[at], _content(hook, names)) for at, hook in value.items())
                kind.append((key, hooks))
            elif is_constant(value):
                settings[name, key] = type(value), value
                kind.append(key)
            else:
                kind.append((key, _content(value, names)))
    kind.append(_content(forward, names))
    return tuple(kind), settings


def _numbers_of_hooks(attributes: Mapping[str, Any]) -> dict[int, int]:
    """Return the order of a module's hooks, by torch's numbers."""
    numbers = {number for key in _HOOKS for number in attributes.get(key, ())}
    return {number: place for place, number in enumerate(sorted(numbers))}


def _layout(tensor: Tensor) -> Hashable:
    with functions_unwatched():  # modes of a dry run would see each read
        return TensorSpec.of(tensor), tensor.requires_grad, type(tensor)


def _content(value: Any, names: Mapping[Module, str]) -> Hashable:
    """Return a key that is equal for attributes with the same effect in two units.

    Args:
        value: The attribute, or a part of it.
        names: Names of the unit's modules in it.
    """
    kind = type(value)
    if is_constant(value):
        return kind, value
    if isinstance(value, Module) and value in names:
        return Module, names[value]
    if isinstance(value, MethodType):
        return MethodType, value.__func__, _content(value.__self__, names)
    if kind is partial:
        parts = (value.func, *value.args, *value.keywords.values())
        return kind, tuple(value.keywords), tuple(_content(each, names) for each in parts)
    if isinstance(value, dict):
        inside = (_content(each, names) for pair in value.items() for each in pair)
        return kind, tuple(inside)
    if kind in {list, tuple}:
        return kind, tuple(_content(each, names) for each in value)
    if kind is set and all(map(is_constant, value)):
        return kind, frozenset(value)
    if kind.__module__.startswith(_WRAPPERS):
        # Without state that differs between units and has no effect, such as names.
        state = value.of_its_kind() if hasattr(value, "of_its_kind") else vars(value)
        return kind, _content(dict(state), names)
    return kind, id(value)


_WRAPPERS = (
    "boltmesh.strategies.tensor.",
    "boltmesh.strategies.patch",
    "boltmesh.strategies.pipeline.stage.units",
)
"""Packages of the strategies' wrappers of methods, whose attributes have all their state."""


def _differing(
    kinds: Mapping[str, int], settings: Mapping[str, Mapping[Setting, Hashable]]
) -> dict[int, set[Setting]]:
    """Return the settings in which units of a kind differ, by kind."""
    firsts: dict[int, Mapping[Setting, Hashable]] = {}
    differing: dict[int, set[Setting]] = {}
    for name, kind in kinds.items():
        first = firsts.setdefault(kind, settings[name])
        differing.setdefault(kind, set()).update(
            each for each, value in settings[name].items() if value != first[each]
        )
    return differing


class _Read:
    """A descriptor that records reads on instances."""

    def __init__(self, key: str, note: Any) -> None:
        self._key = key
        self._note = note

    def __get__(self, module: Any, _: type | None = None) -> Any:
        if module is None:
            raise AttributeError(self._key)
        self._note(module)
        try:
            return vars(module)[self._key]
        except KeyError:
            raise AttributeError(self._key) from None

    def __set__(self, module: Any, value: Any) -> None:
        vars(module)[self._key] = value

    def __delete__(self, module: Any) -> None:
        del vars(module)[self._key]


@contextmanager
def _reads_of(unit: Module, settings: Collection[Setting]) -> Iterator[set[Setting]]:
    """Return a context whose value collects the settings of a unit that are read within it."""
    read: set[Setting] = set()
    modules = dict(unit.named_modules())
    names = {module: name for name, module in modules.items()}
    with ExitStack() as stack:
        for kind, key in {(type(modules[name]), key) for name, key in settings}:

            def note(module: Module, key: str = key) -> None:
                if (setting := (names.get(module, ""), key)) in settings:
                    read.add(setting)

            if key in vars(kind):
                read.update(each for each in settings if each[1] == key)
                continue
            setattr(kind, key, _Read(key, note))
            stack.callback(delattr, kind, key)
        yield read


def _attributes(unit: Module) -> list[Any]:
    """Return the identities of a unit's attributes and of their members, for comparison."""
    identities: list[Any] = []
    objects: dict[int, Any] = {}
    for module in unit.modules():
        for key, value in vars(module).items():
            identities.append((key, id(value)))
            if isinstance(value, dict | list | set):
                members = [*value, *value.values()] if isinstance(value, dict) else [*value]
                identities.append((key, [*map(id, members)]))
            elif not is_constant(value) and not isinstance(value, Module | FunctionType):
                objects[id(value)] = value
    # Objects may count what they see.
    held = [[*map(id, getattr(each, "__dict__", {}).values())] for each in objects.values()]
    return [*identities, held]


def _random_state() -> tuple[Any, ...]:
    return host_random_state(), torch.get_rng_state().numpy().tobytes()


def _has_own_memory(call: FakeCall, arguments: Any) -> bool:
    """Whether a unit's new tensors share memory neither with each other nor with arguments."""
    leaves = take_apart(call.result)[0]
    pairs = zip(leaves, call.output.leaves, strict=True)
    made = [storage_key(leaf) for leaf, spec in pairs if isinstance(spec, TensorSpec)]
    given = {storage_key(each) for each in tensors_in(arguments)}
    return len(set(made)) == len(made) and given.isdisjoint(made)
