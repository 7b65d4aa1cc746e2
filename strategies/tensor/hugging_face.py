"""Compares a plan with the one that ships with a model of Hugging Face.

Hugging Face's plans are written by hand for each model family and name modules of the base model by
patterns, each with a style. They do not influence our plan; differences are reported as notes.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from torch.nn import Module

from boltmesh.strategies.tensor.plan import Style, TensorPlan, without_numbers

_COLUMNS: frozenset[Style] = frozenset({"along", "column", "expert", "table"})
_ROWS: frozenset[Style] = frozenset({"row", "expert", "vocabulary"})
_STYLES: dict[str, frozenset[Style]] = {
    "colwise": _COLUMNS,
    "packed_colwise": _COLUMNS,
    "embedding_colwise": _COLUMNS,
    "rowwise": _ROWS,
    "packed_rowwise": _ROWS,
    "embedding_rowwise": _ROWS,
}
_GATHERED = {"colwise_gather_output", "rowwise_split_input"}
"""Styles that divide a matrix but keep the activations between matrices whole."""
_SUMMED = "replicated_with_grad_allreduce"


def disagreements(plan: TensorPlan, module: Module) -> tuple[str, ...]:
    """Return the differences between a plan and Hugging Face's own, a sentence for each pattern.

    Args:
        plan: Plan of the module.
        module: The model, or one that contains models of Hugging Face. Other models have no plan
            of their own, and no differences.
    """
    first = {name: each.name for each in plan.sharded.values() for name in each.names}
    notes: dict[str, None] = {}
    for base, theirs in _plans(module):
        seen: set[str] = set()
        for name, parameter in module.named_parameters():
            if not name.startswith(base):
                continue
            pattern = _match(theirs, name[len(base) :])
            if pattern is not None:
                seen.add(pattern)
                note = _compare(plan, first.get(name, name), theirs[pattern], parameter.ndim)
            elif name in first and plan.sharded[first[name]].style != "vocabulary":
                pattern = without_numbers(name[len(base) :])
                note = "Hugging Face leaves it whole, and this plan divides it"
            else:
                continue
            if note:
                notes.setdefault(f"{base}{pattern}: {without_numbers(note)}")
    return tuple(notes)


def _plans(module: Module) -> Iterator[tuple[str, Mapping[str, str]]]:
    """Yield the prefix of each base model within a module, and its plan."""
    for name, each in module.named_modules():
        theirs: Any = getattr(getattr(each, "config", None), "base_model_tp_plan", None)
        if isinstance(theirs, Mapping) and getattr(each, "base_model", None) is each:
            yield f"{name}." if name else "", theirs


def _match(theirs: Mapping[str, str], name: str) -> str | None:
    """Return the pattern of a parameter's name or of its module's."""
    plain = without_numbers(name)
    return next((each for each in (plain, plain.rpartition(".")[0]) if each in theirs), None)


def _compare(plan: TensorPlan, name: str, style: str, ndim: int) -> str:
    """Return how a parameter differs from a style of Hugging Face; empty if it does not."""
    mine = plan.sharded.get(name)
    if style == _SUMMED:
        if mine is None and name not in plan.partial:
            return "Hugging Face sums its gradient over ranks, and this plan does not"
        return ""
    if style in _GATHERED:
        if mine is not None and ndim > 1:
            return "Hugging Face gathers what is behind it, and this plan keeps that divided"
        return ""
    expected = _STYLES.get(style)
    if expected is None or (ndim == 1 and "row" in expected):
        return ""
    if mine is None:
        why = next((each.why for each in plan.whole if each.name == name), "")
        return f"Hugging Face divides it ({style}), and this plan does not: {why}"
    if mine.style not in expected:
        return f"Hugging Face divides it {style}, and this plan by {mine.style}"
    return ""
