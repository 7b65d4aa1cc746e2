"""Converts a ``TensorPlan`` to the torch-free table shown by telemetry and ``boltmesh plan``.

One row for each kind of parameter. Plain Python, without torch.
"""

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

from boltmesh.strategies.tensor.plan import ShardedParameter, TensorPlan, Unsharded
from boltmesh.telemetry.tensor_plan import PlannedBlocks, PlannedParameters, TensorPlanTable


@dataclass(frozen=True)
class PlanRow:
    """Parameters that differ only in the numbers of their blocks."""

    pattern: str
    """Their names, with ``*`` in place of numbers."""
    count: int
    shape: tuple[int, ...]
    """Full shape of each."""
    style: str
    """``whole``, or how it is divided: style, dimension and sections."""
    why: str
    rank_bytes: int
    """Bytes that one rank keeps of all of them."""
    whole_bytes: int
    """Bytes of all of them."""
    collectives: str
    """Collectives per step that they cause; empty for none."""


def rows(plan: TensorPlan) -> tuple[PlanRow, ...]:
    """Return the rows: divided parameters in the order of the model, then whole ones."""
    grouped: dict[tuple[object, ...], PlanRow] = {}
    for each in _single_rows(plan):
        key = (each.pattern, each.shape, each.style, each.why, each.collectives)
        known = grouped.get(key)
        if known is None:
            grouped[key] = each
        else:
            grouped[key] = PlanRow(
                each.pattern,
                known.count + 1,
                each.shape,
                each.style,
                each.why,
                known.rank_bytes + each.rank_bytes,
                known.whole_bytes + each.whole_bytes,
                each.collectives,
            )
    return tuple(grouped.values())


def without_numbers(name: str) -> str:
    """Replace numbers in dotted names by ``*``."""
    return re.sub(r"(?<=\.)\d+(?=[.\s;,]|$)|^\d+(?=\.)", "*", name)


def _single_rows(plan: TensorPlan) -> Iterator[PlanRow]:
    for sharded in plan.sharded.values():
        yield PlanRow(
            without_numbers(sharded.name),
            1,
            sharded.shape,
            _style(sharded),
            without_numbers(sharded.why),
            prod(sharded.local_shape(plan.size)) * sharded.element_bytes,
            sharded.elements * sharded.element_bytes,
            _collectives(plan, sharded),
        )
    for each in plan.whole:
        yield PlanRow(
            without_numbers(each.name),
            1,
            each.shape,
            "whole",
            without_numbers(each.why),
            prod(each.shape) * each.element_bytes,
            prod(each.shape) * each.element_bytes,
            _collectives_of_whole(plan, each),
        )


def _style(sharded: ShardedParameter) -> str:
    sections = " + ".join(
        f"{each.outer}x{each.count}x{each.inner}"
        if each.outer > 1
        else f"{each.count}x{each.inner}"
        for each in sharded.sections
    )
    return f"{sharded.style} of dim {sharded.dim}: {sections}"


def _collectives(plan: TensorPlan, sharded: ShardedParameter) -> str:
    if len(sharded.shape) == 1:  # it goes with a matrix
        return ""
    module = sharded.name.rpartition(".")[0]
    if plan.sequence is not None and plan.axes[sharded.axis].blocks:
        if sharded.style == "row":
            return "scattered sum forward, gather backward"
        if module in plan.sequence.fed:
            return "gather forward, scattered sum backward, once for all of an input"
    if module in plan.fed:
        return "its input's gradient is summed further up"
    return {
        "column": "sum backward",
        "row": "sum forward",
        "expert": "sum forward and backward, once for both matrices",
        "vocabulary": "a lookup: sum forward; a loss: maximum and sums forward, sum backward",
    }.get(sharded.style, "")


def _collectives_of_whole(plan: TensorPlan, whole: Unsharded) -> str:
    module = whole.name.rpartition(".")[0]
    if whole.name in plan.partial:
        return "sum of its gradient"
    return "sum backward of what it gives" if module in plan.boundaries else ""


def plan_table(plan: TensorPlan) -> TensorPlanTable:
    """Return the table of a plan, the backends of its blocks, and its notes."""
    counts = Counter(plan.kinds.values())
    return TensorPlanTable(
        size=plan.size,
        rows=tuple(
            PlannedParameters(
                pattern=row.pattern,
                count=row.count,
                shape=row.shape,
                style=row.style,
                why=row.why,
                rank_bytes=row.rank_bytes,
                whole_bytes=row.whole_bytes,
                collectives=row.collectives,
            )
            for row in rows(plan)
        ),
        blocks=tuple(
            # A kind without listed blocks is one block alone, or everything outside of blocks.
            PlannedBlocks(first, counts.get(first, 1), backend)
            for first, backend in plan.backends.items()
        ),
        notes=tuple(dict.fromkeys(map(without_numbers, plan.notes))),
    )
