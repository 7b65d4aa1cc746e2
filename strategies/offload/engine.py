"""The offload engine: optimizer state and parameters away from the device, stepped on the host.

Gradients are taken as FSDP2 reduces them. A bucket whose last gradient is in is stepped at once,
while the backward pass goes on, as if nothing was clipped; when the norm of all gradients is known
the guess is committed or corrected. See ``speculation`` for when that is worth it.

What waits for what: a shard that is gathered, read or written waits for the steps of its own
bucket. ``step`` returns while steps are pending.
"""

import logging
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.nn import Module, Parameter
from torch.optim import Optimizer
from typing_extensions import override

from boltmesh.errors import ConfigError, OffloadError
from boltmesh.strategies.offload.adam import AdamRule
from boltmesh.strategies.offload.arena import HostArena
from boltmesh.strategies.offload.buckets import Bucket, Slot
from boltmesh.strategies.offload.disk.preflight import DiskReport
from boltmesh.strategies.offload.gradients import BucketGradients
from boltmesh.strategies.offload.kept import KeptState
from boltmesh.strategies.offload.lanes import CopyLane
from boltmesh.strategies.offload.layout import (
    Held,
    has_copies,
    held_units,
    shard_groups,
    unknown_parameters,
)
from boltmesh.strategies.offload.norms import joint_norm
from boltmesh.strategies.offload.opening import OffloadPlan
from boltmesh.strategies.offload.reduction import HostReduction, ReusedMemory
from boltmesh.strategies.offload.rule import Update
from boltmesh.strategies.offload.shard import OffloadedShard
from boltmesh.strategies.offload.sources import ParameterSource, Settling
from boltmesh.strategies.offload.speculation import Forecast
from boltmesh.strategies.offload.stepper import BucketStep, Stepper
from boltmesh.strategies.offload.taking import take_over
from boltmesh.strategies.offload.worker import Job
from boltmesh.strategies.torch_compat import (
    after_gradient,
    local_tensor,
    reduce_with,
    watch_dropped_gathers,
)
from boltmesh.telemetry.recording.memory_walk import StoredBytes
from boltmesh.telemetry.recording.recorder import NullRecorder, Recorder

log = logging.getLogger("lightning.pytorch")


