"""The pipeline axis in the engine: where its part is asked, and what changes for the others."""

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from lightning.fabric.utilities import move_data_to_device
from lightning.pytorch import LightningModule, Trainer
from torch.distributed import ProcessGroup
from typing_extensions import override

from boltmesh.errors import ConfigError
from boltmesh.strategies.data_parallel.axis import AxisContext, PipelineDataAxis
from boltmesh.strategies.data_parallel.param_state import BufferSync
from boltmesh.strategies.data_parallel.pipeline_ddp import share_state
from boltmesh.strategies.dry_run.broadcast import broadcast_from_rank0
from boltmesh.strategies.dry_run.fake_optimizers import fake_optimizers
from boltmesh.strategies.dry_run.sample import sample_batch
from boltmesh.strategies.engine.pipeline_checkpoints import PipelineCheckpoints
from boltmesh.strategies.engine.pipeline_loops import PipelineLoops
from boltmesh.strategies.lightning_compat.loops import step_arguments
from boltmesh.strategies.lightning_compat.trainer import has_norm_clipping
from boltmesh.strategies.mesh import MeshLayout
from boltmesh.strategies.pipeline.axis import PipelineAxis
from boltmesh.strategies.pipeline.evaluation import Evaluation
from boltmesh.strategies.pipeline.expected_traffic import StageRehearsal, with_second_version
from boltmesh.strategies.pipeline.options import (
    STAGES,
    PipelineContext,
    PipelineOptions,
    refuse_late_gradients,
    refuse_layout,
    refuse_manual_optimization,
    refuse_measuring,
    refuse_optimizers,
    refuse_remains,
)
from boltmesh.strategies.pipeline.schedules.registry import schedule_kind
from boltmesh.strategies.pipeline.stage.units import find_stage_units
from boltmesh.telemetry.snapshot import MemoryKind
from boltmesh.telemetry.traffic import ExpectedTraffic


