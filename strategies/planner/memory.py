"""How much memory one rank needs, by kind and place: between two steps, and at the step's peak.

Between steps is what telemetry counts: shards with their padding, gradients that stay until they
are zeroed, optimizer state. The peak adds gathered units, collectives' buffers and activations at
the fullest of its moments. It counts tensors: what Python, torch's libraries and the allocator's
fragments take comes on top.

Sources: ZeRO, Rajbhandari et al. 2020, section 5, https://arxiv.org/abs/1910.02054; what is in
flight follows ``fully_shard``'s own order of allocations.
"""

from dataclasses import dataclass, replace

from boltmesh.strategies.planner.amounts import Bytes, total
from boltmesh.strategies.planner.backward import BackwardPass
from boltmesh.strategies.planner.in_flight import Flight
from boltmesh.strategies.planner.layout import Job, Sharing
from boltmesh.strategies.planner.model import Activations, ModelShape
from boltmesh.strategies.planner.offload import (
    fetched_ahead,
    offloaded_state,
    parameter_copies,
)

NO_ACTIVATIONS = Activations(0, 0, "not known")


@dataclass(frozen=True)
class MemoryEstimate:
    """The memory of one rank; the first one, whose shards are never smaller than another's."""

    kept: dict[str, Bytes]
    """Between two steps, by kind as telemetry names them."""
    peak: Bytes
    """The most at one time within a step; of host and disk what is reserved throughout."""
    peak_moment: str
    """When the device is fullest."""
    moments: dict[str, int]
    """Bytes on the device at each moment that was compared."""

    @property
    def between_steps(self) -> Bytes:
        """Everything that is kept."""
        return total(self.kept.values())


def estimate_memory(model: ModelShape, sharing: Sharing, job: Job) -> MemoryEstimate:
    """Estimate what one rank needs."""
    model = model.in_tiles(sharing.tile_bytes)
    if sharing.stage == 0:
        kept, moments = _replicas(model, sharing, job)
    else:
        kept, moments = _shards(model, sharing, job)
    moment = max(moments, key=lambda each: moments[each])
    everything = total(kept.values())
    peak = Bytes(moments[moment], everything.host, everything.disk)
    if job.is_on_host:
        kept = {kind: each.on_host() for kind, each in kept.items()}
        moments = {name: size + peak.host for name, size in moments.items()}
        peak = peak.on_host()
    return MemoryEstimate(kept, peak, moment, moments)


def _replicas(
    model: ModelShape, sharing: Sharing, job: Job
) -> tuple[dict[str, Bytes], dict[str, int]]:
    """Everything whole, as DistributedDataParallel has it."""
    parameters, gradients = _stored(model, job, 1), _stored(model, job, 1, trained=True)
    state = job.state_copies * gradients
    activations = model.activations or NO_ACTIVATIONS
    base = parameters + state + model.buffer_bytes
    saved = activations.saved_bytes + _casts(model, job, is_sharded=False)
    kept = {
        "parameters": Bytes(parameters),
        "gradients": Bytes(gradients),
        "optimizer": Bytes(state),
        "buffers": Bytes(model.buffer_bytes),
    }
    # Gradients are in the buckets that DDP reduces where nobody looks at them; those of the batches
    # before the last one are added up beside them.
    is_in_buckets = sharing.keeps_in_buckets
    if is_in_buckets is None:
        is_in_buckets = not (model.reads_gradients or job.reads_gradients)
    buckets = 0 if is_in_buckets else gradients
    held = gradients + (buckets if job.num_microbatches == 1 else gradients)
    moments = {
        "forward pass": base + held + saved,
        "backward pass": base + held + saved + activations.transient_bytes,
        "optimizer step": base + gradients + buckets,
    }
    return kept, moments


def _shards(
    model: ModelShape, sharing: Sharing, job: Job
) -> tuple[dict[str, Bytes], dict[str, int]]:
    """Shares of everything, and what is gathered for a while."""
    flight = Flight(model.units, job)
    activations = model.activations or NO_ACTIVATIONS
    shares = _stored(model, job, job.num_shards, trained=True)
    if sharing.has_engine:
        offloaded = offloaded_state(model, sharing, job)
        parameters = parameter_copies(model, sharing, job)
        gradients, state = offloaded.gradients, offloaded.state
        is_accumulated_there = job.num_microbatches > 1 or job.is_on_host
        shares = shares if is_accumulated_there else gradients.device
    else:
        parameters = Bytes(_stored(model, job, job.num_shards))
        gradients = Bytes(shares)
        state = Bytes(job.state_copies * shares)
    kept = {
        "parameters": parameters,
        "gradients": gradients,
        "optimizer": state,
        "buffers": Bytes(model.buffer_bytes),
    }
    base = parameters.device + state.device + model.buffer_bytes
    base += fetched_ahead(model, sharing, job)
    is_accumulated = job.num_microbatches > 1
    whole = flight.all_gradients() if sharing.stage == 1 and is_accumulated else 0
    saved = activations.saved_bytes + _casts(model, job, is_sharded=True)
    backward = BackwardPass(
        flight,
        replace(activations, saved_bytes=saved),
        stage=sharing.stage,
        is_accumulated=is_accumulated,
        gradients=shares,
    )
    first = flight.forward(is_freed=sharing.stage == 3)
    if sharing.stage == 3 or sharing.has_engine or model.keeps_gradients:
        first += gradients.device  # of the step before: zeroed after the forward pass
    else:
        first = max(first, gradients.device)  # freed as units are gathered
    if sharing.stage < 3 and is_accumulated:
        # Units stay gathered for the batches that follow, with their gradients in stage 1.
        later = flight.all_gathered() + (whole or gradients.device)
        first = max(first, later)
    moments = {
        "forward pass": base + first + saved,
        "backward pass": base + backward.most(),
        "optimizer step": base + gradients.device,
    }
    return kept, moments


def _stored(model: ModelShape, job: Job, num_shards: int, *, trained: bool = False) -> int:
    """Bytes of a rank's shards at rest, of all parameters or of the trained ones."""
    return sum(
        each.padded_numel(num_shards) * job.widths.store(each.element_bytes)
        for unit in model.units
        for each in unit.tensors
        if each.is_trained or not trained
    )


def _casts(model: ModelShape, job: Job, *, is_sharded: bool) -> int:
    """Copies that autocast keeps of what is not gathered in what it computes in."""
    if job.widths.computed is None:
        return 0
    return job.widths.computed * sum(
        each.numel
        for unit in model.units
        if not (is_sharded and unit.is_autocast)
        for each in unit.tensors
        if each.is_multiplied
    )