class OffloadEngine(Settling):
    """Keeps what an ``OffloadPlan`` says away from the device, and steps it.

    Args:
        plan: Where to keep what.
        device: Where the model is computed.
        rank: This rank's number in the job, for messages.
        ranks_per_node: How many ranks share the host's cores.
        compute_dtype: What sharded parameters of no FSDP2 unit are gathered in; None for theirs.
        recorder: Is told of transfers.
    """

    def __init__(
        self,
        plan: OffloadPlan,
        *,
        device: torch.device,
        rank: int = 0,
        ranks_per_node: int = 1,
        compute_dtype: torch.dtype | None = None,
        recorder: Recorder | NullRecorder | None = None,
    ) -> None:
        self.plan = plan
        self.device = device
        self._rank = rank
        self._recorder = recorder or NullRecorder()
        self._compute_dtype = compute_dtype
        self._num_threads = _worker_threads(device, ranks_per_node)
        self.kept = KeptState(self, device=device, rank=rank, recorder=self._recorder, plan=plan)
        self._stepper: Stepper | None = None
        self._failure: Exception | None = None
        self._units: dict[str, list[Held]] = {}
        self._optimizers: list[Optimizer] = []
        self._restores: list[Callable[[], None]] = []
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []
        self._reduced = ReusedMemory()
        self._lane = CopyLane(device, recorder)
        self._arena = HostArena(device)
        self._host_gradients: dict[Bucket, Tensor] = {}
        self._gradients: dict[Bucket, BucketGradients] = {}
        self._weighing: dict[Bucket, Job] = {}
        self._expected: dict[Bucket, int] = {}
        self._never_guessed: set[Bucket] = set()
        self._forecast = Forecast()
        self._norms: dict[Optimizer, float | None] = {}
        self._coefficients: dict[Optimizer, float] = {}
        self._max_norms: dict[Optimizer, float] = {}
        self._exposes_gradients = True
        self._is_blocked = False
        self._is_step_new = True

    # Setting up.

    def attach(self, module: Module, units: Mapping[str, FSDPModule]) -> None:
        """Say what FSDP2 has sharded.

        Args:
            module: The user's module.
            units: All modules of ``fully_shard`` by name, in the order of the forward pass.
        """
        self._units = held_units(module, units, self._compute_dtype)
        for unit in units.values():
            watch_dropped_gathers(unit, _abandon)
            if self.device.type == "cpu":
                self._restores.append(reduce_with(unit, self._build_reduction))

    def _build_reduction(self, num_ranks: int) -> tuple[HostReduction, Callable[[], None]]:
        reduction = HostReduction(self._reduced, num_ranks)
        return reduction, reduction.finish

    def adopt(self, optimizers: Sequence[Optimizer], *, exposes_gradients: bool) -> None:
        """Take the state of the optimizers and their parameters over.

        Args:
            optimizers: As the user made them, before the first step. None of them, to evaluate.
            exposes_gradients: Leave gradients in ``.grad`` until the step, because somebody may
                look at them there. Nothing is stepped during the backward pass then.

        Raises:
            ConfigError: When an optimizer updates what cannot be kept.
        """
        assert not self._optimizers, "adopted already"
        self._exposes_gradients = exposes_gradients or len(optimizers) != 1
        for optimizer in optimizers:
            self._check_known(optimizer)
            if not AdamRule.fits(optimizer):
                self._say_slow(optimizer)
        self._stepper = Stepper(self.kept.copies, num_threads=self._num_threads, device=self.device)
        self._take(optimizers)
        self._optimizers = list(optimizers)
        for optimizer in optimizers:
            restore = take_over(
                optimizer, step=self.step, discard=self._discard, absorb=self.absorb_state
            )
            self._restores.append(restore)

    def _check_known(self, optimizer: Optimizer) -> None:
        """The engine's step is the only one: what it does not know would stay as it is."""
        if unknown := unknown_parameters(self._units, [optimizer]):
            names = [each.name for held in self._units.values() for each in held]
            shapes = ", ".join(str(tuple(each.shape)) for each in unknown[:3])
            raise ConfigError(
                f"{type(optimizer).__name__} updates {len(unknown)} parameters, of the shapes "
                f"{shapes}{', ...' if len(unknown) > 3 else ''}, which are no sharded parameters "
                f"of the model; those are {len(names)}, {', '.join(names[:3])} and so on. Give "
                f"the optimizer parameters of the LightningModule, or set "
                f"strategy.offload_optimizer=null."
            )

    def _say_slow(self, optimizer: Optimizer) -> None:
        line = (
            f"{type(optimizer).__name__} steps offloaded state through its own code, several "
            f"times as slowly as Adam and AdamW, which have a fused kernel"
        )
        if self._rank == 0:
            log.info("boltmesh: %s", line)
        self._recorder.event("start", line)

    def _take(self, optimizers: Sequence[Optimizer]) -> None:
        for bucket in self.kept.take(self._units, optimizers, is_current=self._is_current):
            is_stepped_away = any(chunk.place != "device" for chunk in bucket.chunks)
            is_trained = self.kept.owner[bucket] is not None
            if self.device.type != "cpu" and is_stepped_away and is_trained:
                self._host_gradients[bucket] = self._arena.take(bucket.numel, torch.float32)
            if is_trained and not self._exposes_gradients:
                for slot in bucket.slots:
                    hook = partial(self._arrive, bucket, slot)
                    self._hooks.append(after_gradient(slot.parameter, hook))

    def close(self) -> None:
        """End the thread and give the optimizers back.

        Parameters and state stay where they are and can be read, gathered and written: a run that
        has ended may be evaluated, and saved. Unless a step has failed: what is half stepped is
        not given out.
        """
        stepper = self._stepper
        if stepper is None:
            return
        try:
            for bucket in self.kept.buckets:
                self._drop_gradients(bucket)
            self.synchronize()
        except BaseException as error:
            self._failure = (
                error
                if isinstance(error, Exception)
                else OffloadError(f"The last step was not finished: {type(error).__name__}.")
            )
            raise
        finally:
            stepper.worker.close()
            self._stepper = None
            for restore in self._restores:
                restore()
            for hook in self._hooks:
                hook.remove()
            self._restores.clear()
            self._reduced.close()
            self._hooks.clear()
            self._optimizers.clear()

    def restore(self) -> None:
        """``close``, and bring all parameters back to the device."""
        self.close()
        self.kept.restore()

    # What sources ask.

    @override
    def settle(self, bucket: Bucket) -> None:
        self._raise_failure()
        if self._stepper is None:
            return
        self._unguess(bucket)
        self._stepper.wait(bucket)

    @override
    def rest(self, bucket: Bucket) -> None:
        self._raise_failure()
        if self._stepper is not None:
            self._unguess(bucket)
            self._stepper.drain()

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    @override
    def begin_gathering(self) -> None:
        if self._is_step_new:
            self._is_step_new = False
            for stores in self.kept.stores:
                for store in stores.parameters:
                    store.begin_step()

    def _is_current(self, index: int) -> bool:
        """Whether reading a shard ahead reads what is gathered later: no step of it is pending."""
        stepper = self._stepper
        return stepper is None or not stepper.is_busy(self.kept.bucket_of_index(index))

    def _unguess(self, bucket: Bucket) -> None:
        """Somebody needs the parameters of a bucket between its gradient and the step."""
        assert self._stepper is not None
        if (job := self._weighing.pop(bucket, None)) is not None:
            job.wait()
        if self._stepper.is_guessed(bucket):
            self._never_guessed.add(bucket)
            self._stepper.undo(bucket)
            self._stepper.wait(bucket)  # the undo reads gradients that are about to change

    # Gradients.

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Around all backward passes of an accumulation but the last: ``.grad`` adds them up."""
        self._is_blocked = True
        try:
            yield
        finally:
            self._is_blocked = False

    def _arrive(self, bucket: Bucket, slot: Slot, parameter: Parameter) -> None:
        """A gradient is complete on this rank; called within the stream that reduced it."""
        if self._is_blocked or parameter.grad is None:
            return
        self._unguess(bucket)
        gradients = self._gradients_of(bucket)
        gradients.add(slot, local_tensor(parameter.grad))
        parameter.grad = None  # FSDP2 would add the next one into memory that is being read
        expected = self._expected.get(bucket, len(bucket.slots))
        if gradients.num_arrivals == expected:
            gradients.send()
            assert self._stepper is not None
            weigh = Job(partial(self._weigh, bucket, gradients))
            self._weighing[bucket] = self._stepper.worker.submit(weigh, is_urgent=True)

    def _gradients_of(self, bucket: Bucket) -> BucketGradients:
        found = self._gradients.get(bucket)
        if found is None:
            if bucket in self._host_gradients and self._stepper is not None:
                self._stepper.wait(bucket)  # its memory may still be read
            host = self._host_gradients.get(bucket)
            found = self._gradients[bucket] = BucketGradients(bucket, self.device, host, self._lane)
        return found

    def _weigh(self, bucket: Bucket, gradients: BucketGradients) -> None:
        """On the worker: the bucket's part of the norm, and whether to step it at once."""
        self._forecast.add(id(bucket), gradients.square())
        if bucket in self._never_guessed or not self._forecast.allows(id(bucket)):
            return
        optimizer = self.kept.owner[bucket]
        assert optimizer is not None
        assert self._stepper is not None
        if not self._may_differ_by_timing(bucket, is_clipped=optimizer in self._max_norms):
            return
        step = self._plan_step(optimizer, bucket, gradients)
        rule = step.rule
        is_reversible = all(rule.is_reversible(each.settings) for each in step.updates.values())
        if is_reversible and not self.kept.copies.is_written_once(bucket):
            self._stepper.guess(bucket, step)

    def _may_differ_by_timing(self, bucket: Bucket, *, is_clipped: bool) -> bool:
        """Whether it does no harm that rounding depends on how far a guess has come.

        A chunk that is clipped is stepped once or stepped and corrected. Copies of a shard on
        several ranks would drift apart: nothing makes them equal again.
        """
        if torch.are_deterministic_algorithms_enabled():
            return False
        return not (is_clipped and has_copies(bucket.slots[0].parameter))

    def _collect(self, bucket: Bucket) -> None:
        """Take what is left in ``.grad``, of earlier micro-batches or because it is exposed."""
        for slot in bucket.slots:
            gradient = slot.parameter.grad
            if gradient is not None:
                self._unguess(bucket)
                self._gradients_of(bucket).add(slot, local_tensor(gradient))
                if not self._exposes_gradients:
                    slot.parameter.grad = None
        if bucket in self._gradients:
            self._gradients[bucket].send()

    def _drop_gradients(self, bucket: Bucket) -> None:
        if bucket in self._gradients:
            self._unguess(bucket)
            del self._gradients[bucket]

    def _discard(self, optimizer: Optimizer, keeps_zeros: bool) -> None:
        """Before ``zero_grad``: gradients that nobody stepped with are dropped."""
        buckets = self.kept.buckets_of(optimizer)
        if any(bucket in self._gradients for bucket in buckets):
            for bucket in buckets:
                self._drop_gradients(bucket)
            self._forecast.forget()
        self._forget_norm(optimizer)
        if keeps_zeros and self._exposes_gradients:
            self.synchronize()  # the gradients about to be overwritten are being stepped with

    def _forget_norm(self, optimizer: Optimizer) -> None:
        self._norms.pop(optimizer, None)
        self._coefficients.pop(optimizer, None)

    # Norm and clipping.

    def gradient_norm(self, optimizer: Optimizer) -> float | None:
        """Return the 2-norm of an optimizer's gradients over all ranks, before clipping.

        Collective over the ranks that share parameters. None when there is no gradient.
        """
        if optimizer not in self._norms or self._exposes_gradients:
            self._norms[optimizer] = self._norm(optimizer, 2.0)
        return self._norms[optimizer]

    def _norm(self, optimizer: Optimizer, norm_type: float) -> float | None:
        buckets = self.kept.buckets_of(optimizer)
        present = self._present(buckets)
        groups = shard_groups(buckets[0].slots[0].parameter) if buckets else []
        return joint_norm(present, norm_type, groups, self.device)

    def _present(self, buckets: Sequence[Bucket]) -> list[BucketGradients]:
        if not self._exposes_gradients:
            for bucket in buckets:
                self._collect(bucket)
                if (job := self._weighing.get(bucket)) is not None:
                    job.wait()
            assert self._stepper is not None
            self._stepper.worker.raise_error()
            return [self._gradients[each] for each in buckets if each in self._gradients]
        seen = []
        for bucket in buckets:
            # A look only: what is in ``.grad`` may still be changed.
            look = BucketGradients(bucket, self.device, None, self._lane)
            for slot in bucket.slots:
                if slot.parameter.grad is not None:
                    look.add(slot, local_tensor(slot.parameter.grad))
            if look.slots:
                seen.append(look)
        return seen

    def clip(self, optimizer: Optimizer, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Clip an optimizer's gradients, in the coming step or in ``.grad`` where they are exposed.

        Collective over the ranks that share parameters.

        Returns:
            Their norm over all ranks, before clipping; 0 when there is no gradient.
        """
        is_squared = norm_type == 2.0
        norm = self.gradient_norm(optimizer) if is_squared else self._norm(optimizer, norm_type)
        if is_squared:
            self._max_norms[optimizer] = max_norm
        if norm is None:
            return torch.zeros((), device=self.device)
        before = self._coefficients.get(optimizer, 1.0)
        coefficient = max_norm / (norm * before + 1e-6)
        coefficient = min(coefficient, 1.0)  # in this order NaN stays NaN, as in torch
        if self._exposes_gradients:
            self._scale(optimizer, coefficient)
        else:
            self._coefficients[optimizer] = before * coefficient
        return torch.tensor(norm * before, device=self.device)

    def _scale(self, optimizer: Optimizer, coefficient: float) -> None:
        if coefficient == 1.0:
            return
        for bucket in self.kept.buckets_of(optimizer):
            for slot in bucket.slots:
                if slot.parameter.grad is not None:
                    local_tensor(slot.parameter.grad).mul_(coefficient)

    # Steps.

    def step(self, optimizer: Optimizer) -> None:
        """Submit the step of an optimizer; returns while it runs."""
        assert self._stepper is not None
        self._take_new_groups(optimizer)
        coefficient = self._coefficients.get(optimizer, 1.0)
        for bucket in self.kept.buckets_of(optimizer):
            self._collect(bucket)
            if (job := self._weighing.pop(bucket, None)) is not None:
                job.wait()
            gradients = self._gradients.pop(bucket, None)
            if gradients is None:
                continue
            self._expected[bucket] = gradients.num_arrivals
            step = self._plan_step(optimizer, bucket, gradients)
            self._stepper.step(bucket, step, coefficient)
            for slot, update in step.updates.items():
                state = self.kept.show_state(optimizer, slot)
                if "step" in state and isinstance(state["step"], Tensor):
                    state["step"].fill_(update.step)
        self._forecast.finish(
            norm=self._norms.get(optimizer),
            max_norm=self._max_norms.get(optimizer),
            was_clipped=coefficient != 1.0,
        )
        self._forget_norm(optimizer)
        self._is_step_new = True
        if self._exposes_gradients:
            self._stepper.drain()  # who set them free to be looked at may also write to them now

    def _plan_step(
        self, optimizer: Optimizer, bucket: Bucket, gradients: BucketGradients
    ) -> BucketStep:
        rule = self.kept.rules[optimizer]
        wanted = set(gradients.slots)
        updates: dict[Slot, Update] = {}
        for group in optimizer.param_groups:
            settings = None
            for parameter in group["params"]:
                own, slot = self.kept.place.get(parameter, (None, None))
                if own is not bucket or slot not in wanted or slot is None:
                    continue
                settings = settings or rule.settings(group)
                state = optimizer.state.get(parameter) or {}
                updates[slot] = Update(settings, int(state.get("step", 0)) + 1)
        return BucketStep(rule, gradients, updates)

    def _take_new_groups(self, optimizer: Optimizer) -> None:
        """Parameters may be added to an optimizer while it runs, as fine-tuning callbacks do."""
        trained = [p for g in optimizer.param_groups for p in g["params"] if p.requires_grad]
        frozen = [place[0] for p in trained if (place := self.kept.place.get(p)) is not None]
        for bucket in dict.fromkeys(frozen):
            if self.kept.owner[bucket] is None:
                self.settle(bucket)
                self.kept.give_back(bucket)
        if any(parameter not in self.kept.place for parameter in trained):
            self._check_known(optimizer)
            self._take([optimizer])

    @property
    def counts(self) -> Counter[str]:
        """How chunks were stepped so far: ``plain``, ``committed``, ``corrected``, ``undone``."""
        return Counter() if self._stepper is None else self._stepper.counts

    def stored(self) -> dict[str, list[Tensor | StoredBytes]]:
        """What the engine holds now that parameters and ``optimizer.state`` do not show."""
        places = self.kept.bytes_by_place()
        kinds: dict[str, list[Tensor | StoredBytes]] = {
            kind: [StoredBytes(place, count) for place, count in of_kind.items() if count]
            for kind, of_kind in places.items()
        }
        held: list[Tensor | StoredBytes] = [
            tensor for each in list(self._gradients.values()) for tensor in each.held()
        ]
        if free := self._reduced.num_free_bytes:
            held.append(StoredBytes("host", free))
        return {**kinds, "gradients": held}

    @property
    def disk_report(self) -> DiskReport | None:
        """What was measured of this rank's disk; None when nothing is stored on one."""
        return next((each.disk for each in self.kept.stores if each.disk is not None), None)

    def drain(self) -> None:
        """Return when the thread has nothing to do; guesses stay guesses."""
        if self._stepper is not None:
            self._stepper.drain()

    def synchronize(self) -> None:
        """Return when all steps are done and ``optimizer.state`` is up to date.

        Raises:
            OffloadError: When a step failed.
        """
        if self._stepper is None:
            return
        for bucket in list(self._weighing):
            self._unguess(bucket)
        self._stepper.drain()
        for optimizer in self._optimizers:
            self.kept.show_scalars(optimizer)

    # State.

    def prepare_state(self, optimizer: Optimizer) -> None:
        """Fill ``optimizer.state`` as the first step would, for a loader to write into."""
        for bucket in self.kept.buckets_of(optimizer):
            for slot in bucket.slots:
                self.kept.show_state(optimizer, slot)

    def absorb_state(self, optimizer: Optimizer) -> None:
        """Take over what somebody has put into ``optimizer.state``."""
        self.synchronize()
        self.kept.absorb(optimizer)


def _abandon(shard: Tensor) -> None:
    if isinstance(shard, OffloadedShard) and isinstance(shard.source, ParameterSource):
        shard.source.abandon()


def _worker_threads(device: torch.device, ranks_per_node: int) -> int:
    """What the worker may use of the host: beside an accelerator, the cores less two."""
    if device.type == "cpu":
        return torch.get_num_threads()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return max(1, (cores or 1) // max(1, ranks_per_node) - 2)
