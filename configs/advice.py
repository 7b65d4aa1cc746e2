"""The words of an error: nearest names, values that work, what a type needs."""

import difflib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import Field
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

COMMAND_LINE = "command line"
"""The source that errors name for what ``key=value`` changed."""


class Source(str):
    """The file of a config, as errors name it, with the keys that the command line has set."""

    __slots__ = ("changed",)

    changed: frozenset[str]
    """Full keys."""


def source_of(source: str, key: str) -> str:
    """Return what an error about a key or a section names as its source.

    The command line if that has set all of it, both if it has set a part.
    """
    changed = source.changed if isinstance(source, Source) else ()
    if any(f"{key}.".startswith(f"{each}.") for each in changed):
        return COMMAND_LINE
    is_in_part = any(each.startswith(f"{key}.") for each in changed)
    return f"{source} and {COMMAND_LINE}" if is_in_part else str(source)


def located(source: str, key: str) -> str:
    """Return how an error about a key or a section begins."""
    return f"{source_of(source, key)}: {key}"


WORDS = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "a text",
    Path: "a path",
    type(None): "null",
}
_MAPPINGS = {dict, Mapping}


def nearest(name: str, candidates: Iterable[str]) -> str | None:
    """The candidate that ``name`` was probably meant to be, or None when none is similar."""
    found = difflib.get_close_matches(name, sorted(candidates), n=1, cutoff=0.6)
    return found[0] if found else None


def nearest_key(key: str, candidates: Iterable[str]) -> str | None:
    """The full key that ``key`` was probably meant to be.

    A sibling with a similar last part comes first, then the same last part in another section,
    then a similar one. For a key without a section the same last part comes first.
    """
    every = sorted(candidates)
    parent, _, last = key.rpartition(".")
    elsewhere = [each for each in every if each.rpartition(".")[2] == last]
    siblings = [each.rpartition(".")[2] for each in every if each.rpartition(".")[0] == parent]
    is_elsewhere = not parent and elsewhere
    if not is_elsewhere and (sibling := nearest(last, siblings)) is not None:
        return f"{parent}.{sibling}" if parent else sibling
    if elsewhere:
        return elsewhere[0]
    lasts = {each.rpartition(".")[2]: each for each in reversed(every)}
    similar = nearest(last, lasts)
    return None if similar is None else lasts[similar]


def name_choices(names: Iterable[str], *, last: str = "and", at_most: int = 12) -> str:
    """``a, b and c``; the first ones only, when there are many."""
    every = list(names)
    if len(every) > at_most:
        return f"{', '.join(every[:at_most])}, ..."
    *first, end = every or ["none"]
    return f"{', '.join(first)} {last} {end}" if first else end


def describe_type(hint: Any) -> str:
    """Return words for a value of this type that follow "is not"."""
    words: list[str] = []
    for each in get_args(hint) if get_origin(hint) in {Union, UnionType} else (hint,):
        if get_origin(each) is Literal:
            choices = [str(choice) for choice in get_args(each)]
            words.append(f"one of {', '.join(choices)}" if len(choices) > 1 else choices[0])
        elif each is Any:
            words.append("a value")
        elif get_origin(each) is Callable:
            continue  # no config can hold one
        else:
            words.append(
                WORDS.get(each, "a mapping" if get_origin(each) in _MAPPINGS else "a list")
            )
    if "a number" in words and "a whole number" in words:
        words.remove("a whole number")
    return " or ".join(words) if len(words) < 3 else f"{', '.join(words[:-1])} or {words[-1]}"


def choices_of(hint: Any) -> list[str]:
    """The words that a Literal, or a Union with one, allows."""
    if get_origin(hint) is Literal:
        return [str(choice) for choice in get_args(hint)]
    return [word for part in get_args(hint) for word in choices_of(part)]


def working_value(key: Field[Any], hint: Any, value: object) -> str:
    """A value that the key accepts: the choice nearest to ``value``, else the key's example."""
    similar = nearest(show(value), choices_of(hint))
    return show(key.metadata.get("example") if similar is None else similar)


def show(value: object) -> str:
    """A value as it is written in YAML and on the command line."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int) and value.bit_length() > 64:
        return f"{value:#x}"  # Python refuses to write very long decimals
    return str(value)


def one_line(error: BaseException) -> str:
    """Return the text of an error as one line."""
    return " ".join(str(error).split())


def first_line(error: BaseException) -> str:
    """Return the first line of an error, without its full stop."""
    text = str(error).strip().splitlines()
    return text[0].rstrip(".") if text else type(error).__name__
