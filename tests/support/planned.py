"""Plans of the small models of ``tensor_models``, and what they say in few words."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache

from boltmesh.strategies.blocks import find_blocks
from boltmesh.strategies.tensor.analysis.analyse import Analysis, analyse
from boltmesh.strategies.tensor.plan import ShardedParameter, TensorPlan
from boltmesh.strategies.tensor.planning import make_plan
from tests.support.tensor_models import example


@cache
def analysed(name: str) -> Analysis:
    """What a step of one of the models told."""
    made = example(name)
    return analyse(made.module, made.loss, blocks=find_blocks(made.module))


def pattern(name: str) -> str:
    """A name without the numbers of blocks."""
    return re.sub(r"\.\d+\b", ".*", name)


def patterns(names: Iterable[str]) -> set[str]:
    """Names without the numbers of blocks."""
    return {pattern(each) for each in names}


def division(sharded: ShardedParameter) -> str:
    """Style, dimension and sections, such as ``column 0: 4x16 + 4x16``.

    A section is told as ``outer x count x inner``, without an outer one of 1.
    """
    sections = " + ".join(
        f"{each.outer}x{each.count}x{each.inner}"
        if each.outer > 1
        else f"{each.count}x{each.inner}"
        for each in sharded.sections
    )
    return f"{sharded.style} {sharded.dim}: {sections}"


def divisions(plan: TensorPlan) -> dict[str, str]:
    """The division of each parameter that is divided, by pattern; blocks have to agree."""
    found: dict[str, str] = {}
    for name, each in plan.sharded.items():
        text = division(each)
        assert found.setdefault(pattern(name), text) == text, name
    return found


@dataclass(frozen=True)
class Expected:
    """What plans of several models for two ranks are, by name of the model."""

    divisions: Mapping[str, dict[str, str]]
    partial: Mapping[str, set[str]] = field(default_factory=dict)
    boundaries: Mapping[str, set[str]] = field(default_factory=dict)
    local_dropouts: Mapping[str, set[str]] = field(default_factory=dict)

    def check(self, name: str) -> None:
        """Plan a model, and compare."""
        analysis = analysed(name)
        plan = make_plan(analysis, 2)
        assert divisions(plan) == self.divisions[name]
        assert {*plan.sharded, *(each.name for each in plan.whole)} == set(analysis.parameters)
        assert all(each.why for each in plan.whole)
        assert patterns(plan.partial) == self.partial.get(name, set())
        assert patterns(plan.boundaries) == self.boundaries.get(name, set())
        assert patterns(plan.local_dropouts) == self.local_dropouts.get(name, set())
        assert plan.unknown == {}
        assert not analysis.trace.guessed
