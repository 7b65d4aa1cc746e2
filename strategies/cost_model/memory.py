"""Memory of one rank, by kind and place: between two steps, and at the peak of a step.

Memory between steps is what telemetry counts: shards with their padding, gradients that stay until
they are zeroed, optimizer state. The peak adds gathered units, buffers of collectives and
activations, at the fullest moment of the step. Only tensors are counted: Python, torch's libraries
and fragments of the allocator come on top.

``estimate_memory`` covers replicas and ZeRO. Its peak walks through the backward pass, last unit
first, with three moments per unit: its backward begins, its gradients are complete, they are copied
into the reduction. ``fully_shard`` gathers one unit ahead (stage 3), frees a unit's parameters
before it reduces its gradients, and keeps the input of a reduction until the next unit's.

``estimate_late_memory`` covers the data axis beside a pipeline, where the gradients of a batch are
reduced when all of them exist. Between steps nothing differs. Within the batches of a step, full
parameters exist in addition to shards, and the gradients of a batch are computed in addition to the
accumulated ones.

Sources: ZeRO, Rajbhandari et al. 2020, section 5, https://arxiv.org/abs/1910.02054; memory in
flight follows the order of allocations in ``fully_shard``.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import ceil

from boltmesh.strategies.cost_model.model import (
    REPLICA,
    Activations,
    Bytes,
    JobShape,
    ModelShape,
    OwnedExperts,
    ShardingLayout,
    UnitShape,
    total,
)
from boltmesh.strategies.cost_model.offload import fetched_ahead, offloaded_state, parameter_copies
from boltmesh.strategies.cost_model.traffic import InFlightMemory


class BackwardPass:
    """The backward pass of the last microbatch of a step.

    Args:
        flight: The units, and their sizes when gathered.
        activations: Bytes that the forward pass has saved.
        stage: ZeRO stage.
        is_accumulated: Whether there were microbatches before this one.
        gradients: Bytes of this rank's shards of all gradients, on the device.
    """

    def __init__(
        self,
        flight: InFlightMemory,
        activations: Activations,
        *,
        stage: int,
        is_accumulated: bool,
        gradients: int,
    ) -> None:
        self.flight = flight
        self.activations = activations
        self.is_freed = stage == 3
        self.is_whole = stage == 1 and is_accumulated
        self.is_shared = stage > 1 and is_accumulated
        self.gradients = gradients

    def most(self) -> int:
        """Return the most bytes at one time, in addition to those that a rank keeps."""
        tiles = max((each.backward() for each in self.flight.tiles), default=0)
        return max(self._moments()) + tiles

    def _moments(self) -> Iterator[int]:
        flight = self.flight
        order = list(reversed(flight.freed))
        gathered = flight.roots_gathered() if self.is_freed else flight.all_gathered()
        whole = flight.all_gradients() if self.is_whole else 0
        # The model's code decides when gradients of a root arrive: a head's early, an embedding's
        # late.
        of_roots = 0 if self.is_whole else sum(map(flight.gradient, flight.roots))
        saved, before = self.activations.saved_bytes, 0
        yield gathered + whole + self._shares(0) + saved + self.activations.transient_bytes
        for at, unit in enumerate(order):
            held = gathered + whole + of_roots + self._shares(at)
            remaining = saved * (len(order) - at) // len(order)
            after = saved * (len(order) - at - 1) // len(order)
            own = flight.gathered(unit)
            ahead = self._ahead(order, at)
            if self.is_freed:
                held += own
            gradient = 0 if self.is_whole else flight.gradient(unit)
            yield held + ahead + before + remaining
            yield held + ahead + before + gradient + after
            if self.is_freed:
                held -= own
            else:
                gathered -= own
                held -= own
            before = flight.reduced(unit)
            yield held + ahead + gradient + before + after
            if self.is_whole:
                whole -= flight.gradient(unit, accumulated=True)
        held = gathered + whole + of_roots + self._shares(len(order))
        yield held + before
        yield held + max(map(flight.reduced, flight.roots), default=0)

    def _ahead(self, order: list[UnitShape], at: int) -> int:
        if not self.is_freed or at + 1 == len(order):
            return 0
        return self.flight.collective(order[at + 1])

    def _shares(self, num_done: int) -> int:
        """Return the bytes of this rank's shards of the gradients reduced so far."""
        if self.is_shared:
            return self.gradients
        return self.gradients * num_done // max(1, len(self.flight.freed))


