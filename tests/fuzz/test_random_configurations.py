"""Random configurations train as in a plain loop; ``python -m tests.fuzz`` draws more."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.fuzz.cases import FAMILIES, drawn
from tests.fuzz.running import LAYOUTS, outcomes
from tests.support.ranks import reuse_ranks, run_ranks

pytest.importorskip("transformers")
pytestmark = [pytest.mark.ranks]

ONCE_FAILED = [("tensor", 64), ("tensor", 5041), ("3d", 5041)]
"""Layouts and seeds that were not equal once."""

TWENTY = [(layout, seed) for at, layout in enumerate(LAYOUTS) for seed in range(at % 2, 40, 2)]
"""Layouts and seeds: every other family, most of the others in the next layout."""

REFUSALS = {
    r"parts that can stand in a stage": "fewer parts that can stand in a stage",
    r"sequence_parallel=True, but .* (is whole|looks at|adds something)": "heads of attention that",
    r"sequence_parallel=True, but no stack of blocks": "one block that is called several times",
    r"sequence_parallel=True, but .* does not give the sequence": "layers of a block that get the",
}
"""What may be refused, and the row of docs/support.md that says so."""

REFUSABLE = LAYOUTS.keys() - {"tensor", "zero3_cpu"}

ROWS = (Path(__file__).parents[2] / "docs" / "support.md").read_text(encoding="utf-8")


def check(layout: str, seeds: list[int], run: Callable[..., Any] = run_ranks) -> None:
    for each in outcomes([drawn(seed) for seed in seeds], layout, run):
        is_stated = (
            each.kind == "refused"
            and layout in REFUSABLE
            and any(re.search(reason, each.text) for reason in REFUSALS)
        )
        is_right = each.kind in {"equal", "equal in fp64"} or is_stated
        assert is_right, f"{each.case}: {each.kind}: {each.text}"


def test_what_is_refused_is_stated() -> None:
    for row in REFUSALS.values():
        assert re.search(rf"^\| {re.escape(row)}", ROWS, re.MULTILINE), row


@pytest.mark.parametrize(("layout", "seed"), ONCE_FAILED)
def test_what_failed_once(layout: str, seed: int) -> None:
    check(layout, [seed], reuse_ranks)


@pytest.mark.parametrize(("layout", "seed"), TWENTY)
def test_twenty_configurations_of_each_layout(layout: str, seed: int) -> None:
    check(layout, [seed], reuse_ranks)


@pytest.mark.full
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_configuration_of_each_family(layout: str) -> None:
    check(layout, list(range(len(FAMILIES), 2 * len(FAMILIES))))