class PipelineMeshStrategy(PipelineLoops, PipelineCheckpoints):
    """The engine with ranks that hold some layers each; what a door with a pipeline stands on.

    Args:
        pipeline_options: What the user asked of the axis.
        **kwargs: As for ``MeshStrategy``.

    Raises:
        ConfigError: When the schedule and ``activation_checkpointing`` contradict each other.
    """

    reasons = STAGES

    def __init__(self, *, pipeline_options: PipelineOptions, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        if not isinstance(self.data_axis, PipelineDataAxis):
            raise ConfigError(
                f"The data axis {type(self.data_axis).__name__} goes along with forward passes of "
                f"the whole module, and a pipeline runs pieces of it. Use "
                f"LateReplicas() or LateShards(...)."
            )
        schedule = pipeline_options.schedule
        if self.recomputation.kind is not None and schedule_kind(schedule).splits_backward:
            raise ConfigError(
                f"schedule={schedule!r} takes each backward pass in two halves, and "
                f"activation_checkpointing={self.recomputation.kind!r} would run the blocks again "
                f"for each part of both. Use schedule='1f1b' or 'interleaved_1f1b', or leave "
                f"activation_checkpointing out."
            )
        if self.recomputation.kind is not None and schedule_kind(schedule).is_asynchronous:
            raise ConfigError(
                f"schedule={schedule!r} does backward passes after the next optimizer step, and "
                f"activation_checkpointing={self.recomputation.kind!r} would run the blocks again "
                f"there, with other weights. Use schedule='1f1b', or leave "
                f"activation_checkpointing out."
            )
        self.pipeline_axis = PipelineAxis(pipeline_options)
        self._is_new = True
        """Whether the model was placed for this run, and not for one before."""
        self._resumed_seed: int | None = None
        """What random numbers within steps started from in the run that is gone on with."""

    # Starting.

    @override
    def layout_of(self, world_size: int) -> MeshLayout:
        layout = super().layout_of(world_size)
        refuse_layout(self.pipeline_axis.options, layout)
        return layout

    @override
    def _asks_group(self, axis: str) -> bool:
        return axis == "pipeline" or super()._asks_group(axis)

    @override
    def sharing_groups(self) -> list[ProcessGroup]:
        return [self.groups["pipeline"], *super().sharing_groups()]

    @override
    def place(self, trainer: Trainer) -> None:
        module = self.lightning_module
        assert module is not None
        self._refuse(trainer, module)
        super().place(trainer)
        if self._is_fitting:
            self.recomputation.put_on(module)
        axis = self.pipeline_axis
        axis.begin(self._pipeline_context())
        is_new = axis.placement is None or axis.placement.plans.root is not module
        self._is_new = is_new
        if is_new or self._is_fitting:
            sample = sample_batch(trainer)
            axis.cutter.batch_sizes |= sample.batch_sizes
            step = self._step_name
            rest, around = step_arguments(module, step), self._around(step)
            if is_new:
                self.cut_into_stages(find_stage_units(module))
                # What crosses borders is of the type that the model will have.
                self.model = self.precision_plugin.convert_module(module)
                with fake_optimizers(self, module):
                    axis.place(module, step, sample.batch, rest, around)
                self._evaluation = Evaluation(axis)
            if self._is_fitting:
                with fake_optimizers(self, module):
                    axis.expectations.look_at(sample.batch, rest, around)
                self._sample = sample.batch, rest
        if is_new and self.data_axis.is_sharded:
            self.model_to_device()  # stages exist already, and are gathered whole for a step

    def _refuse(self, trainer: Trainer, module: LightningModule) -> None:
        """Refuse what is known to be impossible before anything is communicated."""
        options = self.pipeline_axis.options
        if self._is_fitting:
            refuse_manual_optimization(module)
            if schedule_kind(options.schedule).is_asynchronous:
                refuse_late_gradients(trainer, getattr(self.precision_plugin, "scaler", None))
        if self.layout.tensor > 1:
            refuse_measuring(options)

    @override
    def setup(self, trainer: Trainer) -> None:
        super().setup(trainer)
        axis = self.pipeline_axis
        if self._is_new:
            axis.start()
        axis.holdings.let_gather()
        if self._is_fitting and axis.delayed is not None:
            axis.delayed.begin()
        axis.follow_scaler()
        axis.tell(trainer.accumulate_grad_batches)

    @override
    def refuse_remains(self, module: LightningModule) -> None:
        refuse_remains(module)

    def _pipeline_context(self) -> PipelineContext:
        assert isinstance(self.data_axis, PipelineDataAxis)
        return PipelineContext(
            group=self.groups["pipeline"],
            new_group=partial(self.new_group, "pipeline"),
            data=self.data_axis,
            device=self.root_device,
            recorder=self.recorder,
            seed=self._step_seed(),
            timeout=self.timeout,
            scaler=getattr(self.precision_plugin, "scaler", None),
            recomputed=self.recomputation.blocks,
            num_replicas=self.layout.data,
            num_sharing=self.layout.tensor,
            silent=self.without_communication,
        )

    def _step_seed(self) -> int:
        """What random numbers within steps start from; alike on all ranks of a pipeline."""
        if self._resumed_seed is not None and self._is_fitting:
            return self._resumed_seed + self._own_seed
        if self.seed is not None:
            return self.seed + self._own_seed
        return broadcast_from_rank0(torch.initial_seed() % 2**62)

    @property
    def _own_seed(self) -> int:
        """By what this pipeline's seed differs from the first one's."""
        return 0 if self.seed is None else self.coordinates["data"]

    @override
    def kept_for_resume(self) -> dict[str, Any]:
        return {"step_seed": self.pipeline_axis.context.seed - self._own_seed}

    @override
    def take_kept(self, state: dict[str, Any]) -> None:
        if "step_seed" in state:
            self._resumed_seed = state["step_seed"]
            self.pipeline_axis.begin(self._pipeline_context())

    @override
    def setup_optimizers(self, trainer: Trainer) -> None:
        super().setup_optimizers(trainer)
        refuse_optimizers(self.optimizers)

    @override
    def model_to_device(self) -> None:
        self.pipeline_axis.move_absent(self.root_device)
        super().model_to_device()

    @override
    def _share_weights(self) -> None:
        # Every rank of a pipeline holds others, and the next pipeline the same.
        assert self.model is not None
        group = self.groups["data"]
        buffers = BufferSync(self.model, group, holds=self.holds_buffer)
        share_state(self.held_parameters(), buffers, group)

    @override
    def expected_traffic(self) -> list[ExpectedTraffic]:
        return super().expected_traffic() + self.pipeline_axis.expectations.traffic(
            self._trainer.accumulate_grad_batches,
            num_norms=int(has_norm_clipping(self._trainer)),
        )

    def rehearsed_batch(self) -> tuple[StageRehearsal, torch.device]:
        """Return what this rank runs of a batch of training, and where the batch is."""
        batch, rest = self._sample
        batch = move_data_to_device(batch, self.root_device)
        around = self._around("training_step")
        return self.pipeline_axis.expectations.rehearsed(batch, rest, around), self.root_device

    @override
    def expected_memory(self) -> list[MemoryKind]:
        assert self.lightning_module is not None
        axis = self.pipeline_axis
        # What selective checkpointing keeps is not seen before the first step.
        is_known = self.recomputation.kind != "selective"
        held = self.data_axis.expected_memory(self.lightning_module, self.optimizers)
        if axis.delayed is not None:
            held = with_second_version(held, axis.holdings.parameters)
        return held + (axis.expectations.activations() if is_known else [])

    @override
    def _axis_context(self, trainer: Trainer) -> AxisContext:
        # These are places, not objects: a list would keep parameters whole that become shards.
        return replace(super()._axis_context(trainer), held=self.held_parameters())

    # Ending.

    @override
    def explain(self, exception: BaseException) -> None:
        super().explain(exception)
        self.pipeline_axis.others.annotate(exception)

    @override
    def on_exception(self, exception: BaseException) -> None:
        super().on_exception(exception)
        self.pipeline_axis.others.post(exception)

    @override
    def teardown(self) -> None:
        self.pipeline_axis.close()
        self.pipeline_axis.move_absent(torch.device("cpu"))
        self._resumed_seed = None
        super().teardown()
