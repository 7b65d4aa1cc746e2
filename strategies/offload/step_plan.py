"""What the coming step of a bucket is to do, by the optimizer's settings at this moment."""

from collections.abc import Collection

from torch.optim import Optimizer

from boltmesh.strategies.offload.buckets import Bucket, Slot
from boltmesh.strategies.offload.gradients import BucketGradients
from boltmesh.strategies.offload.kept import KeptState
from boltmesh.strategies.offload.rule import Update
from boltmesh.strategies.offload.stepper import BucketStep


def plan_step(
    kept: KeptState, optimizer: Optimizer, bucket: Bucket, gradients: BucketGradients
) -> BucketStep:
    """Return the step of a bucket with these gradients."""
    updates = plan_updates(kept, optimizer, bucket, gradients.slots)
    return BucketStep(kept.rules[optimizer], gradients, updates)


def plan_updates(
    kept: KeptState, optimizer: Optimizer, bucket: Bucket, slots: Collection[Slot]
) -> dict[Slot, Update]:
    """Return the settings and the number of the coming step for those of a bucket's slots."""
    rule = kept.rules[optimizer]
    updates: dict[Slot, Update] = {}
    for group in optimizer.param_groups:
        settings = None
        for parameter in group["params"]:
            own, slot = kept.place.get(parameter, (None, None))
            if own is not bucket or slot not in slots or slot is None:
                continue
            settings = settings or rule.settings(group)
            state = optimizer.state.get(parameter) or {}
            updates[slot] = Update(settings, int(state.get("step", 0)) + 1)
    return updates
