"""The pipeline axis in the engine: where its part is asked, and what changes for the others."""

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any

import torch
from lightning.fabric.utilities import move_data_to_device
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn import Parameter
from typing_extensions import override

from boltmesh.errors import ConfigError
from boltmesh.strategies import lightning_compat as compat
from boltmesh.strategies.building.deferred import deferred_init
from boltmesh.strategies.checkpoint.optimizer_state import Take
from boltmesh.strategies.data.axis import AxisContext
from boltmesh.strategies.data.buffers import BufferSync
from boltmesh.strategies.data.late import LateGradients
from boltmesh.strategies.data.late_replicas import share_state
from boltmesh.strategies.data.refusals import refuse_callbacks, refuse_lone_saves
from boltmesh.strategies.data.replica_memory import expected_held_memory
from boltmesh.strategies.engine import MeshStrategy
from boltmesh.strategies.joint_norms import NormShare
from boltmesh.strategies.mesh import MeshLayout
from boltmesh.strategies.pipeline.axis import PipelineAxis
from boltmesh.strategies.pipeline.broadcasting import gathered
from boltmesh.strategies.pipeline.context import PipelineContext
from boltmesh.strategies.pipeline.evaluation import Evaluation
from boltmesh.strategies.pipeline.expected import with_second_version
from boltmesh.strategies.pipeline.kinds import schedule_kind
from boltmesh.strategies.pipeline.options import PipelineOptions
from boltmesh.strategies.pipeline.refusals import (
    refuse_accumulation,
    refuse_late_gradients,
    refuse_layout,
    refuse_measuring,
    refuse_optimizers,
    refuse_remains,
    refuse_run,
)
from boltmesh.strategies.pipeline.rehearsal import StageRehearsal
from boltmesh.strategies.pipeline.replay.units import find_stage_units
from boltmesh.strategies.pipeline.runs import Around
from boltmesh.strategies.pipeline.small_state import add_pending, joined_state
from boltmesh.strategies.pipeline.training import training_step
from boltmesh.strategies.steps.alike import of_first_rank, share_random_state
from boltmesh.strategies.steps.digest import BatchDigest, batch_digest
from boltmesh.strategies.steps.local_metrics import gather_over, let_gather
from boltmesh.strategies.steps.sample import batch_sizes, sample_batch
from boltmesh.strategies.torch_compat import TOTAL_NORM, total_norm_replaced
from boltmesh.telemetry.snapshot import MemoryKind
from boltmesh.telemetry.traffic import ExpectedTraffic

BUBBLE = "boltmesh/bubble_ratio"
"""Idle over total time of the pipeline in the batch before, see ``executor/idle.py``."""