NO_ACTIVATIONS = Activations(0, 0, "not known")


@dataclass(frozen=True)
class MemoryEstimate:
    """The memory of one rank: the first one, whose shards are the largest."""

    kept: dict[str, Bytes]
    """Bytes between two steps, by kind as in telemetry."""
    peak: Bytes
    """Most bytes at one time within a step; for host and disk the bytes reserved throughout."""
    peak_moment: str
    """The moment at which the device is fullest."""
    moments: dict[str, int]
    """Bytes on the device at each compared moment."""

    @property
    def between_steps(self) -> Bytes:
        """Sum of everything that is kept."""
        return total(self.kept.values())

    def beside(self, other: "MemoryEstimate") -> "MemoryEstimate":
        """Return the sum of both, with the peak of ``other`` at every moment."""
        kinds = {**self.kept, **other.kept}
        peak = other.peak
        return MemoryEstimate(
            {kind: self.kept.get(kind, Bytes()) + other.kept.get(kind, Bytes()) for kind in kinds},
            self.peak + peak,
            self.peak_moment,
            {name: size + peak.device + peak.host for name, size in self.moments.items()},
        )

    def between(self, other: "MemoryEstimate", part: float) -> "MemoryEstimate":
        """Return a weighted mean of both, with the weight ``part`` for ``other``."""

        def mean(one: int, two: int) -> int:
            return ceil((1 - part) * one + part * two)

        peaks = zip(self.peak.items(), other.peak.items(), strict=True)
        return replace(
            other,
            peak=Bytes(*(mean(one, two) for (_, one), (_, two) in peaks)),
            moments={
                name: mean(self.moments.get(name, size), size)
                for name, size in other.moments.items()
            },
        )

    def at_fullest_moment(self) -> "MemoryEstimate":
        """Return the estimate with its peak computed again, after ``moments`` has changed."""
        moment = max(self.moments, key=lambda each: self.moments[each])
        place = "device" if self.peak.device else "host"
        peak = replace(self.peak, **{place: self.moments[moment]})
        return replace(self, peak=peak, peak_moment=moment)


def copied_bytes(kept: Mapping[str, Bytes], *, num_hosts: int, is_replica: bool = False) -> int:
    """Return the bytes of host memory that ``checkpoint_in_memory_every`` takes for a rank.

    Two copies of the rank's state, while the newer one is written; with several hosts also two
    of that of a rank of another host. With replicas only one rank of a host has copies.
    """
    saved = kept.get("parameters", Bytes()) + kept.get("optimizer", Bytes())
    return (2 if num_hosts == 1 or is_replica else 4) * (saved.device + saved.host)


def estimate_memory(
    model: ModelShape,
    sharing: ShardingLayout,
    job: JobShape,
    experts: OwnedExperts | None = None,
) -> MemoryEstimate:
    """Estimate the memory of one rank.

    Args:
        model: The model.
        sharing: How the model is sharded over the data axis.
        job: The ranks of the data axis.
        experts: Experts that are not sharded, but owned by ranks.
    """
    if experts is not None:
        model, owned = experts.split(model)
        return estimate_memory(model, sharing, job).beside(_memory_of(owned, job, experts))
    model = model.in_tiles(sharing.tile_bytes)
    if sharing.stage == 0:
        kept, moments = _replicas(model, sharing, job)
    else:
        kept, moments = _shards(model, sharing, job)
    moment = max(moments, key=lambda each: moments[each])
    everything = total(kept.values()) + (model.activations or NO_ACTIVATIONS).elsewhere
    peak = Bytes(moments[moment], everything.host, everything.disk)
    if job.is_on_host:
        kept = {kind: each.on_host() for kind, each in kept.items()}
        moments = {name: size + peak.host for name, size in moments.items()}
        peak = peak.on_host()
    return MemoryEstimate(kept, peak, moment, moments)


