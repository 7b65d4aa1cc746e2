"""Random values of a struct type and random neighbours of them, for tests of codecs."""

import random
import types
import typing
from typing import Any, TypeVar

import msgspec

T = TypeVar("T", bound=msgspec.Struct)

WORDS = ("", "data", "rank 5", "größe", "☃ \U0001f600", "a" * 300, "allreduce")


class Randomly:
    """Makes values; the seed decides which.

    Args:
        seed: Of the generator.
        largest: Items of a sequence or mapping at most.
    """

    def __init__(self, seed: int, largest: int = 5) -> None:
        self.generator = random.Random(seed)
        self._largest = largest

    def value(self, kind: Any) -> Any:
        """Return any value of a type."""
        draw = self.generator
        origin, arguments = typing.get_origin(kind), typing.get_args(kind)
        if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
            return kind(*(self.value(field.type) for field in msgspec.structs.fields(kind)))
        if origin is tuple and arguments[-1] is not Ellipsis:
            return tuple(self.value(each) for each in arguments)
        if origin is tuple:
            return tuple(self.value(arguments[0]) for _ in range(draw.randint(0, self._largest)))
        if origin is dict:
            keys = draw.sample(WORDS, draw.randint(0, min(self._largest, len(WORDS))))
            return {key: self.value(arguments[1]) for key in keys}
        if origin in {typing.Union, types.UnionType}:
            return self.value(draw.choice(arguments))
        if origin is typing.Literal:
            return draw.choice(arguments)
        simple = {
            str: lambda: draw.choice(WORDS),
            int: lambda: draw.choice((0, -1, draw.randint(0, 99), 2**63 - 1)),
            float: lambda: draw.choice((0.0, -1.5, 1e300, float("inf"), draw.random())),
            bool: lambda: draw.random() < 0.5,
            types.NoneType: lambda: None,
        }
        return simple[kind]()

    def neighbour(self, before: T) -> T:
        """Return a value that differs in a few fields, as one look differs from the next."""
        draw = self.generator
        changed = {
            field.name: self._moved(field.type, getattr(before, field.name))
            for field in msgspec.structs.fields(before)
            if draw.random() < 0.4
        }
        return msgspec.structs.replace(before, **changed)

    def _moved(self, kind: Any, before: Any) -> Any:
        draw = self.generator
        if isinstance(before, msgspec.Struct) and draw.random() < 0.8:
            return self.neighbour(before)
        if not isinstance(before, tuple) or draw.random() < 0.1:
            return self.value(kind)
        item = next(
            typing.get_args(each)[0]
            for each in (kind, *typing.get_args(kind))
            if typing.get_origin(each) is tuple
        )
        items = list(before)
        if typing.get_origin(kind) is tuple and typing.get_args(kind)[-1] is not Ellipsis:
            return self.value(kind)  # of a fixed length
        how = draw.choice(("roll", "change", "drop", "insert", "shuffle", "double"))
        if how == "roll":  # a ring that went on
            del items[: draw.randint(0, len(items))]
            items += [self.value(item) for _ in range(draw.randint(0, self._largest))]
        elif how == "change" and items:
            at = draw.randrange(len(items))
            items[at] = self._moved(item, items[at])
        elif how == "drop" and items:
            del items[draw.randrange(len(items))]
        elif how == "insert":
            items.insert(draw.randint(0, len(items)), self.value(item))
        elif how == "shuffle":
            draw.shuffle(items)
        else:
            items += items[: draw.randint(0, len(items))]
        return tuple(items[:40])
