"""The difference between two values of one struct type, small, and applied with every check.

A job's rings hold hundreds of records a rank, and a second adds a few. So a patch names only what
changed, by the types of the fields:

- a struct: ``[field, patch, field, patch, ...]``, the fields by number; what is left out stays as
  it was, or has its default where there was nothing before
- a sequence: a list of operations that build the new one from left to right: ``[start, count]``
  copies from the old one, ``[patch]`` adds an item that differs from its left neighbour by
  ``patch``, ``[at, patch, 0]`` one that differs from the old item ``at``
- a mapping: ``[gone, {key: value}]``; ``gone`` is None where the mapping is given whole
- anything else: the new value

Types come from the structs themselves, so a new field of a snapshot needs no change here. The two
sides may be of different versions: a first patch comes with the names of the fields, and what the
receiving side does not know is passed over.
"""

import types
import typing
from collections.abc import Mapping
from typing import Any, Final, Protocol

import msgspec

from boltmesh.telemetry.sanitize import clean

MAX_ITEMS: Final = 4 << 20
"""Items of sequences and mappings in one patch, copies included: a short patch can copy a lot."""

_NOTHING: Final = msgspec.UNSET
"""Stands for a value that was not there before."""

Fields = Mapping[str, list[str]]


class PatchError(ValueError):
    """A patch that does not fit."""


class _Reading:
    """State of one patch while it is applied."""

    def __init__(self, places: Mapping[type, list[int | None]]) -> None:
        self.places = places
        self._left = MAX_ITEMS

    def spend(self, count: int) -> None:
        """Count items that are made."""
        self._left -= count
        if self._left < 0:
            raise PatchError("it has too many items")


class _Node(Protocol):
    """How values of one type are compared and made."""

    def diff(self, old: Any, new: Any) -> Any:
        """Return the patch from ``old``, which differs and may be nothing, to ``new``."""

    def apply(self, old: Any, patch: Any, reading: _Reading) -> Any:
        """Return the new value."""


class Patcher:
    """Makes and applies patches of one struct type.

    Args:
        kind: The type; a frozen struct whose fields are structs, tuples, dicts and plain values.
    """

    def __init__(self, kind: type[msgspec.Struct]) -> None:
        self._structs: dict[type, _StructNode] = {}
        self._root = self._struct(kind)
        self.fields: Fields = {
            struct.__name__: [field.name for field in node.fields]
            for struct, node in self._structs.items()
        }
        """Names of the fields by number; the other side needs them once."""
        self._places: dict[type, list[int | None]] = {
            struct: list(range(len(node.fields))) for struct, node in self._structs.items()
        }

    def diff(self, old: Any | None, new: Any) -> Any:
        """Return a patch, for msgpack, that turns ``old``, or nothing, into ``new``."""
        return self._root.diff(_NOTHING if old is None else old, new)

    def translate(self, fields: object) -> None:
        """Read patches of a side with these fields from now on.

        Raises:
            PatchError: They are not the names of fields.
        """
        try:
            theirs = msgspec.convert(fields, dict[str, list[str]])
        except (msgspec.ValidationError, RecursionError) as error:
            raise PatchError(f"its fields have no names: {clean(error)}") from error
        for struct, node in self._structs.items():
            ours = {field.name: number for number, field in enumerate(node.fields)}
            self._places[struct] = [ours.get(name) for name in theirs.get(struct.__name__, [])]

    def apply(self, old: Any | None, patch: object) -> Any:
        """Return ``old``, or nothing, with a patch applied.

        Raises:
            PatchError: It does not fit, whatever it is.
        """
        try:
            return self._root.apply(_NOTHING if old is None else old, patch, _Reading(self._places))
        except (msgspec.ValidationError, RecursionError, TypeError, ValueError) as error:
            if isinstance(error, PatchError):
                raise
            raise PatchError(clean(error)) from error

    def _struct(self, kind: type[msgspec.Struct]) -> "_StructNode":
        if kind not in self._structs:
            node = self._structs[kind] = _StructNode(kind)
            node.nodes = [self._node(field.type) for field in node.fields]
        return self._structs[kind]

    def _node(self, kind: Any) -> "_Node":
        origin, arguments = typing.get_origin(kind), typing.get_args(kind)
        if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
            return self._struct(kind)
        if origin is tuple and len(arguments) == 2 and arguments[1] is Ellipsis:
            return _TupleNode(self._node(arguments[0]))
        if origin is dict and arguments[0] is str:
            return _DictNode(self._node(arguments[1]))
        if origin in {typing.Union, types.UnionType} and len(arguments) == 2:
            inner = [each for each in arguments if each is not types.NoneType]
            if len(inner) == 1 and not isinstance(node := self._node(inner[0]), _LeafNode):
                return _OptionalNode(node)
        return _LeafNode(kind)


class _LeafNode:
    def __init__(self, kind: Any) -> None:
        self._kind = kind

    def diff(self, old: Any, new: Any) -> Any:
        return new

    def apply(self, old: Any, patch: Any, reading: _Reading) -> Any:
        return msgspec.convert(patch, self._kind)


class _OptionalNode:
    def __init__(self, node: "_Node") -> None:
        self._node = node

    def diff(self, old: Any, new: Any) -> Any:
        return None if new is None else self._node.diff(_NOTHING if old is None else old, new)

    def apply(self, old: Any, patch: Any, reading: _Reading) -> Any:
        if patch is None:
            return None
        return self._node.apply(_NOTHING if old is None else old, patch, reading)


