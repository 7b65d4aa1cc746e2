"""Final steps of buckets on a disk within the backward pass, where nothing is ever clipped.

Gradients that are kept until the optimizer's step take 4 bytes per parameter, more than all else
that a model on a disk keeps in memory. Where their norm changes nothing, a bucket is stepped as
soon as its gradients are complete, and they are freed. Such a step cannot be undone, so reading the
parameters before the optimizer's step raises instead of returning a mixture of old and new.
"""

from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule
from torch.nn import Module

from boltmesh.errors import OffloadError
from boltmesh.strategies.object_collectives import noop
from boltmesh.strategies.offload.buckets import Bucket, Slot
from boltmesh.strategies.offload.stepper import BucketGradients, BucketStep, Stepper, WorkerTask
from boltmesh.strategies.offload.update_rule import Update
from boltmesh.strategies.torch_compat.autograd import is_in_backward, not_compiled
from boltmesh.strategies.torch_compat.fsdp_hooks import skip_gathers_ahead

WAITING_BYTES = 64 << 20
"""Limit of gradients that wait for the disk. The next forward pass first needs what is stepped
last, so a backward pass that waits for the disk loses next to nothing."""

KEEP_ADVICE = (
    "Define on_after_backward in the LightningModule: gradients are then kept until the step."
)


class BegunStep:
    """A bucket that was stepped in this backward pass; its gradients are freed."""

    def __init__(self, step: BucketStep, num_arrivals: int) -> None:
        self.updates: Mapping[Slot, Update] = step.updates
        self.num_arrivals = num_arrivals
        self._square = 0.0
        self.weighing = WorkerTask(partial(self._weigh, step.gradients))

    def _weigh(self, gradients: BucketGradients) -> None:
        self._square = gradients.square()

    def square(self) -> float:
        """Return the sum of squares of the gradients on this rank."""
        self.weighing.wait()
        return self._square


class BackwardStepper:
    """Tracks which buckets may be stepped in the backward pass, and which have been.

    The gradients of a unit that runs twice in a step are reduced twice, and the first reduction
    cannot be distinguished from the last; the same holds for a weight used by several graphs. They
    are recognised by counting forward calls, and are stepped by the optimizer's step.
    """

    def __init__(self) -> None:
        self._is_on = False
        self._calls: Counter[str] = Counter()
        self._in_graph: set[str] = set()
        self._complete: set[str] = set()
        self._begun: dict[Bucket, BegunStep] = {}
        self._waiting: deque[tuple[WorkerTask, int]] = deque()
        self._limit_bytes = WAITING_BYTES
        self._undo: list[Callable[[], None]] = []

    def start(
        self, units: Mapping[str, FSDPModule], layers: Mapping[str, Sequence[Module]]
    ) -> None:
        """Allow early steps.

        Args:
            units: FSDP2 units by bucket name.
            layers: Modules that use a weight outside of units, by the weight's name.
        """
        self._is_on = True
        for name, unit in units.items():
            assert isinstance(unit, Module)
            count = not_compiled(partial(self._count, name))
            self._undo.append(unit.register_forward_pre_hook(count).remove)
            self._undo.append(skip_gathers_ahead(unit, partial(self._is_over, name)))
        for name, users in layers.items():
            count = not_compiled(partial(self._count_layer, name))
            self._undo.extend(each.register_forward_pre_hook(count).remove for each in users)

    def limit(self, buckets: Sequence[Bucket]) -> None:
        """Limit waiting gradients by the model's size: disk offload means that memory is short."""
        total = sum(4 * bucket.numel for bucket in buckets)
        self._limit_bytes = min(WAITING_BYTES, total // 16)

    def close(self) -> None:
        """Remove all hooks and drop all records."""
        for undo in self._undo:
            undo()
        self._undo.clear()
        self.end_step()
        self._begun.clear()
        self._waiting.clear()
        self._is_on = False

    def _count(self, name: str, module: Module, _: Any) -> None:
        # A checkpointed layer runs again within the backward pass and is reduced once; before that
        # it may run without gradients. The root (named "") runs so in an evaluation only.
        is_training = torch.is_grad_enabled() or (bool(name) and module.training)
        if is_training and not is_in_backward():
            self._calls[name] += 1

    def _count_layer(self, name: str, module: Module, _: Any) -> None:
        # A graph's gradients are summed before they arrive, once. Reentrant checkpointing makes a
        # graph of its own within the backward pass.
        if is_in_backward():
            return
        if not torch.is_grad_enabled():
            self._calls[name] += module.training
        elif name not in self._in_graph:
            self._in_graph.add(name)
            self._calls[name] += 1

    def allows(self, bucket: Bucket, num_arrivals: int) -> bool:
        """Whether a bucket with this number of gradients is complete and may be stepped."""
        if not self._is_on or num_arrivals != len(bucket.slots) or self._calls[bucket.name] > 1:
            return False
        self._complete.add(bucket.name)
        return any(chunk.place == "disk" for chunk in bucket.chunks)

    def _is_over(self, name: str) -> bool:
        # The same on all ranks, also those that have no part of the unit on their disk.
        return name in self._complete and self._calls[name] <= 1

    def begin(self, bucket: Bucket, step: BucketStep, stepper: Stepper) -> None:
        """Step a bucket, after waiting until its gradients fit into the limit."""
        num_bytes = sum(each.nbytes for each in step.gradients.held())
        self._make_room(num_bytes)
        begun = self._begun[bucket] = BegunStep(step, step.gradients.num_arrivals)
        stepper.worker.submit(begun.weighing)
        stepper.step(bucket, step, 1.0)
        # This task ends when all that was submitted before has ended.
        self._waiting.append((stepper.worker.submit(WorkerTask(noop)), num_bytes))

    def _make_room(self, num_bytes: int) -> None:
        while self._waiting:
            job, _ = self._waiting[0]
            if not job.is_done:
                waiting = sum(each for _, each in self._waiting)
                if waiting + num_bytes <= self._limit_bytes:
                    return
                job.wait()
            self._waiting.popleft()

    def begun(self, bucket: Bucket) -> BegunStep | None:
        """Return the bucket's early step, until ``finish``."""
        return self._begun.get(bucket)

    def finish(self, bucket: Bucket, updates: Mapping[Slot, Update]) -> None:
        """Accept the early step as the optimizer's step.

        Raises:
            OffloadError: When the optimizer's settings have changed since.
        """
        if self._begun.pop(bucket).updates != updates:
            raise OffloadError(
                f"The optimizer's settings for {bucket.slots[0].name} were changed between the "
                f"backward pass and the step, when it had been stepped already. {KEEP_ADVICE}"
            )

    def end_step(self) -> None:
        """Forget the counted calls. Called after the optimizer's step."""
        self._calls.clear()
        self._in_graph.clear()
        self._complete.clear()

    def check(self, bucket: Bucket, doing: str) -> None:
        """Raise if a bucket, which ``doing`` needs, was stepped in a step that is not over."""
        if bucket in self._begun:
            raise OffloadError(
                f"{bucket.slots[0].name} has been stepped within the backward pass, for gradients "
                f"are not clipped, and now {doing}. {KEEP_ADVICE}"
            )

    def check_all(self, doing: str) -> None:
        """Call ``check`` for every bucket."""
        for bucket in self._begun:
            self.check(bucket, doing)

    @property
    def is_half_done(self) -> bool:
        """Whether buckets were stepped whose optimizer step is not over."""
        return bool(self._begun)
