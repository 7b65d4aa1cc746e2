"""The one engine under every strategy: mesh, process groups, launch, loops, checkpoints.

``MeshStrategy`` does what Lightning asks of any strategy; how the model is put on an axis is the
business of that axis's part (``data/``), and the doors (``ddp.py``, ...) choose the parts. The
LightningModule stays as its author wrote it.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from functools import partial
from typing import Any

import torch
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.plugins import Precision
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor
from torch.nn import Module, Parameter
from torch.optim import Optimizer
from typing_extensions import override

from boltmesh.strategies import lightning_compat as compat
from boltmesh.strategies import observe
from boltmesh.strategies.building.materialize import materialize
from boltmesh.strategies.checkpoint.beside_refusals import refuse_beside
from boltmesh.strategies.checkpoint.remote import refuse_remote_folders
from boltmesh.strategies.data.axis import AxisContext, DataAxis
from boltmesh.strategies.data.refusals import refuse_empty_share
from boltmesh.strategies.joint_norms import NormShare
from boltmesh.strategies.random_state import seed_random_state
from boltmesh.strategies.rank_mesh import RankMeshStrategy
from boltmesh.strategies.rank_mesh import StartMethod as StartMethod
from boltmesh.strategies.recomputation import Recomputation, Recompute
from boltmesh.strategies.resume import ResumeManager
from boltmesh.telemetry.recording.recorder import NullRecorder, Recorder
from boltmesh.telemetry.snapshot import AlertThresholds, MemoryKind
from boltmesh.telemetry.traffic import ExpectedTraffic

_STEPS = {
    TrainerFn.FITTING: "training_step",
    TrainerFn.VALIDATING: "validation_step",
    TrainerFn.TESTING: "test_step",
    TrainerFn.PREDICTING: "predict_step",
}


class MeshStrategy(RankMeshStrategy):
    """Runs a LightningModule on a mesh of ranks with the axes pipeline, data and tensor.

    Args:
        data_axis: How the ranks of the data axis share the model.
        pipeline: Size of the pipeline axis.
        tensor: Size of the tensor axis. The data axis takes the ranks that are left.
        timeout_s: How long a collective may take before the run ends with an error, seconds.
        telemetry: Record what ``boltmesh top`` shows.
        activation_checkpointing: ``"full"`` keeps the inputs of each repeated block alone for the
            backward pass, which runs the blocks again: a third more work for the memory of all but
            one block. ``"selective"`` also keeps what matrix products, convolutions and attention
            give, and repeats the rest. None keeps everything. The numbers are the same.
        seed: Give every data rank a random stream of its own, derived from this number, once the
            model is built: dropout then differs between ranks and repeats between runs. With None
            the streams stay as ``seed_everything`` left them, alike on every rank.
        async_save: Write checkpoints beside training: a save copies what this rank holds into host
            memory and goes on. The next save and the end of the run wait for it and raise its
            error; what it replaces is deleted once it is complete.
        process_group_backend: ``gloo`` or ``nccl``; by default the one that fits the device.
        start_method: ``popen`` runs the script again for each rank; ``spawn``, ``fork`` and
            ``forkserver`` start functions, for notebooks and tests.
        accelerator: As in any Lightning strategy, like the arguments below.
        parallel_devices: The devices of this host's ranks.
        cluster_environment: Tells ranks and addresses.
        checkpoint_io: Writes and reads checkpoint files.
        precision_plugin: Set by ``Trainer(precision=...)``.
    """

    strategy_name = "bolt_mesh"

    def __init__(
        self,
        *,
        data_axis: DataAxis,
        pipeline: int = 1,
        tensor: int = 1,
        timeout_s: float = 1800.0,
        telemetry: bool = True,
        activation_checkpointing: Recompute | None = None,
        seed: int | None = None,
        async_save: bool = False,
        process_group_backend: str | None = None,
        start_method: StartMethod = "popen",
        accelerator: Accelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
    ) -> None:
        super().__init__(
            pipeline=pipeline,
            tensor=tensor,
            timeout_s=timeout_s,
            process_group_backend=process_group_backend,
            start_method=start_method,
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            precision_plugin=precision_plugin,
        )
        self._forward_redirection = compat.DDPForwardRedirection()
        self.data_axis = data_axis
        if checkpoint_io is not None:
            self.checkpoint_io = checkpoint_io  # which a sharded axis refuses
        self.telemetry = telemetry
        self.recomputation = Recomputation(activation_checkpointing)
        self.seed = seed
        self.async_save = async_save
        self.recorder: Recorder | NullRecorder = NullRecorder()
        self.recipe: str | None = None
        """Which config the run was made from; set by ``boltmesh fit``, told to who watches."""
        self.alerts: AlertThresholds | None = None
        """When who watches is to be alarmed; set like ``recipe``."""
        self._resume: ResumeManager | None = None
        self._sigterm: compat.SigtermAgreement | None = None

    @property
    def _is_fitting(self) -> bool:
        trainer = compat.trainer_of(self.lightning_module)
        return trainer is not None and trainer.state.fn == TrainerFn.FITTING

    @property
    def _step_name(self) -> str:
        """The method of the module that the run begins with."""
        trainer = compat.trainer_of(self.lightning_module)
        assert trainer is not None
        assert trainer.state.fn is not None
        return _STEPS[trainer.state.fn]

    # Starting.

    @override
    def setup_environment(self) -> None:
        super().setup_environment()
        self._resume = ResumeManager(self)
        if self.telemetry:
            self.recorder = observe.open_recorder_of(self)

    def place(self, trainer: Trainer) -> None:
        """Put the model on the axes that divide it, before anything is moved or wrapped.

        Called at the beginning of ``setup``. Each axis lets the next inner one go first: stages
        are made of layers that are divided already. Collective over all ranks.
        """

    @override
    def setup(self, trainer: Trainer) -> None:
        assert self.accelerator is not None
        assert self.model is not None
        self.place(trainer)
        self.accelerator.setup(trainer)
        is_fitting = trainer.state.fn == TrainerFn.FITTING
        if is_fitting and self.stores_shards:
            refuse_remote_folders(trainer)
        if is_fitting and self.async_save:
            refuse_beside(
                trainer, self.checkpoint_io, keeps_state_on_disk=self.data_axis.keeps_state_on_disk
            )
            self.open_saving(timedelta(seconds=self.timeout_s))
        if is_fitting:
            self.recomputation.put_on(self.model)
        if is_fitting and self._layer_sync is not None:
            self.model = self._layer_sync.apply(self.model)
        self.model = self.precision_plugin.convert_module(self.model)
        if not self.data_axis.is_sharded:
            self.model_to_device()
        if is_fitting or self.data_axis.is_sharded:
            self.put_on_data_axis(trainer)
        else:
            self._share_weights()
        if is_fitting:
            self.setup_optimizers(trainer)
            assert self.lightning_module is not None
            reads_gradients = compat.reads_gradients(trainer, self.lightning_module)
            self.data_axis.adopt(self.optimizers, reads_gradients=reads_gradients)
        elif self.data_axis.is_sharded:
            self.data_axis.adopt([], reads_gradients=False)
        self.setup_precision_plugin()
        if self.data_axis.is_sharded:
            compat.forbid_inference_mode(trainer)
        if is_fitting:
            if not self.data_axis.is_sharded:
                compat.optimizers_to_device(self.optimizers, self.root_device)
            self.recorder.expect(self.expected_traffic())
            self.recorder.expect_memory(self.expected_memory())
            self.recorder.watch_memory(partial(observe.tensors_by_kind, self))
            if self.seed is not None:
                seed_random_state(self.seed + self.coordinates["data"])

    def put_on_data_axis(self, trainer: Trainer) -> None:
        """Make replicas or shards of the model, as the other axes have left it.

        Parameters may be other objects afterwards.
        """
        assert self.model is not None
        self.model = self.data_axis.wrap(self.model, self._axis_context(trainer))

    def _share_weights(self) -> None:
        """Give every rank the first one's model, for a run that trains nothing."""
        assert self.model is not None
        compat.sync_module_states(self.model)

    def _axis_context(self, trainer: Trainer) -> AxisContext:
        assert self.lightning_module is not None
        return AxisContext(
            group=self.groups["data"],
            device=self.root_device,
            compute_dtype=compat.autocast_dtype(self.precision_plugin),
            ranks_per_node=self.num_processes,
            num_microbatches=trainer.accumulate_grad_batches,
            has_norm_clipping=compat.has_norm_clipping(trainer),
            reads_gradients=compat.reads_gradients(trainer, self.lightning_module),
            timeout=timedelta(seconds=self.timeout_s),
            norm_shares=self.norm_shares(),
            scaler=getattr(self.precision_plugin, "scaler", None),
            zeroes_gradients=partial(compat.zeroes_gradients, trainer),
            recorder=self.recorder,
            recomputed=self.recomputation.blocks,
            holds_buffer=self.holds_buffer,
        )

    @override
    def model_to_device(self) -> None:
        assert self.model is not None
        materialize(self.model, self.root_device)
        self.model.to(self.root_device)

    def refuse_remains(self, module: LightningModule) -> None:
        """Refuse to divide layers of a model of which this rank no longer has all layers.

        Raises:
            ConfigError: With what to do in which order.
        """

    def cut_into_stages(self, units: Mapping[str, Module]) -> None:
        """Prepare layers that are divided already for ranks that run some of them each.

        Args:
            units: What is run as a whole, by dotted name.
        """

    def without_communication(self) -> AbstractContextManager[None]:
        """Enter what layers are run in on tensors without data, by this rank alone."""
        return nullcontext()

    def expected_traffic(self) -> list[ExpectedTraffic]:
        """What one optimizer step should move on this rank, to be shown beside what it moved.

        Empty under manual optimisation, where only the user knows how often gradients are made.
        """
        if self.model is None or self.lightning_module is None:
            return []
        if not self.lightning_module.automatic_optimization:
            return []
        return self.data_axis.expected_traffic(self.model)

    def expected_memory(self) -> list[MemoryKind]:
        """What memory this rank should need, to be shown beside what it takes."""
        if self.model is None:
            return []
        return self.data_axis.expected_memory(self.model, self.optimizers)

    def held_parameters(self) -> Collection[Parameter]:
        """The module's parameters of which this rank has values, shards among them."""
        return [] if self.lightning_module is None else list(self.lightning_module.parameters())

    def holds_buffer(self, name: str) -> bool:
        """Whether this rank has the model's value of a buffer, and not what it needs no longer."""
        return True

    def kept_beside(self) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        """Other versions of weights and gradients that this rank holds, beside the module's own."""
        return (), ()

    # Resuming.

    def kept_for_resume(self) -> dict[str, Any]:
        """What a checkpoint keeps of the strategy, beside random states and places in the data.

        Alike on all ranks; plain numbers and strings.
        """
        return {}

    def take_kept(self, state: dict[str, Any]) -> None:
        """Take what ``kept_for_resume`` gave in the run that is gone on with."""

    # The loops.

    @override
    def process_dataloader(self, dataloader: object) -> object:
        if self.data_axis.is_sharded:
            refuse_empty_share(dataloader, self.groups["data"], self.root_device)
        trainer = compat.trainer_of(self.lightning_module)
        if self._resume is None or trainer is None or not self._is_fitting:
            return dataloader
        return self._resume.adopt(dataloader, trainer)

    @override
    def batch_to_device(
        self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0
    ) -> Any:
        with self.recorder.phase("transfer"):
            return super().batch_to_device(batch, device, dataloader_idx)

    @override
    def on_train_start(self) -> None:
        self._agree_on_sigterm()
        trainer = compat.trainer_of(self.lightning_module)
        if self._resume is not None and trainer is not None:
            self._resume.start(trainer)

    @override
    def on_train_end(self) -> None:
        self.finish_saving()

    @override
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self._resume is not None:
            self._resume.point.settle()

    @override
    def on_validation_start(self) -> None:
        if self._resume is not None and self._is_fitting:
            self._resume.point.set_aside()
        self._begin_evaluation()

    @override
    def on_validation_end(self) -> None:
        self.data_axis.end_evaluation()
        if self._resume is not None:
            self._resume.point.take_back()

    @override
    def on_test_start(self) -> None:
        self._begin_evaluation()

    @override
    def on_test_end(self) -> None:
        self.data_axis.end_evaluation()

    @override
    def on_predict_start(self) -> None:
        self._begin_evaluation()

    @override
    def on_predict_end(self) -> None:
        self.data_axis.end_evaluation()

    def _agree_on_sigterm(self) -> None:
        """Lightning has put its own handler in front of the first loop."""
        trainer = compat.trainer_of(self.lightning_module)
        assert trainer is not None
        if trainer.world_size > 1:
            if self._sigterm is None:
                self._sigterm = compat.SigtermAgreement(trainer)
            self._sigterm.begin()

    def _begin_evaluation(self) -> None:
        self._agree_on_sigterm()
        trainer = compat.trainer_of(self.lightning_module)
        assert trainer is not None
        self.data_axis.begin_evaluation(
            compat.evaluation_length(trainer), draws_batches=compat.draws_batches(trainer)
        )
        compat.watch_batches(trainer, self.data_axis.run_out_of_batches)

    def _evaluation_batch(self) -> AbstractContextManager[None]:
        trainer = compat.trainer_of(self.lightning_module)
        assert trainer is not None
        return self.data_axis.evaluation_batch(partial(compat.evaluation_is_over, trainer))

    def check_batch(self, batch: Any) -> None:
        """Raise where ranks that share the model were given another batch than this one.

        Called before every step with what ``batch_to_device`` has returned.
        """

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        self.check_batch(args[0])
        with self._evaluation_batch():
            return super().validation_step(*args, **kwargs)

    @override
    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        self.check_batch(args[0])
        with self._evaluation_batch():
            return super().test_step(*args, **kwargs)

    @override
    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        self.check_batch(args[0])
        with self._evaluation_batch():
            return super().predict_step(*args, **kwargs)

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        self.check_batch(args[0])
        with self.recorder.phase("forward"):
            return super().training_step(*args, **kwargs)

    @override
    def pre_backward(self, closure_loss: Tensor) -> None:
        # Left in ``post_backward``; an error in between leaves the rank in this phase, where it is.
        self.recorder.phase("backward").__enter__()
        assert self.model is not None
        if self.lightning_module is not None and not self.lightning_module.automatic_optimization:
            self.data_axis.before_manual_backward(self.model, closure_loss)

    @override
    def post_backward(self, closure_loss: Tensor) -> None:
        assert self.model is not None
        if self.lightning_module is not None and not self.lightning_module.automatic_optimization:
            self.data_axis.after_manual_backward(self.model)
        self.recorder.phase("backward").__exit__(None, None, None)

    @override
    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        assert self.model is not None
        with self.data_axis.no_sync(self.model):
            yield

    @override
    def optimizer_step(
        self,
        optimizer: Optimizer,
        closure: Callable[[], Any],
        model: LightningModule | Module | None = None,
        **kwargs: Any,
    ) -> Any:
        with self.recorder.phase("optimizer"):
            output = super().optimizer_step(optimizer, closure, model, **kwargs)
            assert self.model is not None
            self.data_axis.after_optimizer_step(self.model, optimizer)
            return output

    # Precision and clipping.

    def norm_shares(self) -> list[NormShare]:
        """What the axes beside the data axis say of norms of gradients, innermost first."""
        return []

    def gradient_norm(self, optimizer: Optimizer) -> float | None:
        """Return the norm of an optimizer's gradients over the whole model, before clipping.

        Collective over all ranks. Valid between the backward pass and the optimizer's step,
        as in ``on_before_optimizer_step``; None without any gradient. Gradients that live apart
        from ``.grad`` (offload) count too.
        """
        return self.data_axis.gradient_norm(optimizer)

    @property  # type: ignore[explicit-override]
    @override
    def precision_plugin(self) -> Precision:
        return super().precision_plugin

    @precision_plugin.setter
    @override
    def precision_plugin(self, precision_plugin: Precision | None) -> None:
        # The Trainer clips through the plugin and never asks the strategy; a plugin with a norm
        # of its own keeps it.
        if precision_plugin is not None and compat.uses_lightning_norm(precision_plugin):
            precision_plugin.clip_grad_by_norm = self._clip_by_norm  # type: ignore[method-assign]
        self._precision_plugin = precision_plugin

    def _clip_by_norm(self, optimizer: Optimizer, clip_val: float) -> None:
        parameters = self.precision_plugin.main_params(optimizer)
        self.data_axis.clip_by_norm(optimizer, parameters, clip_val)

    # Ending.

    @override
    def on_exception(self, exception: BaseException) -> None:
        self.explain(exception)
        self.recorder.fail(exception)

    def explain(self, exception: BaseException) -> None:
        """Put into an error that ends the run what this rank knows of its cause.

        A rank that lost a peer may know why it went. Callbacks that pass an error on ask for it,
        because Lightning tells them before the strategy.
        """
        self.data_axis.explain(exception)
        self.recorder.explain(exception)

    @override
    def teardown(self) -> None:
        self._close_saving()
        if self._sigterm is not None:
            self._sigterm.end()
            self._sigterm = None
        self.recomputation.take_off()
        module = self.lightning_module
        self.model = module
        trainer = compat.trainer_of(module)
        if (
            module is not None
            and trainer is not None
            and trainer.state.fn == TrainerFn.FITTING
            and self._layer_sync is not None
            and not self.data_axis.is_sharded  # whose shards know the modules that hold them
        ):
            self.model = self._layer_sync.revert(module)
        self.data_axis.release()
        self.recorder.close()
        self.recorder = NullRecorder()
        if not self.stores_shards:
            super().teardown()
            return
        # What ranks hold parts of stays where its axis has put it.
        assert self.cluster_environment is not None
        assert self.accelerator is not None
        self.cluster_environment.teardown()
        self.precision_plugin.teardown()
        self.accelerator.teardown()

    @override
    def __getstate__(self) -> dict[str, Any]:
        # Spawned ranks make their own files and hooks.
        state = super().__getstate__()
        state.update(recorder=NullRecorder(), _resume=None, _sigterm=None)
        state.update(_beside=None, _saving_group=None)
        return state

    @classmethod
    @override
    def register_strategies(cls, strategy_registry: Mapping[str, Any]) -> None:
        """Nothing: ``boltmesh.strategies.registry`` registers all names."""