class PipelineMeshStrategy(MeshStrategy):
    """The engine with ranks that hold some layers each; what a door with a pipeline stands on.

    Args:
        pipeline_options: What the user asked of the axis.
        **kwargs: As for ``MeshStrategy``.

    Raises:
        ConfigError: When the schedule and ``activation_checkpointing`` contradict each other.
    """

    divides_modules = True

    def __init__(self, *, pipeline_options: PipelineOptions, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        if not isinstance(self.data_axis, LateGradients):
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
        self._first_batch: tuple[Any, tuple[Any, ...]] = None, ()
        """A batch of the fit that is set up, and what a step is called with behind it."""
        self._resumed_seed: int | None = None
        """What random numbers within steps started from in the run that is gone on with."""
        self._digest: tuple[Any, BatchDigest] | None = None
        """The batch that was made ready last, and what it was before its transfer."""

    # Starting.

    @property
    @override
    def is_distributed(self) -> bool:  # type: ignore[override]
        """Whether the Trainer has to deal the data out: the ranks of a pipeline get the same.

        So loaders keep the sampler that their author gave them, and a run sees its data in the
        order of one process.
        """
        return self.layout.data > 1

    @override
    def layout_of(self, world_size: int) -> MeshLayout:
        layout = super().layout_of(world_size)
        refuse_layout(self.pipeline_axis.options, layout)
        return layout

    @override
    def _reset_seed(self) -> None:
        # Ranks that run the script themselves stand where one process would; ``setup`` makes them
        # alike. Those that begin as empty processes have nothing but the seed.
        if self.layout.data > 1 or self._start_method in {"spawn", "forkserver"}:
            super()._reset_seed()

    @override
    def _build_groups(self) -> dict[str, ProcessGroup]:
        groups = super()._build_groups()
        if "pipeline" not in groups:  # of one rank, which runs all stages
            groups["pipeline"] = groups["data"]
        return groups

    @override
    def place(self, trainer: Trainer) -> None:
        module = self.lightning_module
        assert module is not None
        refuse_callbacks(compat.callbacks_of(trainer), type(self).__name__)
        if self.world_size > 1:
            refuse_lone_saves(compat.callbacks_of(trainer))
        step = self._step_name
        refuse_run(trainer, module, step, synchronises_norms=self._layer_sync is not None)
        if self._is_fitting and schedule_kind(self.pipeline_axis.options.schedule).is_asynchronous:
            refuse_late_gradients(trainer, getattr(self.precision_plugin, "scaler", None))
        share_random_state(self.groups["pipeline"], self.root_device)
        if self.layout.tensor > 1:
            refuse_measuring(self.pipeline_axis.options)
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
            rest, around = compat.step_arguments(module, step), self._around(step)
            if is_new:
                self.cut_into_stages(find_stage_units(module))
                # What crosses borders is of the type that the model will have.
                self.model = self.precision_plugin.convert_module(module)
                axis.place(module, step, sample.batch, rest, around)
                self._evaluation = Evaluation(axis)
            if self._is_fitting:
                axis.expect(sample.batch, rest, around)
                self._first_batch = sample.batch, rest
        if is_new and self.data_axis.is_sharded:
            self.model_to_device()  # stages exist already, and are gathered whole for a step

    @override
    def setup(self, trainer: Trainer) -> None:
        axis = self.pipeline_axis
        gather_over(self._metric_owners(), self.groups["data"])
        super().setup(trainer)
        self._first_batch = None, ()
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

    @override
    @contextmanager
    def tensor_init_context(self, empty_init: bool | None = None) -> Iterator[None]:
        # What ``configure_model`` makes may be larger than this rank's memory. Of each rank's own
        # stages it is given the weights that its author's initialisation gives it.
        with deferred_init(), self.precision_plugin.tensor_init_context():
            yield

    def _pipeline_context(self) -> PipelineContext:
        assert isinstance(self.data_axis, LateGradients)
        return PipelineContext(
            group=self.groups["pipeline"],
            new_group=partial(self.new_group, "pipeline"),
            data=self.data_axis,
            device=self.root_device,
            recorder=self.recorder,
            seed=self._step_seed(),
            timeout=timedelta(seconds=self.timeout_s),
            scaler=getattr(self.precision_plugin, "scaler", None),
            recomputed=self.recomputation.blocks,
            num_replicas=self.layout.data,
            silent=self.without_communication,
        )

    def _step_seed(self) -> int:
        """What random numbers within steps start from; alike on all ranks of a pipeline."""
        if self._resumed_seed is not None and self._is_fitting:
            return self._resumed_seed + self._own_seed
        if self.seed is not None:
            return self.seed + self._own_seed
        return of_first_rank(torch.initial_seed() % 2**62)

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
        trainer = compat.trainer_of(self.lightning_module)
        assert trainer is not None
        return super().expected_traffic() + self.pipeline_axis.expected_traffic(
            trainer.accumulate_grad_batches, num_norms=int(compat.has_norm_clipping(trainer))
        )

    def rehearsed_batch(self) -> tuple[StageRehearsal, torch.device]:
        """Return what this rank runs of a batch of training, and where the batch is."""
        batch, rest = self._first_batch
        batch = move_data_to_device(batch, self.root_device)
        around = self._around("training_step")
        return self.pipeline_axis.rehearsed(batch, rest, around), self.root_device

    @override
    def expected_memory(self) -> list[MemoryKind]:
        assert self.lightning_module is not None
        axis = self.pipeline_axis
        # What selective checkpointing keeps is not seen before the first step.
        is_known = self.recomputation.kind != "selective"
        parameters = axis.holdings.parameters
        held = expected_held_memory(self.lightning_module, self.optimizers, parameters)
        if axis.delayed is not None:
            held = with_second_version(held, parameters)
        return held + (axis.expected_activations() if is_known else [])

    @override
    def _axis_context(self, trainer: Trainer) -> AxisContext:
        # These are places, not objects: a list would keep parameters whole that become shards.
        return replace(super()._axis_context(trainer), held=self.held_parameters())

    @override
    def held_parameters(self) -> Collection[Parameter]:
        axis = self.pipeline_axis
        return axis.holdings.parameters if axis.placement is not None else []

    @override
    def kept_beside(self) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        delayed = self.pipeline_axis.delayed
        return ((), ()) if delayed is None else delayed.tensors()

    # The loops.

    @override
    def on_train_start(self) -> None:
        super().on_train_start()
        self._adopt_metrics()

    @override
    def on_train_end(self) -> None:
        self.pipeline_axis.drain()
        super().on_train_end()

    @override
    def on_validation_start(self) -> None:
        # For the memory of what is kept for backward passes; numbers would be the same.
        self.pipeline_axis.drain()
        super().on_validation_start()

    @override
    def _begin_evaluation(self) -> None:
        super()._begin_evaluation()
        self._adopt_metrics()

    def _adopt_metrics(self) -> None:
        """Metrics may have been made as late as in the user's hooks at the start of a loop."""
        gather_over(self._metric_owners(), self.groups["data"])
        self.pipeline_axis.find_metrics()

    def _metric_owners(self) -> list[object]:
        trainer = compat.trainer_of(self.lightning_module)
        callbacks = [] if trainer is None else compat.callbacks_of(trainer)
        return [self.lightning_module, *callbacks]

    @override
    def process_dataloader(self, dataloader: object) -> object:
        dataloader = super().process_dataloader(dataloader)
        # Lightning would seed them by the global rank: other crops and masks on every stage.
        compat.seed_workers(dataloader, self.coordinates["data"])
        self.pipeline_axis.cutter.batch_sizes |= batch_sizes(dataloader)
        return dataloader

    @override
    def batch_to_device(
        self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0
    ) -> Any:
        trainer = compat.trainer_of(self.lightning_module)
        is_last = False
        if trainer is not None and trainer.state.fn is not None:
            is_last = compat.gives_last_batch(trainer)
        ready = super().batch_to_device(batch, device, dataloader_idx)
        # Before the transfer, so that no device is waited for; on the CPU as the step gets it.
        seen = ready if self.root_device.type == "cpu" else batch
        self._digest = ready, batch_digest(seen, is_last=is_last)
        return ready

    def _digest_of(self, batch: Any) -> BatchDigest:
        """Return the digest of a batch that a step is given."""
        made, self._digest = self._digest, None
        if made is not None and made[0] is batch:
            return made[1]
        return batch_digest(batch)

    def _around(self, step: str) -> Around:
        plugin = self.precision_plugin
        contexts: dict[str, Around] = {
            "training_step": plugin.train_step_context,
            "validation_step": plugin.val_step_context,
            "test_step": plugin.test_step_context,
            "predict_step": plugin.predict_step_context,
        }
        return contexts[step]

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        trainer = compat.trainer_of(self.lightning_module)
        assert trainer is not None
        axis = self.pipeline_axis
        if axis.delayed is not None:
            refuse_accumulation(trainer)
        self._check(args[0])
        axis.digest = self._digest_of(args[0])
        told = axis.sharing.size_per_batch()
        with self.recorder.phase("forward"), total_norm_replaced(TOTAL_NORM):
            output = training_step(
                axis,
                args,
                kwargs,
                ordinal=trainer.fit_loop.total_batch_idx,
                around=self._around("training_step"),
            )
        if axis.sharing.size_per_batch() != told:  # the step logs something else than before
            self.recorder.expect(self.expected_traffic())
        self._log_bubble()
        return output

    def _check(self, batch: Any) -> None:
        """Let what other axes refuse of a batch end the step on all ranks of the pipeline."""
        try:
            self.check_batch(batch)
        except Exception as error:  # noqa: BLE001 - told to all ranks and raised again
            self.pipeline_axis.refuse(error)

    def _log_bubble(self) -> None:
        """Log the newest bubble that is known, the same on all ranks; of the first batch none."""
        bubble = self.pipeline_axis.bubble
        if bubble is not None:
            assert self.lightning_module is not None
            self.lightning_module.log(BUBBLE, bubble, on_step=True, on_epoch=False, batch_size=1)

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._evaluate("validation_step", args, kwargs)

    @override
    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._evaluate("test_step", args, kwargs)

    @override
    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._evaluate("predict_step", args, kwargs)

    def _evaluate(self, step: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        trainer = compat.trainer_of(self.lightning_module)
        assert trainer is not None
        self._check(args[0])
        self.pipeline_axis.digest = self._digest_of(args[0])
        with self._evaluation_batch():
            return self._evaluation.step(
                step,
                args,
                kwargs,
                ordinal=compat.evaluation_batch_index(trainer),
                around=self._around(step),
            )

    # Gradients.

    @override
    def norm_shares(self) -> list[NormShare]:
        return [*super().norm_shares(), self.pipeline_axis.holdings.norm_share]

    @override
    def optimizer_step(self, *args: Any, **kwargs: Any) -> Any:
        # A hook of the user's may clip by what torch has.
        with total_norm_replaced(self.data_axis.norms.total):
            return super().optimizer_step(*args, **kwargs)

    # Checkpoints.

    @property
    @override
    def stores_shards(self) -> bool:
        return True

    @override
    def holds(self, name: str) -> bool:
        here = self.coordinates["pipeline"] in self.pipeline_axis.holdings.holders(name)
        return here and super().holds(name)

    @override
    def stores(self, name: str) -> bool:
        if self.coordinates["data"] > 0 and not self.data_axis.is_sharded:
            return False  # the same as the first data rank's
        here = self.pipeline_axis.holdings.holders(name)[0] == self.coordinates["pipeline"]
        return here and super().stores(name)

    @override
    def holds_buffer(self, name: str) -> bool:
        return self.pipeline_axis.holdings.has_buffer(name) and super().holds_buffer(name)

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        if not self._obstacle:
            self.pipeline_axis.drain()
        with self.pipeline_axis.holdings.guard.opened():
            return super().lightning_module_state_dict()

    @override
    def whole_state(self, state_dict: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        axis = self.pipeline_axis
        with axis.holdings.guard.opened():
            state = super().whole_state(state_dict)
        return gathered(
            state,
            lambda name: axis.holdings.holders(name)[0],
            self.groups["pipeline"],
            self.root_device,
            keeps=self.local_rank == 0,
        )

    @override
    def _joined_state(self, state: dict[str, Any]) -> dict[str, Any]:
        delayed = self.pipeline_axis.delayed
        if delayed is not None:
            add_pending(state, self._named_parameters(), delayed.pending())
        return joined_state(state, self.stores)

    def _named_parameters(self) -> dict[str, Parameter]:
        assert self.lightning_module is not None
        return dict(self.lightning_module.named_parameters())

    @override
    def take_pending(self) -> Take | None:
        delayed = self.pipeline_axis.delayed
        if delayed is None:
            return None
        delayed.begin()
        return delayed.put

    # Ending.

    @override
    def explain(self, exception: BaseException) -> None:
        super().explain(exception)
        self.pipeline_axis.others.explain(exception)

    @override
    def on_exception(self, exception: BaseException) -> None:
        super().on_exception(exception)
        self.pipeline_axis.others.tell(exception)

    @override
    def teardown(self) -> None:
        let_gather(self._metric_owners())
        self.pipeline_axis.close()
        self.pipeline_axis.move_absent(torch.device("cpu"))
        self._resumed_seed = None
        super().teardown()
