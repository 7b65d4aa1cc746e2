"""Caches a function's result for one state, for all panels that draw that state."""

import functools
from collections.abc import Callable
from typing import TypeVar

Argument = TypeVar("Argument")
Result = TypeVar("Result")


def remember_last(function: Callable[[Argument], Result]) -> Callable[[Argument], Result]:
    """Return ``function`` with a memory of one: the same object again costs nothing.

    For immutable arguments only. Several panels draw one state, and what they share takes
    milliseconds with a thousand ranks. The argument is kept, so no other object can have its
    identity meanwhile.
    """
    last: tuple[Argument, Result] | None = None

    @functools.wraps(function)
    def remembered(argument: Argument) -> Result:
        nonlocal last
        # One look at the pair, so that a second thread sees an argument with its own result.
        known = last
        if known is None or known[0] is not argument:
            known = last = (argument, function(argument))
        return known[1]

    return remembered
