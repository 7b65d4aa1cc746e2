"""Gradients from their arrival until their step: collected, summed, clipped, stepped early.

``GradientHandler`` takes gradients as they are reduced. A bucket whose last gradient has arrived is
stepped at once where possible: speculatively, so that the step can be undone, or finally
(``step_in_backward``).

``ClipPredictor`` decides whether a bucket may be stepped before the norm of all gradients is known.
Such a step is right if nothing gets clipped. A wrong one costs a correction of 2.7 steps, so
speculative steps are made only while they are likely to hold. ``Clipper`` holds the norm and the
coefficient for the coming step; ``plan_step`` combines a bucket's gradients with the optimizer's
present settings.
"""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from boltmesh.strategies.grad_norm import HasSquaredNorm, joint_norm
from boltmesh.strategies.object_collectives import noop
from boltmesh.strategies.offload.buckets import Bucket, Slot
from boltmesh.strategies.offload.host_memory import HostArena
from boltmesh.strategies.offload.state import OffloadedState
from boltmesh.strategies.offload.step_in_backward import BackwardStepper
from boltmesh.strategies.offload.stepper import BucketGradients, BucketStep, Stepper, WorkerTask
from boltmesh.strategies.offload.streams import CopyStream
from boltmesh.strategies.offload.update_rule import Update, WholeRule
from boltmesh.strategies.patch import patched
from boltmesh.strategies.torch_compat.autograd import after_gradient
from boltmesh.strategies.torch_compat.tensors import local_tensor

WARMUP_STEPS = 10
"""The first steps of a run, and of a parameter, are not speculative. Gradients are clipped often at
first, and a correction then loses digits of the second moment, which is close to zero: up to a
tenth of the first step, 8e-6 of the tenth and later ones."""


class ClipPredictor:
    """Predicts from the squares that have arrived whether the norm of all gradients is clipped."""

    def __init__(self) -> None:
        self.steps = 0
        self.max_norm: float | None = None
        self._was_clipped = False
        self._last_running: dict[int, float] = {}
        self._last_total = math.inf
        self._running: dict[int, float] = {}
        self._sum = 0.0

    def add(self, key: int, square: float) -> None:
        """Add the squared norm of a bucket on this rank, in the order of arrival."""
        self._sum += square
        self._running[key] = self._sum

    def allows(self, key: int) -> bool:
        """Whether to step the bucket whose square was added last.

        This rank's sum so far is a lower bound of the total. Divided by the share of the total
        that had arrived at the same bucket in the previous step, it is a forecast.
        """
        if self.steps < WARMUP_STEPS or self._was_clipped or not math.isfinite(self._sum):
            return False
        if self.max_norm is None:
            return True
        limit = self.max_norm * self.max_norm
        before = self._last_running.get(key)
        if self._sum > limit or before is None or not math.isfinite(self._last_total):
            return False
        return before == 0 or self._sum / before * self._last_total <= limit

    def finish(self, *, norm: float | None, max_norm: float | None, was_clipped: bool) -> None:
        """Record a finished step. ``norm`` is of all ranks, None if it was not computed."""
        self.steps += 1
        self.max_norm = max_norm
        self._was_clipped = was_clipped
        self._last_total = math.inf if norm is None else norm * norm
        self._last_running = self._running
        self.forget()

    def forget(self) -> None:
        """Drop the sums since the last step: its gradients were discarded."""
        self._running = {}
        self._sum = 0.0


def plan_step(
    kept: OffloadedState, optimizer: Optimizer, bucket: Bucket, gradients: BucketGradients
) -> BucketStep:
    """Return the step of ``bucket`` with these gradients and the optimizer's present settings."""
    updates = plan_updates(kept, optimizer, bucket, gradients.slots)
    return BucketStep(kept.rules[optimizer], gradients, updates)


def plan_updates(
    kept: OffloadedState, optimizer: Optimizer, bucket: Bucket, slots: Collection[Slot]
) -> dict[Slot, Update]:
    """Return settings and step number of the coming step, for those of ``slots`` it updates."""
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


