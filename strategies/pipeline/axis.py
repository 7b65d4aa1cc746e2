"""``PipelineAxis``: each of its ranks holds some stages of the model and runs them.

It implements the engine's interface; the model in stages is ``staged_model.py``.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, cast

import torch
from lightning.fabric.utilities import move_data_to_device
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor
from torch.nn import Module, Parameter
from torch.optim import Optimizer
from typing_extensions import override

from boltmesh.errors import ConfigError, UnsupportedError
from boltmesh.strategies.checkpoint.optimizer_state import Take, joined_state
from boltmesh.strategies.dry_run.batch_check import BatchDigest, batch_digest
from boltmesh.strategies.dry_run.fake_optimizers import fake_optimizers
from boltmesh.strategies.dry_run.sample import batch_sizes, sample_batch
from boltmesh.strategies.dry_run.unsupported import refuse_lazy
from boltmesh.strategies.engine import MeshStrategy
from boltmesh.strategies.engine.axis import Axis, FakeRuns, StepFunction
from boltmesh.strategies.grad_norm import NormShare
from boltmesh.strategies.lightning_compat.launchers import SigtermAgreement
from boltmesh.strategies.lightning_compat.loops import (
    evaluation_batch_index,
    loggers_follow,
    step_arguments,
)
from boltmesh.strategies.lightning_compat.trainer import (
    autocast_dtype,
    has_norm_clipping,
    zeroes_gradients,
)
from boltmesh.strategies.mesh import MeshLayout
from boltmesh.strategies.object_collectives import broadcast_from_rank0
from boltmesh.strategies.patch import patched
from boltmesh.strategies.pipeline.evaluation import Evaluation
from boltmesh.strategies.pipeline.expected_traffic import with_second_version
from boltmesh.strategies.pipeline.microbatch_runs import cast_once
from boltmesh.strategies.pipeline.options import (
    STAGES,
    PipelineContext,
    PipelineOptions,
    gathers_refused,
    refuse_absent_parameters,
    refuse_accumulation,
    refuse_late_gradients,
    refuse_layout,
    refuse_manual_optimization,
    refuse_measuring,
    refuse_optimizers,
)
from boltmesh.strategies.pipeline.schedules.registry import schedule_kind
from boltmesh.strategies.pipeline.stage.units import (
    explain_write,
    find_stage_units,
    refuse_wrapped_calls,
)
from boltmesh.strategies.pipeline.stage_params import add_pending, gathered
from boltmesh.strategies.pipeline.staged_model import StagedModel
from boltmesh.strategies.pipeline.training import training_step
from boltmesh.strategies.progress import long_phase
from boltmesh.strategies.torch_compat.optimizers import TOTAL_NORM, total_norm_replaced, zeroed_by
from boltmesh.telemetry.snapshot import MemoryKind
from boltmesh.telemetry.traffic import ExpectedTraffic

if TYPE_CHECKING:
    from boltmesh.strategies.engine.data_axis import LateGradientsAxis

BUBBLE = "boltmesh/bubble_ratio"
"""Key of the idle share of the pipeline's time, a mean over earlier batches; see ``timing.py``."""


