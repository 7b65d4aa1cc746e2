"""How a plan divides parameters, in the words of checkpoints."""

import torch

from boltmesh.strategies.checkpoint.parts import Division, Stretch
from boltmesh.strategies.tensor.plan import ShardedParameter, TensorPlan
from boltmesh.strategies.tensor.sections import runs


def division_of(entry: ShardedParameter, size: int, rank: int) -> Division:
    """Return what a rank keeps of a parameter."""
    stretches = (
        Stretch(each.start, each.local_start, each.length)
        for each in runs(entry.sections, size, rank)
    )
    return Division(torch.Size(entry.shape), entry.dim, tuple(stretches))


def divisions_of(plan: TensorPlan, rank: int) -> dict[str, Division]:
    """Return what a rank keeps of each divided parameter, by all of its names."""
    found = {}
    for entry in plan.sharded.values():
        division = division_of(entry, plan.size, rank)
        found.update(dict.fromkeys(entry.names, division))
    return found