class GradientHandler:
    """Takes gradients as they arrive, and keeps those of the coming step.

    ``kept`` is the state that the gradients update, ``stepper`` runs the steps, ``lane`` copies to
    the host. ``take_away_unused`` removes a shard's gradient that was reduced, but that no rank
    had. The other arguments are those of ``OffloadEngine`` and its ``adopt``.
    """

    def __init__(
        self,
        kept: OffloadedState,
        stepper: Stepper,
        *,
        device: torch.device,
        lane: CopyStream,
        exposes_gradients: bool,
        comes_late: bool = False,
        take_away_unused: Callable[[Tensor], None] = noop,
    ) -> None:
        self.exposes_gradients = exposes_gradients
        self.is_watching = not (exposes_gradients or comes_late)
        """Whether gradients are taken as they appear, within the backward pass."""
        self.forecast = ClipPredictor()
        self.early = BackwardStepper()
        self.clipped: set[Optimizer] = set()
        """Optimizers whose gradients have been clipped at least once."""
        self._kept = kept
        self._stepper = stepper
        self._device = device
        self._lane = lane
        self._take_away_unused = take_away_unused
        self._arena = HostArena(device)
        self._host_gradients: dict[Bucket, Tensor] = {}
        self._gradients: dict[Bucket, BucketGradients] = {}
        self._weighing: dict[Bucket, WorkerTask] = {}
        self._expected: dict[Bucket, int] = {}
        self._never_guessed: set[Bucket] = set()
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []
        self._is_blocked = False

    def watch(self, buckets: Sequence[Bucket]) -> None:
        """Take the gradients of new buckets from now on."""
        for bucket in buckets:
            owner = self._kept.owner[bucket]
            if owner is None:
                continue
            is_whole = isinstance(self._kept.rules[owner], WholeRule)
            host_numel = sum(chunk.numel for chunk in bucket.host_offsets())
            if self._device.type != "cpu" and host_numel and not is_whole:
                self._host_gradients[bucket] = self._arena.take(host_numel, torch.float32)
            if self.is_watching:
                for slot in bucket.slots:
                    hook = partial(self._arrive, bucket, slot)
                    self._hooks.append(after_gradient(slot.parameter, hook))
        trained = [each for each, by in self._kept.owner.items() if by is not None]
        self.early.limit(trained)

    def close(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self.early.close()

    # As they arrive.

    def no_sync(self) -> AbstractContextManager[None]:
        """Context for the backward passes of an accumulation but the last: ``.grad`` sums up."""
        return patched(self, _is_blocked=True)

    def _arrive(self, bucket: Bucket, slot: Slot, parameter: Parameter) -> None:
        """Take a gradient that is complete on this rank. Called on the stream that reduced it."""
        if self._is_blocked:
            return
        self._take_away_unused(parameter)  # before it counts: ranks agree on what has arrived
        if parameter.grad is None:
            return
        self.early.check(bucket, "has another gradient")
        self.unguess(bucket)
        gradients = self._gradients_of(bucket)
        gradients.add(slot, local_tensor(parameter.grad))
        parameter.grad = None  # FSDP2 would add the next one into memory that is being read
        if self.early.allows(bucket, gradients.num_arrivals):
            self._step_early(bucket)
            return
        expected = self._expected.get(bucket, len(bucket.slots))
        if gradients.num_arrivals == expected:
            gradients.send()
            weigh = WorkerTask(
                partial(self._weigh, bucket, gradients), is_ready=gradients.is_copied
            )
            self._weighing[bucket] = self._stepper.worker.submit(weigh, is_urgent=True)

    def _step_early(self, bucket: Bucket) -> None:
        optimizer = self._kept.owner[bucket]
        assert optimizer is not None
        gradients = self._gradients.pop(bucket)
        gradients.send()
        step = plan_step(self._kept, optimizer, bucket, gradients)
        self.early.begin(bucket, step, self._stepper)

    def _gradients_of(self, bucket: Bucket) -> BucketGradients:
        gradients = self._gradients.get(bucket)
        if gradients is None:
            if bucket in self._host_gradients:
                self._stepper.wait(bucket)  # its memory may still be read
            host = self._host_gradients.get(bucket)
            gradients = BucketGradients(bucket, self._device, host, self._lane)
            self._gradients[bucket] = gradients
        return gradients

    def _weigh(self, bucket: Bucket, gradients: BucketGradients) -> None:
        """Add the bucket's squared norm and perhaps step it speculatively. Runs on the worker."""
        self.forecast.add(id(bucket), gradients.square())
        if bucket in self._never_guessed or not self.forecast.allows(id(bucket)):
            return
        optimizer = self._kept.owner[bucket]
        assert optimizer is not None
        if not self._may_differ_by_timing(bucket):
            return
        step = plan_step(self._kept, optimizer, bucket, gradients)
        rule, updates = step.rule, step.updates.values()
        is_reversible = all(
            rule.is_reversible(each.settings) and each.step > WARMUP_STEPS for each in updates
        )
        if is_reversible and not self._kept.copies.is_written_once(bucket):
            self._stepper.guess(bucket, step)

    def _may_differ_by_timing(self, bucket: Bucket) -> bool:
        """Whether rounding in this bucket may depend on how far a speculative step has come.

        A chunk is either stepped once, or stepped and corrected or undone. Copies of a shard on
        several ranks would diverge by it, and nothing makes them equal again.
        """
        has_copies = any(each.has_copies for each in bucket.slots)
        return not (has_copies or torch.are_deterministic_algorithms_enabled())

    def collect(self, bucket: Bucket) -> None:
        """Take what is still in ``.grad``: of earlier micro-batches, exposed, or late."""
        for slot in bucket.slots:
            gradient = slot.parameter.grad
            if gradient is not None:
                self.early.check(bucket, "has another gradient")
                self.unguess(bucket)
                self._gradients_of(bucket).add(slot, local_tensor(gradient))
                if not self.exposes_gradients:
                    slot.parameter.grad = None
        if bucket in self._gradients:
            self._gradients[bucket].send()

    def drop(self, bucket: Bucket) -> None:
        """Discard the bucket's gradients."""
        if bucket in self._gradients:
            self.unguess(bucket)
            del self._gradients[bucket]

    def unguess(self, bucket: Bucket) -> None:
        """Undo a speculative step: the bucket's parameters or gradients are needed before it."""
        if (job := self._weighing.pop(bucket, None)) is not None:
            job.wait()
        if self._stepper.is_guessed(bucket):
            self._never_guessed.add(bucket)
            self._stepper.undo(bucket)
            self._stepper.wait(bucket)  # the undo reads gradients that are about to change

    def present(self, buckets: Sequence[Bucket]) -> list[HasSquaredNorm]:
        """Return the buckets' gradients, or the known squared norms of those already stepped."""
        if not self.exposes_gradients:
            for bucket in buckets:
                self.collect(bucket)
                if (job := self._weighing.get(bucket)) is not None:
                    job.wait()
            found = [self.early.begun(each) or self._gradients.get(each) for each in buckets]
            self._stepper.worker.raise_error()
            return [each for each in found if each is not None]
        seen: list[HasSquaredNorm] = []
        for bucket in buckets:
            # Only read: ``.grad`` may still be changed.
            look = BucketGradients(bucket, self._device, None, self._lane)
            for slot in bucket.slots:
                if slot.parameter.grad is not None:
                    look.add(slot, local_tensor(slot.parameter.grad))
            if look.slots:
                seen.append(look)
        return seen

    def settle_all(self) -> None:
        """Undo the speculative steps that the worker has made or may be about to make."""
        for bucket in list(self._weighing):
            self.unguess(bucket)

    def discard(self, buckets: Sequence[Bucket]) -> None:
        """Discard the buckets' gradients, if there are any. Called when they are zeroed."""
        if any(bucket in self._gradients for bucket in buckets):
            for bucket in buckets:
                self.drop(bucket)
            self.forecast.forget()

    def held(self) -> list[Tensor]:
        """Return the tensors that hold gradients now."""
        return [tensor for each in list(self._gradients.values()) for tensor in each.held()]

    # When the optimizer steps.

    def step(
        self, optimizer: Optimizer, bucket: Bucket, coefficient: float
    ) -> Mapping[Slot, Update]:
        """Submit the step of a bucket, unless it was made early; return its updates."""
        self.collect(bucket)
        if (job := self._weighing.pop(bucket, None)) is not None:
            job.wait()
        if (begun := self.early.begun(bucket)) is not None:
            self._expected[bucket] = begun.num_arrivals
            updates = plan_updates(self._kept, optimizer, bucket, begun.updates)
            self.early.finish(bucket, updates)
            return updates
        gradients = self._gradients.pop(bucket, None)
        if gradients is None:
            return {}
        self._expected[bucket] = gradients.num_arrivals
        step = plan_step(self._kept, optimizer, bucket, gradients)
        self._stepper.step(bucket, step, coefficient)
        return step.updates


class Clipper:
    """Holds the gradient norm and the clipping coefficient of each optimizer until its step."""

    def __init__(
        self, kept: OffloadedState, arrivals: GradientHandler, device: torch.device
    ) -> None:
        self.norms: dict[Optimizer, float | None] = {}
        self.max_norms: dict[Optimizer, float] = {}
        self._kept = kept
        self._arrivals = arrivals
        self._device = device
        self._coefficients: dict[Optimizer, float] = {}

    def coefficient(self, optimizer: Optimizer) -> float:
        """Factor applied to the gradients in the coming step."""
        return self._coefficients.get(optimizer, 1.0)

    def forget(self, optimizer: Optimizer) -> None:
        """Drop norm and coefficient: the gradients are gone."""
        self.norms.pop(optimizer, None)
        self._coefficients.pop(optimizer, None)

    def gradient_norm(self, optimizer: Optimizer) -> float | None:
        """Return the 2-norm of an optimizer's gradients over all ranks, before clipping.

        Collective over the ranks that share the model. None when there is no gradient.
        """
        if optimizer not in self.norms or self._arrivals.exposes_gradients:
            self.norms[optimizer] = self._norm(optimizer)
        return self.norms[optimizer]

    def _norm(self, optimizer: Optimizer) -> float | None:
        buckets = self._kept.buckets_of(optimizer)
        present = self._arrivals.present(buckets)
        if not present and len(self._kept.shares) == 1:
            return None  # the same on all ranks of the data axis
        groups = [each.group for each in self._kept.shares if each.group.size() > 1]
        return joint_norm(present, groups, self._device)

    def clip(self, optimizer: Optimizer, max_norm: float) -> Tensor:
        """Clip an optimizer's gradients, in the coming step or in ``.grad`` where they are exposed.

        Collective over the ranks that share the model.

        Returns:
            Their 2-norm over all ranks before clipping, a scalar; 0 without gradients.
        """
        self._arrivals.early.check_all("its gradients are clipped")
        norm = self.gradient_norm(optimizer)
        self.max_norms[optimizer] = max_norm
        self._arrivals.clipped.add(optimizer)
        if norm is None:
            return torch.zeros((), device=self._device)
        before = self._coefficients.get(optimizer, 1.0)
        coefficient = max_norm / (norm * before + 1e-6)
        coefficient = min(coefficient, 1.0)  # in this order NaN stays NaN, as in torch
        if self._arrivals.exposes_gradients:
            self._scale(optimizer, coefficient)
        else:
            self._coefficients[optimizer] = before * coefficient
        return torch.full((), norm * before, device=self._device)

    def _scale(self, optimizer: Optimizer, coefficient: float) -> None:
        if coefficient == 1.0:
            return
        for bucket in self._kept.buckets_of(optimizer):
            for slot in bucket.slots:
                if slot.parameter.grad is not None:
                    local_tensor(slot.parameter.grad).mul_(coefficient)