class PipelineAxis(Axis):
    """Keeps one model over the ranks of a pipeline, each of which holds its stages.

    Args:
        options: The user's options of the axis.
        size: Ranks of a pipeline; None lets the strategy choose.
    """

    name = "pipeline"
    divides_modules = True
    stores_shards = True
    defers_building = True
    reasons = STAGES
    # Eager loading avoids a deadlock: a kernel loaded at its first launch may wait for an idle
    # device, which a posted receive keeps busy until a peer sends, after that same kernel.
    cuda_variables: Mapping[str, str] = MappingProxyType({"CUDA_MODULE_LOADING": "EAGER"})

    def __init__(self, options: PipelineOptions, size: int | None = None) -> None:
        self.options = options
        self.wanted_size = size
        self.staged = StagedModel(options)
        self._evaluation: Evaluation | None = None
        self._is_new = True
        """Whether the model is placed for the first time in this run."""
        self._resumed_seed: int | None = None
        """Seed of random numbers within steps in the resumed run."""
        self._sample: tuple[Any, tuple[Any, ...]] = None, ()
        """A batch during set-up, and the arguments of a step that follow it."""
        self._digest: tuple[Any, BatchDigest] | None = None
        """The latest batch on the device, and its digest before the transfer."""
        self._has_logged_bubble = False
        """Whether this run has logged a bubble ratio."""
        self._is_in_step = False

    # Set-up.

    @override
    def attach(self, strategy: MeshStrategy) -> None:
        super().attach(strategy)
        if not strategy.data_axis.has_late_gradients:
            raise ConfigError(
                f"The data axis {type(strategy.data_axis).__name__} goes along with forward passes "
                f"of the whole module, and a pipeline runs pieces of it. Use PipelineDdpAxis() or "
                f"PipelineZeroAxis(...)."
            )
        recompute, kind = strategy.recomputation.kind, schedule_kind(self.options.first_schedule)
        if recompute is not None and kind.splits_backward:
            raise ConfigError(
                f"schedule={self.options.schedule!r} takes each backward pass in two halves, and "
                f"activation_checkpointing={recompute!r} would run the blocks again for each part "
                f"of both. Use schedule='1f1b' or 'interleaved_1f1b', or leave "
                f"activation_checkpointing out."
            )
        if recompute is not None and kind.is_asynchronous:
            raise ConfigError(
                f"schedule={self.options.schedule!r} does backward passes after the next optimizer "
                f"step, and activation_checkpointing={recompute!r} would run the blocks again "
                f"there, with other weights. Use schedule='1f1b', or leave "
                f"activation_checkpointing out."
            )

    @override
    def check_layout(self, layout: MeshLayout) -> None:
        refuse_layout(self.options, layout)
        self.parts_per_batch = self.options.num_microbatches(layout.pipeline)

    @override
    def near_groups(self) -> dict[str, list[list[int]]]:
        # A stage sends activations to one other rank only: ranks may be the farthest apart.
        return {}

    @override
    def refuse(self, trainer: Trainer, module: LightningModule) -> None:
        refuse_lazy(module)
        if self.strategy.is_fitting:
            refuse_manual_optimization(module)
            if schedule_kind(self.options.first_schedule).is_asynchronous:
                refuse_late_gradients(trainer, self.strategy.scaler)
        if self._num_sharing > 1 or self.strategy.coupled is not None:
            refuse_measuring(self.options)

    @override
    def place(self, trainer: Trainer) -> None:
        strategy, staged, module = self.strategy, self.staged, self.module
        if strategy.is_fitting:
            strategy.compilation.put_on(module, strategy.root_device)
            rank, recorder = strategy.global_rank, strategy.recorder
            strategy.recomputation.put_on(module, rank=rank, recorder=recorder)
        staged.begin(self._context())
        self._is_new = staged.placement is None or staged.placement.plans.root is not module
        if not (self._is_new or strategy.is_fitting):
            return
        sample = sample_batch(trainer)
        staged.cutter.batch_sizes |= sample.batch_sizes
        step = strategy.step_name
        rest, around = step_arguments(module, step), strategy.host_step_context(step)
        if self._is_new:
            units = find_stage_units(module)
            refuse_wrapped_calls(module, units)
            for axis in strategy.axes:
                axis.cut_into_stages(units)
            # Values sent over boundaries have the dtype that the model will have.
            strategy.model = strategy.precision_plugin.convert_module(module)
            with (
                fake_optimizers(strategy, module),
                long_phase("cuts the model into stages", is_shown=strategy.is_global_zero),
                gathers_refused(strategy, step),
            ):
                staged.place(module, step, sample.batch, rest, around)
            self._evaluation = Evaluation(staged)
        if strategy.is_fitting:
            with fake_optimizers(strategy, module):
                staged.expectations.look_at(sample.batch, rest, around)
            self._sample = sample.batch, rest
        if self._is_new:
            staged.make()
            if strategy.data_axis.is_sharded:  # stages exist, and are gathered whole for a step
                strategy.model_to_device()

    def _context(self) -> PipelineContext:
        strategy = self.strategy
        return PipelineContext(
            group=strategy.groups[self.name],
            new_group=partial(strategy.new_group, self.name),
            new_tracing_group=partial(strategy.new_group, (self.name, "tensor"), backend="gloo"),
            data=cast("LateGradientsAxis", strategy.data_axis),
            device=strategy.root_device,
            recorder=strategy.recorder,
            seed=self._step_seed(),
            timeout=strategy.timeout,
            scaler=strategy.scaler,
            recomputed=strategy.recomputation.blocks,
            num_replicas=strategy.data_axis.size,
            num_sharing=self._num_sharing,
            num_averaged=strategy.gradient_group.size(),
            coupled=strategy.coupled,
            rounds_by_microbatch=strategy.float8.recipe == "tensorwise",
            without_collectives=self.others_without_collectives,
            boundaries=next(
                filter(None, (each.stage_boundaries() for each in strategy.axes)), None
            ),
        )

    @property
    def _num_sharing(self) -> int:
        """Number of ranks that compute each layer together: of inner axes with the same batches."""
        return self.strategy.layout.world_size // (self.size * self.strategy.data_axis.size)

    def _step_seed(self) -> int:
        """Return the seed of random numbers within steps, equal on all ranks of a pipeline."""
        if self._resumed_seed is not None and self.strategy.is_fitting:
            return self._resumed_seed + self._own_seed
        if self.strategy.seed is not None:
            return self.strategy.seed + self._own_seed
        return broadcast_from_rank0(torch.initial_seed() % 2**62)

    @property
    def _own_seed(self) -> int:
        """Difference of this pipeline's seed from that of the first one."""
        return 0 if self.strategy.seed is None else self.strategy.coordinates["data"]

    @override
    def refuse_placed(self, module: LightningModule) -> None:
        refuse_absent_parameters(module)

    @override
    def before_transfer(self, device: torch.device) -> None:
        self.staged.move_absent(device)

    @override
    def check_optimizers(self, optimizers: Sequence[Optimizer]) -> None:
        refuse_optimizers(optimizers)

    @override
    def start(self, trainer: Trainer) -> None:
        self._sample = None, ()
        staged = self.staged
        if self._is_new:
            staged.start()
        staged.holdings.let_gather()
        if self.strategy.is_fitting and staged.delayed is not None:
            staged.delayed.begin()
        staged.follow_scaler()
        staged.record_plan(trainer.accumulate_grad_batches)

    # Parameters and buffers of this rank.

    @override
    def held_parameters(self) -> Collection[Parameter]:
        return self.staged.holdings.parameters if self.staged.placement is not None else []

    @override
    def holds_buffer(self, name: str) -> bool:
        return self.staged.holdings.has_buffer(name)

    @override
    def kept_beside(self) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        delayed = self.staged.delayed
        return ((), ()) if delayed is None else delayed.tensors()

    # Loops.

    @override
    def check_dataloader(self, dataloader: object) -> None:
        self.staged.cutter.batch_sizes |= batch_sizes(dataloader)

    @override
    def begin_training(self) -> None:
        self._has_logged_bubble = False

    @override
    def find_metrics(self) -> None:
        self.staged.find_metrics()

    @override
    def drain(self) -> None:
        self.staged.drain()

    @override
    def sigterm_agreement(self) -> SigtermAgreement | None:
        if self.size < self.strategy.world_size:
            return None
        # All ranks of the job exchange the outcome at the end of each batch, and signals with it.
        signals = self.staged.signals
        agreement = SigtermAgreement(self.strategy.trainer, signals.take_received)
        signals.own = agreement.flags
        return agreement

    # Steps.

    @override
    def announce_batch(self, batch: Any, digest: BatchDigest) -> None:
        self._digest = batch, digest

    @override
    def run_step(self, step: str, run: StepFunction, args: Any, kwargs: Any) -> Any:
        if step == "training_step" and self.staged.delayed is not None:
            refuse_accumulation(self.strategy.trainer)
        self._check(args[0])
        self.staged.runner.digest = self._digest_of(args[0])
        with patched(self, _is_in_step=True):
            if step == "training_step":
                return self._train(args, kwargs)
            return self._evaluate(step, args, kwargs)

    def _check(self, batch: Any) -> None:
        """End the step on all ranks of the pipeline if another axis refuses the batch."""
        try:
            self.strategy.check_batch(batch)
        except Exception as error:  # noqa: BLE001 - sent to all ranks and raised again
            self.staged.runner.refuse(error)

    def _digest_of(self, batch: Any) -> BatchDigest:
        """Return the digest of a step's batch."""
        made, self._digest = self._digest, None
        if made is not None and made[0] is batch:
            return made[1]
        return batch_digest(batch)

    def _train(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        strategy, staged = self.strategy, self.staged
        self._free_stale_gradients()
        schedule = staged.programs.schedule
        before = staged.sharing.length, staged.sharing.size_per_batch()
        around = strategy.step_context("training_step")
        with ExitStack() as stack:
            stack.enter_context(strategy.recorder.phase("forward"))
            stack.enter_context(total_norm_replaced(TOTAL_NORM))
            if self._casts_once:
                around = stack.enter_context(cast_once(around, strategy.root_device))
            output = training_step(
                staged,
                args,
                kwargs,
                ordinal=strategy.trainer.fit_loop.total_batch_idx,
                around=around,
            )
        if schedule != staged.programs.schedule:
            staged.record_plan(strategy.trainer.accumulate_grad_batches)
        if before != (staged.sharing.length, staged.sharing.size_per_batch()):
            strategy.recorder.expect(strategy.expected_traffic())  # the step logs other values
        self._log_bubble()
        return output

    @property
    def _casts_once(self) -> bool:
        """Whether weights keep their memory and their values for a whole batch."""
        strategy = self.strategy
        is_autocast = autocast_dtype(strategy.precision_plugin) is not None
        return is_autocast and self.staged.delayed is None and not strategy.data_axis.is_sharded

    def _free_stale_gradients(self) -> None:
        """Free the gradients of the step before if the Trainer is going to zero them.

        It zeroes them after ``training_step``, in which a pipeline computes the new ones: both
        would be in memory at the same time, the new ones in newly mapped pages in every step.
        """
        if zeroes_gradients(self.strategy.trainer):
            for each in zeroed_by(self.strategy.optimizers):
                each.grad = None

    def _log_bubble(self) -> None:
        """Log the newest bubble ratio, equal on all ranks; the first batch has none.

        Logs it once and then for batches that loggers record: a call of ``log`` takes as long as
        several chunks of a small model.
        """
        bubble = self.staged.executor.bubble
        if bubble is None:
            return
        self.strategy.recorder.trend("bubble_ratio", bubble)
        if not self._has_logged_bubble or loggers_follow(self.strategy.trainer):
            self._has_logged_bubble = True
            self.staged.module.log(BUBBLE, bubble, on_step=True, on_epoch=False, batch_size=1)

    def _evaluate(self, step: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        assert self._evaluation is not None
        with self.strategy.evaluation_batch():
            return self._evaluation.step(
                step,
                args,
                kwargs,
                ordinal=evaluation_batch_index(self.strategy.trainer),
                around=self.strategy.step_context(step),
            )

    @override
    def run_generation(self, run: Callable[[], Any]) -> Any:
        if self.staged.placement is None and not self.strategy.is_fitting:
            return run()  # the tensor axis traces a step on fake tensors
        if self.staged.placement is None or self._is_in_step:
            if self.staged.placement is not None and self.staged.runner.runs_layerwise:
                return run()
            raise UnsupportedError(
                "generate runs the layers once for each token, and stages hand a batch on once. In "
                "training, call it in a hook such as on_train_batch_end."
            )
        seed = self.staged.context.seed
        return self.staged.runner.run_layerwise("generate", run, seed, seeds=False)

    @override
    def norm_shares(self) -> Sequence[NormShare]:
        return (self.staged.holdings.norm_share,)

    # Checkpoints. They include gradients that a schedule applies a step late, so that a resumed
    # run applies them too.

    @override
    def holds(self, name: str) -> bool:
        return self.strategy.coordinates[self.name] in self.staged.holdings.holders(name)

    @override
    def stores(self, name: str) -> bool:
        coordinates = self.strategy.coordinates
        is_first = not any(coordinates[each] for each in self.strategy.gradient_axes)
        if not is_first and not self.strategy.data_axis.is_sharded:
            return False  # equal to those of the first replica
        return self.staged.holdings.holders(name)[0] == coordinates[self.name]

    @override
    def opened(self) -> AbstractContextManager[None]:
        return self.staged.holdings.guard.opened()

    @override
    def join_model_state(self, state: dict[str, Any]) -> dict[str, Any]:
        holdings = self.staged.holdings
        return gathered(
            state,
            lambda name: holdings.holders(name)[0],
            self.strategy.groups[self.name],
            self.strategy.root_device,
            keeps=self.strategy.local_rank == 0,
        )

    @override
    def join_optimizer_state(self, state: dict[str, Any]) -> dict[str, Any]:
        delayed = self.staged.delayed
        if delayed is not None:
            named = dict(self.staged.module.named_parameters())
            add_pending(state, named, delayed.pending())
        return joined_state(state, self.strategy.checkpoints.stores)

    @override
    def take_pending(self) -> Take | None:
        delayed = self.staged.delayed
        if delayed is None:
            return None
        delayed.begin()
        return delayed.put

    @override
    def kept_for_resume(self) -> dict[str, Any]:
        return {"step_seed": self.staged.context.seed - self._own_seed}

    @override
    def take_kept(self, state: Mapping[str, Any]) -> None:
        if "step_seed" in state:
            self._resumed_seed = state["step_seed"]
            self.staged.begin(self._context())

    # Forecasts.

    @override
    def dry_batch(self) -> tuple[FakeRuns, torch.device]:
        device, (batch, rest) = self.strategy.root_device, self._sample
        batch = move_data_to_device(batch, device)
        around = self.strategy.step_context("training_step")
        return self.staged.expectations.rehearsed(batch, rest, around).distinct(), device

    @override
    def expected_traffic(self, module: Module) -> list[ExpectedTraffic]:
        trainer = self.strategy.trainer
        return self.staged.expectations.traffic(
            trainer.accumulate_grad_batches, num_norms=int(has_norm_clipping(trainer))
        )

    @override
    def adjust_memory(self, kinds: list[MemoryKind]) -> list[MemoryKind]:
        staged = self.staged
        if staged.delayed is not None:
            kinds = with_second_version(kinds, staged.holdings.parameters)
        # The memory of selective checkpointing is unknown before the first step.
        is_known = self.strategy.recomputation.kind != "selective"
        return kinds + (staged.expectations.activations() if is_known else [])

    # Ending.

    @override
    def explain(self, error: BaseException) -> None:
        explain_write(error)
        self.staged.others.annotate(error)

    @override
    def report(self, error: BaseException) -> None:
        self.staged.others.post(error)

    @override
    def close(self) -> None:
        self.staged.close()
        self.staged.move_absent(torch.device("cpu"))
        self._resumed_seed = None