class _StructNode:
    nodes: list["_Node"]

    def __init__(self, kind: type[msgspec.Struct]) -> None:
        self.kind = kind
        self.fields = msgspec.structs.fields(kind)
        self._defaults = [
            field.default if field.default_factory is msgspec.NODEFAULT else field.default_factory()
            for field in self.fields
        ]

    def diff(self, old: Any, new: Any) -> list[Any]:
        patch: list[Any] = []
        is_new = old is _NOTHING
        for number, field in enumerate(self.fields):
            before = self._defaults[number] if is_new else getattr(old, field.name)
            after = getattr(new, field.name)
            if before is not after and before != after:
                base = _NOTHING if before is msgspec.NODEFAULT else before
                patch += (number, self.nodes[number].diff(base, after))
        return patch

    def apply(self, old: Any, patch: Any, reading: _Reading) -> Any:
        if not isinstance(patch, list) or len(patch) % 2:
            raise PatchError(f"it has no {self.kind.__name__}")
        if old is _NOTHING:
            values = self._defaults.copy()
        else:
            values = [getattr(old, field.name) for field in self.fields]
        places = reading.places[self.kind]
        for at in range(0, len(patch), 2):
            number = patch[at]
            if type(number) is not int or not 0 <= number < len(places):
                raise PatchError(f"{self.kind.__name__} has no field {clean(number, 40)}")
            place = places[number]
            if place is not None:
                base = _NOTHING if values[place] is msgspec.NODEFAULT else values[place]
                values[place] = self.nodes[place].apply(base, patch[at + 1], reading)
        for field, value in zip(self.fields, values, strict=True):
            if value is msgspec.NODEFAULT:
                raise PatchError(f"{self.kind.__name__} lacks the field {field.name}")
        return self.kind(*values)


class _TupleNode:
    def __init__(self, node: "_Node") -> None:
        self._node = node

    def diff(self, old: Any, new: Any) -> list[list[Any]]:
        """Follow the old sequence with one finger, the new one with the other.

        Where they part, the old finger looks ahead for the new item, as after a ring rolled on.
        The looks are rationed, so that two sequences without anything in common cost little.
        """
        old = () if old is _NOTHING else old
        operations: list[list[Any]] = []
        looks = 4 * len(old) + 64
        finger = at = 0
        while at < len(new):
            item = new[at]
            found = finger
            while found < len(old) and not _is_same(old[found], item):
                found = found + 1 if looks else len(old)
                looks = max(0, looks - 1)
            if found < len(old):
                start = found
                while found < len(old) and at < len(new) and _is_same(old[found], new[at]):
                    found += 1
                    at += 1
                operations.append([start, found - start])
                finger = found
                continue
            if finger < len(old):
                operations.append([finger, self._node.diff(old[finger], item), 0])
                finger += 1
            else:
                operations.append([self._node.diff(new[at - 1] if at else _NOTHING, item)])
            at += 1
        return operations

    def apply(self, old: Any, patch: Any, reading: _Reading) -> tuple[Any, ...]:
        if not isinstance(patch, list):
            raise PatchError("it has no sequence where one belongs")
        old = () if old is _NOTHING else old
        items: list[Any] = []
        for operation in patch:
            if not isinstance(operation, list):
                raise PatchError("it has no operation where one belongs")
            if len(operation) == 2:
                start, count = operation
                if not _is_within(start, count, len(old)):
                    raise PatchError("it copies what is not there")
                reading.spend(count)
                items += old[start : start + count]
                continue
            reading.spend(1)
            if len(operation) == 1:
                base = items[-1] if items else _NOTHING
                items.append(self._node.apply(base, operation[0], reading))
            elif len(operation) == 3 and _is_within(operation[0], 1, len(old)):
                items.append(self._node.apply(old[operation[0]], operation[1], reading))
            else:
                raise PatchError("it changes what is not there")
        return tuple(items)


class _DictNode:
    def __init__(self, node: "_Node") -> None:
        self._node = node

    def diff(self, old: Any, new: Any) -> list[Any]:
        if old is not _NOTHING:
            kept = [key for key in old if key in new]
            added = [key for key in new if key not in old]
            if [*kept, *added] == list(new):  # the order of axes means something
                gone = [key for key in old if key not in new]
                return [
                    gone,
                    {key: self._item(old, key, new) for key in new if self._differs(old, key, new)},
                ]
        return [None, {key: self._node.diff(_NOTHING, value) for key, value in new.items()}]

    def _differs(self, old: Any, key: str, new: Any) -> bool:
        return key not in old or not _is_same(old[key], new[key])

    def _item(self, old: Any, key: str, new: Any) -> Any:
        return self._node.diff(old.get(key, _NOTHING), new[key])

    def apply(self, old: Any, patch: Any, reading: _Reading) -> dict[str, Any]:
        if not isinstance(patch, list) or len(patch) != 2:
            raise PatchError("it has no mapping where one belongs")
        gone, changed = patch
        if not isinstance(changed, dict) or not (gone is None or isinstance(gone, list)):
            raise PatchError("it has no mapping where one belongs")
        items = {} if gone is None or old is _NOTHING else dict(old)
        reading.spend(len(items) + len(changed))
        for key in gone or ():
            items.pop(key, None)
        for key, value in changed.items():
            if not isinstance(key, str):
                raise PatchError("a mapping has a key that is no text")
            items[key] = self._node.apply(items.get(key, _NOTHING), value, reading)
        return items


def _is_same(one: Any, other: Any) -> bool:
    return one is other or bool(one == other)


def _is_within(start: Any, count: Any, length: int) -> bool:
    return (
        type(start) is int
        and type(count) is int
        and start >= 0
        and count >= 0
        and start + count <= length
    )
