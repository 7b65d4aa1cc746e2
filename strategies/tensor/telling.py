"""A plan as a job's telemetry tells it, to who has neither torch nor the model."""

from collections import Counter

from boltmesh.strategies.tensor.plan import TensorPlan
from boltmesh.strategies.tensor.plan_table import rows, without_numbers
from boltmesh.telemetry.tensor_plan import PlannedBlocks, PlannedParameters, TensorPlanTable


def told(plan: TensorPlan) -> TensorPlanTable:
    """Return the table of a plan, how its blocks are run, and its notes."""
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
            # A kind that names no block as its own is one block alone, or what lies in none.
            PlannedBlocks(first, counts.get(first, 1), backend)
            for first, backend in plan.backends.items()
        ),
        notes=tuple(dict.fromkeys(map(without_numbers, plan.notes))),
    )
