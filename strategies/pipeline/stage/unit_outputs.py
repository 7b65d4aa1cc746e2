"""Outputs of units that are known without a run: from an earlier call, or from another block.

[Note: Blocks of one kind]
A trace of a model of 80 equal layers would run all 80 on fake tensors. So the first of a kind runs,
and the others get its output if they are equal in everything that matters: classes, settings,
shapes and dtypes of parameters and buffers, hooks, wrappers of a tensor plan, layouts of arguments,
and torch's modes. A setting in which they differ, such as a layer's number, must not have been read
by the first one. If the first one has side effects (attributes set, random numbers drawn, data read
or written), all of them are run.
"""

from collections import Counter
from collections.abc import Collection, Hashable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from boltmesh.strategies.pipeline.stage.fake_unit import FakeCall
from boltmesh.strategies.pipeline.stage.rng import host_random_state
from boltmesh.strategies.pipeline.stage.trace import Argument, TensorSpec, UnitOutput, version_of
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


def versions(arguments: Any) -> list[int]:
    """Return the number of writes to each tensor among arguments: a unit may change them."""
    return list(map(version_of, tensors_in(arguments)))


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
        self._calls: dict[Hashable, list[tuple[FakeCall, Mapping[Setting, Hashable]]]] = {}
        """First calls, with the settings that they read, among those in which units differ."""
        self.has_repeated = False
        """Whether a unit got the output of another one."""

    def find(self, name: str, key: Key | None, arguments: Any) -> FakeCall | None:
        """Return a call of another unit of the same kind with such arguments, or None."""
        if key is None or self._counts[self._kinds[name]] == 1:
            return None
        own = self._settings[name]
        for call, read in self._calls.get(self._place(name, key, arguments), ()):
            if all(own[each] == value for each, value in read.items()):
                self.has_repeated = True
                return call
        return None

    @contextmanager
    def watched(self, name: str, key: Key | None, arguments: Any) -> Iterator[list[FakeCall]]:
        """Return a context for the run of a unit; its value takes the call, for other units."""
        calls: list[FakeCall] = []
        kind = self._kinds[name]
        if key is None or self._counts[kind] == 1:
            yield calls
            return
        place = self._place(name, key, arguments)
        unit = self._units[name]
        before = _attributes(unit), _random_state(), versions(arguments)
        with _reads_of(unit, self._differing[kind]) as read:
            yield calls
        (call,) = calls
        if (
            not call.answers
            and before == (_attributes(unit), _random_state(), versions(arguments))
            and _has_own_memory(call, arguments)
        ):
            own = self._settings[name]
            self._calls.setdefault(place, []).append((call, {each: own[each] for each in read}))

    def _place(self, name: str, key: Key, arguments: Any) -> Hashable:
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
        return self._kinds[name], key[1:], nesting(arguments), tuple(shared), modes


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
    for module in unit.modules():
        for key, value in vars(module).items():
            identities.append((key, id(value)))
            if isinstance(value, dict | list | set):
                members = [*value, *value.values()] if isinstance(value, dict) else [*value]
                identities.append((key, [*map(id, members)]))
    return identities


def _random_state() -> tuple[Any, ...]:
    return host_random_state(), torch.get_rng_state().numpy().tobytes()


def _has_own_memory(call: FakeCall, arguments: Any) -> bool:
    """Whether a unit's new tensors share memory neither with each other nor with arguments."""
    leaves = take_apart(call.result)[0]
    pairs = zip(leaves, call.output.leaves, strict=True)
    made = [storage_key(leaf) for leaf, spec in pairs if isinstance(spec, TensorSpec)]
    given = {storage_key(each) for each in tensors_in(arguments)}
    return len(set(made)) == len(made) and given.isdisjoint(made)
