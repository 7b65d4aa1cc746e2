"""Which functions work on parts of a divided tensor: rules by name, filled in by `rules`."""

from collections.abc import Callable
from typing import Any

Rule = Callable[..., Any]
"""Called with the function and its arguments; returns its result, or `NO_RULE`."""

NO_RULE = object()
"""What a rule returns for arguments that it has no answer for."""

RULES: dict[str, Rule] = {}
"""By name of a function. Complete when `rules` is imported."""

_ABOUT = frozenset(
    name
    for line in (
        "size dim numel nelement element_size get_device is_floating_point is_complex is_signed",
        "ndimension requires_grad_ register_hook retain_grad __hash__ backward grad is_same_size",
        "is_inference stride storage_offset has_names result_type is_tensor __len__ data_ptr",
        "untyped_storage",
    )
    for name in line.split()
)

_COPYING = {"T", "mT", "H", "mH", "data", "real", "imag"}
"""Properties that are tensors. All others are asked of the whole."""

_WRITING = {"__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__", "__ipow__"}


def rule_for(*lines: str) -> Callable[[Rule], Rule]:
    """Make a function the rule for functions of torch, by names with spaces between."""

    def register(rule: Rule) -> Rule:
        for line in lines:
            RULES.update(dict.fromkeys(line.split(), rule))
        return rule

    return register


def asks_nothing(name: str, *, is_property: bool) -> bool:
    """Whether a function asks about a tensor, or is autograd's own, and needs no values."""
    return name in _ABOUT or (is_property and name not in _COPYING)


def is_writing(name: str) -> bool:
    """Whether a function of this name changes its first argument."""
    return name in _WRITING or (name.endswith("_") and not name.endswith("__"))


def name_of(func: Callable[..., Any]) -> tuple[str, bool]:
    """A function's name, and whether it is that of a property."""
    name = getattr(func, "__name__", "")
    if name in {"__get__", "__set__"}:
        return getattr(getattr(func, "__self__", None), "__name__", ""), True
    return name, False
