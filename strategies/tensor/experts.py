"""Recognises routed experts: a choice of the best of several scores, and matrices to choose from.

Nothing is special about their division: the analysis finds what every expert has inside. But it
has to be said of them whether they are whole or split, and their sequence is not divided: a router
that sees some of the tokens computes its losses from those alone, without anybody noticing.
"""

from dataclasses import dataclass

from boltmesh.strategies.tensor.analysis.analyse import Analysis


@dataclass(frozen=True)
class RoutedExperts:
    """Experts of one router."""

    module: str
    """That has both."""
    parameters: tuple[str, ...]


def routed_experts(analysis: Analysis) -> tuple[RoutedExperts, ...]:
    """Return the experts of every router, in the order in which they run."""
    stacked = _stacked(analysis)
    found: dict[str, RoutedExperts] = {}
    for step in analysis.trace.steps:
        if step.operator != "topk":
            continue
        module = step.module
        while module and not any(name.startswith(f"{module}.") for name in stacked):
            module = module.rpartition(".")[0]
        names = tuple(name for name in stacked if name.startswith(f"{module}."))
        if module and names and module not in analysis.blocks:
            found.setdefault(module, RoutedExperts(module, names))
    return tuple(found.values())


def _stacked(analysis: Analysis) -> list[str]:
    """Matrices of several experts in one parameter, or those of equal modules in a list."""
    copies: dict[tuple[str, str, tuple[int, ...]], list[str]] = {}
    for name, facts in analysis.parameters.items():
        parts = name.split(".")
        for place, part in enumerate(parts):
            if part.isdigit() and ".".join(parts[: place + 1]) not in analysis.blocks:
                around, inside = ".".join(parts[:place]), ".".join(parts[place + 1 :])
                copies.setdefault((around, inside, facts.shape), []).append(name)
    several = {name for names in copies.values() if len(names) > 1 for name in names}
    return [
        name
        for name, facts in analysis.parameters.items()
        if len(facts.shape) == 3 or name in several
    ]