def _memory_of(owned: ModelShape, job: JobShape, experts: OwnedExperts) -> MemoryEstimate:
    """Return the memory of a rank's experts, which are replicated over ``num_copies`` ranks."""
    return estimate_memory(owned, REPLICA, replace(job, num_ranks=experts.num_copies))


def _replicas(
    model: ModelShape, sharing: ShardingLayout, job: JobShape
) -> tuple[dict[str, Bytes], dict[str, int]]:
    """Return memory by kind and by moment, unsharded as in DistributedDataParallel."""
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
    # DDP's buckets hold the gradients unless a hook reads them; gradients of earlier batches are
    # accumulated in addition to them.
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
    model: ModelShape, sharing: ShardingLayout, job: JobShape
) -> tuple[dict[str, Bytes], dict[str, int]]:
    """Return memory by kind and by moment, for shards and gathered units."""
    flight = InFlightMemory(model.units, job)
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
        first += gradients.device  # of the previous step: zeroed after the forward pass
    else:
        first = max(first, gradients.device)  # freed as units are gathered
    if sharing.stage < 3 and is_accumulated:
        # Units stay gathered for the next batches, with their gradients in stage 1.
        later = flight.all_gathered() + (whole or gradients.device)
        first = max(first, later)
    moments = {
        "forward pass": base + first + saved,
        "backward pass": base + backward.most(),
        "optimizer step": base + gradients.device,
    }
    return kept, moments


def _stored(model: ModelShape, job: JobShape, num_shards: int, *, trained: bool = False) -> int:
    """Return the bytes of a rank's stored shards, of all parameters or of the trained ones."""
    return sum(
        each.padded_numel(num_shards) * job.widths.store(each.element_bytes)
        for unit in model.units
        for each in unit.tensors
        if each.is_trained or not trained
    )


def _casts(model: ModelShape, job: JobShape, *, is_sharded: bool) -> int:
    """Return the bytes of casts that autocast keeps of parameters gathered in another dtype."""
    if job.widths.computed is None:
        return 0
    return job.widths.computed * sum(
        each.numel
        for unit in model.units
        if not (is_sharded and unit.is_autocast)
        for each in unit.tensors
        if each.is_multiplied
    )


def estimate_late_memory(
    model: ModelShape,
    sharing: ShardingLayout,
    job: JobShape,
    *,
    activation_bytes: int,
    bucket_bytes: int,
    num_versions: int = 1,
    experts: OwnedExperts | None = None,
) -> MemoryEstimate:
    """Estimate the memory of one rank of a pipeline.

    Args:
        model: The parameters of the rank's stages, as divided by the tensor axis.
        sharing: How they are sharded over the data axis.
        job: The ranks of the data axis.
        activation_bytes: Most bytes kept for its backward passes.
        bucket_bytes: Copies of gradients that replicas reduce at the same time.
        num_versions: Versions of the trained parameters, and of their gradients: two if batches
            finish after the next optimizer step.
        experts: Experts that are not sharded, but owned by ranks.
    """
    if experts is not None:
        model, owned = experts.split(model)
        rest = estimate_late_memory(
            model,
            sharing,
            job,
            activation_bytes=activation_bytes,
            bucket_bytes=bucket_bytes,
            num_versions=num_versions,
        )
        return rest.beside(_memory_of(owned, job, experts))
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
        flight = InFlightMemory(model.units, job)
        whole, made = flight.all_gathered(), flight.all_gradients()
        # Stage 1 accumulates the batches of a step before it reduces.
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
