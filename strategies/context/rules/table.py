"""The table of rules, by the name of the function."""

from collections.abc import Callable
from typing import Any, TypeAlias

CutRule: TypeAlias = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]

CUT_RULES: dict[str, CutRule] = {}
"""By ``__name__`` of the function."""


def cut_rule(*names: str) -> Callable[[CutRule], CutRule]:
    """Put a rule into the table."""

    def put(function: CutRule) -> CutRule:
        for each in names:
            assert each not in CUT_RULES, each
            CUT_RULES[each] = function
        return function

    return put


def named(names: tuple[str, ...], args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return arguments by name."""
    return {**dict(zip(names, args, strict=False)), **kwargs}
