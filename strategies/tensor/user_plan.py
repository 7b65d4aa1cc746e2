"""Changes a plan to what a user's own mapping says."""

from collections.abc import Mapping
from dataclasses import replace

from boltmesh.strategies.tensor.analysis.analyse import Analysis
from boltmesh.strategies.tensor.plan import TensorPlan
from boltmesh.strategies.tensor.planning import make_plan


def with_user_plan(plan: TensorPlan, analysis: Analysis, mapping: Mapping[str, str]) -> TensorPlan:
    """Return a plan in which what the mapping names is as it says, and the rest as it can be.

    Parameters of one axis are divided together: where one is to be whole, all are, and the notes
    say which.

    Args:
        plan: As it was found.
        analysis: What it was made of.
        mapping: Style, or ``whole``, by pattern of the names of parameters or modules; ``*``
            stands for any part of a name.

    Raises:
        ConfigError: When a pattern matches nothing, or something that cannot be divided so.
    """
    changed = make_plan(
        analysis,
        plan.size,
        loss_parallel="auto" if plan.divides_logits else False,
        sequence_parallel=plan.sequence is not None,
        wanted=mapping,
    )
    lost = [name for name in plan.sharded if name not in changed.sharded]
    notes = [*plan.notes]
    if lost:
        notes.append(f"whole by the plan that was given: {', '.join(lost)}")
    return replace(changed, notes=tuple(notes))
