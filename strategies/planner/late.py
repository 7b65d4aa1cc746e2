"""How much memory one rank of a pipeline needs, whose gradients come all at once.

Between two steps it holds what any rank of its data axis holds. Within the batches of a step whole
parameters stand beside shards, and the gradients of a batch are made from nothing beside those of
the batch, or the step, before: they are added, and reduced, when all of the batch are there.
"""

from dataclasses import replace

from boltmesh.strategies.planner.amounts import Bytes, total
from boltmesh.strategies.planner.in_flight import Flight
from boltmesh.strategies.planner.layout import Job, Sharing
from boltmesh.strategies.planner.memory import MemoryEstimate, estimate_memory
from boltmesh.strategies.planner.model import ModelShape


def estimate_late_memory(
    model: ModelShape,
    sharing: Sharing,
    job: Job,
    *,
    activation_bytes: int,
    bucket_bytes: int,
    num_versions: int = 1,
) -> MemoryEstimate:
    """Estimate what one rank needs.

    Args:
        model: What the rank holds: its stages, and of them its part.
        sharing: How that is shared out over the data axis.
        job: Of the data axis.
        activation_bytes: What it keeps for its backward passes at most.
        bucket_bytes: Copies of gradients that replicas have under way at once.
        num_versions: Of the trained parameters, and of their gradients: two where batches are
            finished behind the next optimizer step.
    """
    kept = estimate_memory(replace(model, activations=None), sharing, job).kept
    kept["parameters"] += _times(kept["gradients"], num_versions - 1)
    kept["gradients"] = _times(kept["gradients"], num_versions)
    place = "host" if job.is_on_host else "device"
    held = {kind: getattr(amount, place) for kind, amount in kept.items()}
    gradients = held.pop("gradients")
    base = sum(held.values())
    if sharing.stage == 0 or job.num_shards == 1:
        buckets = min(bucket_bytes, gradients) if job.num_ranks > 1 else 0
        moments = {
            "batch": base + 2 * gradients + activation_bytes,
            "averaging gradients": base + 2 * gradients + buckets,
            "optimizer step": base + gradients,
        }
    else:
        flight = Flight(model.units, job)
        whole, made = flight.all_gathered(), flight.all_gradients()
        # Stage 1 adds the batches of a step up before it reduces.
        before = made if sharing.stage == 1 and job.num_microbatches > 1 else gradients
        reduced = max((flight.reduced(each) for each in flight.units), default=0)
        moments = {
            "batch": base + whole + made + before + activation_bytes,
            "reducing gradients": base + whole + made + before + reduced,
            "optimizer step": base + gradients,
        }
    moment = max(moments, key=lambda each: moments[each])
    everything = total(kept.values())
    peak = Bytes(moments[moment], everything.host, everything.disk)
    if job.is_on_host:
        peak = Bytes(0, moments[moment], everything.disk)
    return MemoryEstimate(kept, peak, moment, moments)


def _times(amount: Bytes, count: int) -> Bytes:
    return Bytes(amount.device * count, amount.host * count, amount.disk * count)
