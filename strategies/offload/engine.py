"""The offload engine: optimizer state and parameters away from the device, stepped on the host.

Gradients are taken as FSDP2 reduces them. A bucket is stepped as soon as its last gradient is
reduced, during the backward pass, as if gradients were not clipped. When the norm of all gradients
is known, this speculative step is committed or corrected. ``gradient_handler`` takes gradients,
computes the norm and decides which buckets to step early; ``step_in_backward`` makes final steps
where nothing is clipped. Beside a pipeline, where gradients appear at the end of the batch, they
are taken when their norm is computed.

A shard that is gathered, read or written waits for the pending steps of its own bucket. ``step``
returns while steps are pending.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence, Set
from contextlib import AbstractContextManager
from types import MappingProxyType

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.nn import Module, Parameter
from torch.optim import Optimizer
from typing_extensions import override

from boltmesh.errors import OffloadError
from boltmesh.lightning_import import logger
from boltmesh.strategies.grad_norm import NormShare
from boltmesh.strategies.object_collectives import noop
from boltmesh.strategies.offload.bucket_layout import (
    ShardedParam,
    collect_sharded_params,
    refuse_unknown,
)
from boltmesh.strategies.offload.buckets import Bucket
from boltmesh.strategies.offload.disk.preflight import DiskReport
from boltmesh.strategies.offload.gradient_handler import Clipper, GradientHandler
from boltmesh.strategies.offload.shard_tensor import OffloadedShard, ParameterSource, StepBarrier
from boltmesh.strategies.offload.state import OffloadedState, Staging
from boltmesh.strategies.offload.stepper import Stepper, worker_threads
from boltmesh.strategies.offload.stores import OffloadPlan
from boltmesh.strategies.offload.streams import CopyStream
from boltmesh.strategies.offload.update_rule import AdamRule, WholeRule
from boltmesh.strategies.torch_compat.fsdp import take_away_unused
from boltmesh.strategies.torch_compat.fsdp_hooks import watch_dropped_gathers
from boltmesh.strategies.torch_compat.optimizers import patch_optimizer
from boltmesh.telemetry.writer.memory import StoredBytes
from boltmesh.telemetry.writer.null_recorder import NullRecorder
from boltmesh.telemetry.writer.recorder import Recorder

log = logger()


class OffloadEngine(StepBarrier):
    """Stores and steps what an ``OffloadPlan`` moves away from the device.

    Args:
        plan: Where optimizer state and parameters are stored.
        device: Where the model is computed.
        rank: This rank's number in the job, for messages.
        ranks_per_node: How many ranks share the host's cores.
        compute_dtypes: Dtypes in which sharded parameters outside of FSDP2 units are gathered;
            others are gathered in their own.
        recorder: Counts transfers.
        shares: Norm contributions of the data axis and the axes beside it.
        absent: Parameters of the optimizers that other ranks (other stages) hold and step.
    """

    def __init__(
        self,
        plan: OffloadPlan,
        *,
        device: torch.device,
        rank: int = 0,
        ranks_per_node: int = 1,
        compute_dtypes: Mapping[Parameter, torch.dtype] | None = None,
        recorder: Recorder | NullRecorder | None = None,
        shares: Sequence[NormShare] = (),
        absent: Set[Parameter] = frozenset(),
    ) -> None:
        self.plan = plan
        self.device = device
        self._rank = rank
        self._absent = absent
        self._recorder = recorder or NullRecorder()
        self._compute_dtypes = dict(compute_dtypes or {})
        self._num_threads = worker_threads(device, ranks_per_node)
        self.kept = OffloadedState(
            self, device=device, rank=rank, recorder=self._recorder, plan=plan, shares=shares
        )
        self._stepper: Stepper | None = None
        self._arrivals: GradientHandler | None = None
        self._clipper: Clipper | None = None
        self._failure: Exception | None = None
        self.is_lost = False
        self._units: dict[str, list[ShardedParam]] = {}
        self._modules: dict[str, FSDPModule] = {}
        self._layers: dict[str, list[Module]] = {}
        self._take_away_unused: Callable[[Tensor], None] = noop
        self._optimizers: list[Optimizer] = []
        self._whole_steps: dict[Optimizer, Callable[[Optimizer], None]] = {}
        self._restores: list[Callable[[], None]] = []
        self._lane = CopyStream(device, recorder)
        self._is_step_new = True

    # Setting up.

    def attach(self, module: Module, units: Mapping[str, FSDPModule]) -> None:
        """Register the parameters that FSDP2 has sharded.

        Args:
            module: The user's module.
            units: All ``fully_shard`` modules by name, in the order of the forward pass.
        """
        self._units = collect_sharded_params(module, units, self._compute_dtypes)
        alone = {held[0].parameter: n for n, held in self._units.items() if n not in units}
        for layer in module.modules():
            for parameter in dict.fromkeys(layer.parameters(recurse=False)):
                if parameter in alone:
                    self._layers.setdefault(alone[parameter], []).append(layer)
        self._modules = dict(units)
        for unit in units.values():
            watch_dropped_gathers(unit, _abandon)
        self._take_away_unused = take_away_unused(units.values())

    def adopt(
        self,
        optimizers: Sequence[Optimizer],
        whole_steps: Mapping[Optimizer, Callable[[Optimizer], None]] = MappingProxyType({}),
        *,
        exposes_gradients: bool,
        never_clips: bool = False,
        comes_late: bool = False,
    ) -> None:
        """Take over the parameters of the optimizers and their state.

        Args:
            optimizers: As the user made them, before the first step. Empty for evaluation.
            whole_steps: Step functions of optimizers that cannot step a part of a parameter. They
                read and write master parameters, whose gradients stay in ``.grad``.
            exposes_gradients: Leave gradients in ``.grad`` until the step, where user code may read
                them. Then nothing is stepped during the backward pass.
            never_clips: ``clip`` will not be called. Buckets on a disk are then stepped within the
                backward pass, and their gradients are freed at once.
            comes_late: All gradients appear after the backward passes of a batch. They are taken
                from ``.grad`` when their norm is computed, or else when the optimizer steps: a
                speculative step would have nothing to overlap with.

        Raises:
            ConfigError: When an optimizer updates a parameter that cannot be stored.
        """
        assert not self._optimizers, "adopted already"
        self._whole_steps = dict(whole_steps)
        self.kept.rules.update(dict.fromkeys(self._whole_steps, WholeRule()))
        for optimizer in optimizers:
            refuse_unknown(self._units, optimizer, absent=self._absent)
            if not AdamRule.fits(optimizer):
                self._say_slow(optimizer)
        self._stepper = Stepper(self.kept.copies, num_threads=self._num_threads, device=self.device)
        self._arrivals = GradientHandler(
            self.kept,
            self._stepper,
            device=self.device,
            lane=self._lane,
            exposes_gradients=exposes_gradients or len(optimizers) != 1 or bool(whole_steps),
            comes_late=comes_late,
            take_away_unused=self._take_away_unused,
        )
        self._clipper = Clipper(self.kept, self._arrivals, self.device)
        self._take(optimizers)
        for held in self._units.values():
            self.kept.unstage(held)
        if never_clips and self._arrivals.is_watching:
            self._arrivals.early.start(self._modules, self._layers)
        self._optimizers = list(optimizers)
        for optimizer in optimizers:
            restore = patch_optimizer(
                optimizer, step=self.step, discard=self._discard, absorb=self.absorb_state
            )
            self._restores.append(restore)

    def _say_slow(self, optimizer: Optimizer) -> None:
        line = (
            f"{type(optimizer).__name__} steps offloaded state through its own code, several "
            f"times as slowly as Adam and AdamW, which have a fused kernel"
        )
        if self._rank == 0:
            log.info("boltmesh: %s", line)
        self._recorder.event("start", line)

    def _take(self, optimizers: Sequence[Optimizer]) -> None:
        assert self._arrivals is not None
        made = self.kept.take(self._units, optimizers, is_current=self._is_current)
        self._arrivals.watch(made)

    def close(self) -> None:
        """End the worker thread and restore the optimizers' own methods.

        Parameters and state stay where they are and can be read, gathered and written, so a run
        that has ended can be evaluated and saved. After a failed step reading them raises instead.
        """
        try:
            if self._stepper is not None and self._arrivals is not None:
                self._finish(self._stepper, self._arrivals)
        finally:
            self._stepper = self._arrivals = self._clipper = None
            for restore in self._restores:
                restore()
            self._restores.clear()
            self._optimizers.clear()
            self._whole_steps.clear()

    def _finish(self, stepper: Stepper, arrivals: GradientHandler) -> None:
        try:
            for bucket in self.kept.buckets:
                arrivals.drop(bucket)
            if arrivals.early.is_half_done:
                self._failure = OffloadError(
                    "The last step was not finished: the run ended during a backward pass "
                    "that had begun to step. Give the next fit the last checkpoint, "
                    "Trainer.fit(ckpt_path=...), or build a new module."
                )
                stepper.drain()
            else:
                self.synchronize()
        except BaseException as error:
            self._note_failure(error)
            raise
        finally:
            stepper.worker.close()
            arrivals.close()

    def _note_failure(self, error: BaseException) -> None:
        """Note that a step ended half-way: parameters are not those of any step."""
        self._failure = (
            error
            if isinstance(error, Exception)
            else OffloadError(f"The last step was not finished: {type(error).__name__}.")
        )

    def restore(self, staging: Staging | None = None) -> Exception | None:
        """``close``, and bring all parameters back to the device, or to ``staging``.

        Returns:
            The error of a step that failed. All parameters are NaN then and must be loaded.
        """
        self.close()
        failure, self._failure = self._failure, None
        self.is_lost = failure is not None
        self.kept.restore(staging)
        return failure

    # The StepBarrier that shard sources wait for.

    @override
    def wait_for_bucket(self, bucket: Bucket) -> None:
        self._raise_failure()
        if self._stepper is None or self._arrivals is None:
            return
        self._arrivals.early.check(bucket, "is gathered again")
        self._arrivals.unguess(bucket)
        self._stepper.wait(bucket)

    @override
    def wait_for_all(self, bucket: Bucket) -> None:
        self._raise_failure()
        if self._stepper is not None and self._arrivals is not None:
            self._arrivals.early.check(bucket, "is read or written")
            self._arrivals.unguess(bucket)
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
        """Whether a shard may be read ahead: no step of its bucket is pending."""
        stepper = self._stepper
        return stepper is None or not stepper.is_busy(self.kept.bucket_of[index])

    # Gradients.

    def no_sync(self) -> AbstractContextManager[None]:
        """Context for the backward passes of an accumulation but the last: ``.grad`` sums up."""
        assert self._arrivals is not None
        return self._arrivals.no_sync()

    def _discard(self, optimizer: Optimizer, keeps_zeros: bool) -> None:
        """Drop gradients that were not stepped with. Called before ``zero_grad``."""
        assert self._arrivals is not None
        assert self._clipper is not None
        self._arrivals.early.check_all("its gradients are dropped")
        self._arrivals.discard(self.kept.buckets_of(optimizer))
        self._clipper.forget(optimizer)
        if keeps_zeros and self._arrivals.exposes_gradients:
            self.synchronize()  # the gradients about to be overwritten are being stepped with

    def gradient_norm(self, optimizer: Optimizer) -> float | None:
        """See ``Clipper.gradient_norm``."""
        assert self._clipper is not None
        self._take_new_groups(optimizer)
        return self._clipper.gradient_norm(optimizer)

    def clip(self, optimizer: Optimizer, max_norm: float) -> Tensor:
        """See ``Clipper.clip``."""
        assert self._clipper is not None
        self._take_new_groups(optimizer)
        return self._clipper.clip(optimizer, max_norm)

    # Steps.

    def step(self, optimizer: Optimizer) -> None:
        """Submit the step of an optimizer; returns while it runs."""
        assert self._stepper is not None
        assert self._arrivals is not None
        assert self._clipper is not None
        self._take_new_groups(optimizer)
        coefficient = self._clipper.coefficient(optimizer)
        whole_steps = self._whole_steps.get(optimizer)
        if whole_steps is not None:
            self._stepper.drain()
            try:
                whole_steps(optimizer)
            except BaseException as error:
                self._note_failure(error)
                raise
        for bucket in [] if whole_steps else self.kept.buckets_of(optimizer):
            updates = self._arrivals.step(optimizer, bucket, coefficient)
            for slot, update in updates.items():
                state = self.kept.show_state(optimizer, slot)
                if "step" in state and isinstance(state["step"], Tensor):
                    state["step"].fill_(update.step)
        if not whole_steps:
            self.kept.rules[optimizer].advance(optimizer.param_groups)
        self._arrivals.forecast.finish(
            norm=self._clipper.norms.get(optimizer),
            max_norm=self._clipper.max_norms.get(optimizer),
            was_clipped=coefficient != 1.0,
        )
        self._clipper.forget(optimizer)
        self._arrivals.early.end_step()
        self._is_step_new = True
        if self._arrivals.exposes_gradients:
            self._stepper.drain()  # user code that reads exposed gradients may now write to them

    def _take_new_groups(self, optimizer: Optimizer) -> None:
        """Take parameters that were added to a running optimizer, as fine-tuning callbacks do."""
        given = [each for group in optimizer.param_groups for each in group["params"]]
        trained = [each for each in given if each.requires_grad and each not in self._absent]
        frozen = [place[0] for p in trained if (place := self.kept.place.get(p)) is not None]
        for bucket in dict.fromkeys(frozen):
            if self.kept.owner[bucket] is None:
                self.wait_for_bucket(bucket)
                self.kept.give_back(bucket)
        if any(parameter not in self.kept.place for parameter in trained):
            refuse_unknown(self._units, optimizer, absent=self._absent)
            self._take([optimizer])

    @property
    def counts(self) -> Counter[str]:
        """Chunks stepped so far by kind: ``plain``, ``committed``, ``corrected``, ``undone``."""
        return Counter() if self._stepper is None else self._stepper.counts

    def stored(self) -> dict[str, list[Tensor | StoredBytes]]:
        """Tensors and bytes held outside of parameters and ``optimizer.state``, by kind."""
        places = self.kept.bytes_by_place()
        kinds: dict[str, list[Tensor | StoredBytes]] = {
            kind: [StoredBytes(place, count) for place, count in of_kind.items() if count]
            for kind, of_kind in places.items()
        }
        held: list[Tensor | StoredBytes] = []
        if self._arrivals is not None:
            held.extend(self._arrivals.held())
        return {**kinds, "gradients": held}

    @property
    def disk_report(self) -> DiskReport | None:
        """Measured speed of this rank's disk; None when nothing is stored on one."""
        return next((each.disk for each in self.kept.stores if each.disk is not None), None)

    @property
    def has_whole_steps(self) -> bool:
        """Whether all steps that were begun have ended or can end; else ``synchronize`` raises."""
        try:
            self._raise_failure()
            self.synchronize()
        except Exception:  # noqa: BLE001 - the run is ending by it, or by what came before it
            return False
        return True

    def drain(self) -> None:
        """Return when the worker is idle; speculative steps stay uncommitted."""
        if self._stepper is not None:
            self._stepper.drain()

    def synchronize(self) -> None:
        """Return when all steps are done and ``optimizer.state`` is up to date.

        Undoes speculative steps.

        Raises:
            OffloadError: When a step failed.
        """
        self._end_steps()
        for optimizer in self._optimizers:
            self.kept.show_scalars(optimizer)

    def _end_steps(self) -> None:
        if self._stepper is None or self._arrivals is None:
            return
        self._arrivals.early.check_all("is to be read")
        self._arrivals.settle_all()
        self._stepper.drain()

    # State.

    def prepare_state(self, optimizer: Optimizer) -> None:
        """Fill ``optimizer.state`` as the first step would, for a loader to write into."""
        for bucket in self.kept.buckets_of(optimizer):
            for slot in bucket.slots:
                self.kept.show_state(optimizer, slot)

    def absorb_state(self, optimizer: Optimizer) -> None:
        """Import ``optimizer.state`` after ``load_state_dict``."""
        self._end_steps()  # without showing their scalars: they would overwrite what was loaded
        self.kept.absorb(optimizer)


def _abandon(shard: Tensor) -> None:
    if isinstance(shard, OffloadedShard) and isinstance(shard.source, ParameterSource):
        shard.source.abandon()
