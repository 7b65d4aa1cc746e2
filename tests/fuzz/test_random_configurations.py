"""Random configurations train as in a plain loop; ``python -m tests.fuzz`` draws more."""

from collections.abc import Callable
from typing import Any

import pytest

from tests.fuzz.cases import FAMILIES, drawn
from tests.fuzz.running import LAYOUTS, outcomes
from tests.support.ranks import reuse_ranks, run_ranks

pytest.importorskip("transformers")
pytestmark = [pytest.mark.ranks]

ONCE_FAILED = {"tensor": [64]}
"""Seeds by layout that were not equal once."""

QUICK = {"tensor": [39, 66], "sequence": [0], "gpipe": [25, 34], "zero3_cpu": [41, 80]}
"""More of `make test`, of families that ranks have imported."""

FEW = {"tensor": 4, "sequence": 3, "gpipe": 3, "3d": 2, "zero3_cpu": 2}
"""Cases by layout, every ninth family."""

REFUSABLE = {"sequence", "gpipe", "1f1b", "interleaved", "zero_bubble", "3d"}
"""Layouts that docs/support.md does not give every model: such as ALBERT, whose layers are one."""


def check(layout: str, seeds: list[int], run: Callable[..., Any] = run_ranks) -> None:
    for each in outcomes([drawn(seed) for seed in seeds], layout, run):
        allowed = {"equal", "refused"} if layout in REFUSABLE else {"equal"}
        assert each.kind in allowed, f"{each.case}: {each.kind}: {each.text}"


@pytest.mark.parametrize("layout", QUICK)
def test_what_failed_once_and_a_few_more(layout: str) -> None:
    check(layout, ONCE_FAILED.get(layout, []) + QUICK[layout], reuse_ranks)


@pytest.mark.full
@pytest.mark.parametrize("layout", FEW)
def test_a_few_configurations(layout: str) -> None:
    check(layout, list(range(0, 9 * FEW[layout], 9)))


@pytest.mark.full
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_configuration_of_each_family(layout: str) -> None:
    check(layout, list(range(len(FAMILIES), 2 * len(FAMILIES))))
