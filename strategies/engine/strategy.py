"""The one engine under every strategy: mesh, process groups, launch, loops, checkpoints.

``MeshStrategy`` does what Lightning asks of any strategy; how the model is put on an axis is the
business of that axis's part (``data/``), and the doors (``ddp.py``, ...) choose the parts. The
LightningModule stays as its author wrote it.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.pytorch import Trainer
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.plugins import Precision
from typing_extensions import override

from boltmesh.strategies import lightning_compat as compat
from boltmesh.strategies import telemetry as telemetry_module
from boltmesh.strategies.activation_checkpointing import ActivationCheckpointing, Recompute
from boltmesh.strategies.checkpoint.async_save import refuse_beside
from boltmesh.strategies.checkpoint.shared_fs_check import mend_folders, refuse_unshared_folders
from boltmesh.strategies.data_parallel.axis import AxisContext, DataAxis
from boltmesh.strategies.data_parallel.unsupported import refuse_callbacks, refuse_lone_saves
from boltmesh.strategies.deferred_initialization.deferred import deferred_init
from boltmesh.strategies.deferred_initialization.materialize import materialize
from boltmesh.strategies.engine.groups import StartMethod
from boltmesh.strategies.engine.loops import LoopStrategy
from boltmesh.strategies.engine.resume import ResumeManager
from boltmesh.strategies.lightning_compat import trainer as lightning_trainer
from boltmesh.strategies.lightning_compat.trainer import (
    autocast_dtype,
    callbacks_of,
    forbid_inference_mode,
    has_norm_clipping,
    zeroes_gradients,
)
from boltmesh.strategies.random_state import seed_random_state
from boltmesh.telemetry.snapshot import AlertThresholds, MemoryKind
from boltmesh.telemetry.traffic import ExpectedTraffic
from boltmesh.telemetry.writer.null_recorder import NullRecorder

if TYPE_CHECKING:
    from boltmesh.strategies.lightning_compat.launchers import SigtermAgreement
    from boltmesh.telemetry.writer.recorder import Recorder


class MeshStrategy(LoopStrategy):
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
    defers_building = False
    """Whether what ``configure_model`` makes may be larger than this rank's memory. It is then made
    when the model is divided: each rank gets its part of what the author's initialisation gives.
    """

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
        self.recomputation = ActivationCheckpointing(activation_checkpointing)
        self.seed = seed
        self.async_save = async_save
        self.recorder: Recorder | NullRecorder = NullRecorder()
        self.recipe: str | None = None
        """Which config the run was made from; set by ``boltmesh fit``, told to who watches."""
        self.alerts: AlertThresholds | None = None
        """When who watches is to be alarmed; set like ``recipe``."""
        self._resume: ResumeManager | None = None
        self._sigterm: SigtermAgreement | None = None

    # Starting.

    @override
    def setup_environment(self) -> None:
        super().setup_environment()
        self._resume = ResumeManager(self)
        if self.telemetry:
            self.recorder = telemetry_module.open_recorder_of(self)

    @override
    @contextmanager
    def tensor_init_context(self, empty_init: bool | None = None) -> Iterator[None]:
        if not self.defers_building:
            with super().tensor_init_context(empty_init):
                yield
            return
        with deferred_init(), self.precision_plugin.tensor_init_context():
            yield

    @override
    def near_groups(self) -> dict[str, list[list[int]]]:
        groups = super().near_groups()
        cut = partial(self.data_axis.shard_groups, ranks_per_node=self.num_processes)
        shards = [each for ranks in self.layout.groups("data") for each in cut(ranks)]
        return groups if not shards else {**groups, "shard": shards}

    @override
    def setup(self, trainer: Trainer) -> None:
        assert self.accelerator is not None
        assert self.model is not None
        is_sharded = self.data_axis.is_sharded
        if self.stores_shards:
            self._refuse_callbacks(trainer)
        self.place(trainer)
        self.is_placed = True
        self.accelerator.setup(trainer)
        if self._is_fitting:
            self._prepare_fit(trainer)
        self.model = self.precision_plugin.convert_module(self.model)
        if not is_sharded:
            self.model_to_device()
        if self._is_fitting or is_sharded:
            self.put_on_data_axis(trainer)
        else:
            self._share_weights()
        if self._is_fitting:
            self._adopt_optimizers(trainer)
        elif is_sharded:
            self.data_axis.adopt([], reads_gradients=False)
        self.setup_precision_plugin()
        if is_sharded:
            forbid_inference_mode(trainer)
        if self._is_fitting:
            self._tell_expectations()
            if self.seed is not None:
                seed_random_state(self.seed + self.coordinates["data"])

    def _refuse_callbacks(self, trainer: Trainer) -> None:
        callbacks = callbacks_of(trainer)
        refuse_callbacks(callbacks, self.public_name)
        if self.world_size > 1:
            refuse_lone_saves(callbacks)

    def _prepare_fit(self, trainer: Trainer) -> None:
        """Get ready to save, and do to the model's modules what training alone needs."""
        mend_folders(trainer)
        if self.stores_shards:
            refuse_unshared_folders(trainer)
        if self.async_save:
            keeps_state_on_disk = self.data_axis.keeps_state_on_disk
            refuse_beside(trainer, self.checkpoint_io, keeps_state_on_disk=keeps_state_on_disk)
            self.open_saving(self.timeout)
        assert self.model is not None
        self.recomputation.put_on(self.model)
        if self._layer_sync is not None:
            self.model = self._layer_sync.apply(self.model)

    def _adopt_optimizers(self, trainer: Trainer) -> None:
        """Make the user's optimizers, and let the data axis step its part of what they step."""
        self.setup_optimizers(trainer)
        assert self.lightning_module is not None
        reads_gradients = lightning_trainer.reads_gradients(trainer, self.lightning_module)
        self.data_axis.adopt(self.optimizers, reads_gradients=reads_gradients)
        if not self.data_axis.is_sharded:
            compat.optimizers_to_device(self.optimizers, self.root_device)

    def _tell_expectations(self) -> None:
        """Tell the recorder what a step should move and take, and how to see what it does."""
        self.recorder.expect(self.expected_traffic())
        self.recorder.expect_memory(self.expected_memory())
        self.recorder.watch_memory(partial(telemetry_module.tensors_by_kind, self))

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
            compute_dtype=autocast_dtype(self.precision_plugin),
            ranks_per_node=self.num_processes,
            num_microbatches=trainer.accumulate_grad_batches,
            has_norm_clipping=has_norm_clipping(trainer),
            reads_gradients=lightning_trainer.reads_gradients(trainer, self.lightning_module),
            timeout=self.timeout,
            norm_shares=self.norm_shares(),
            scaler=getattr(self.precision_plugin, "scaler", None),
            zeroes_gradients=partial(zeroes_gradients, trainer),
            recorder=self.recorder,
            recomputed=self.recomputation.blocks,
            holds_buffer=self.holds_buffer,
        )

    @override
    def model_to_device(self) -> None:
        assert self.model is not None
        materialize(self.model, self.root_device)
        self.model.to(self.root_device)

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
        self.model = self.lightning_module
        if (
            self.model is not None
            and self._is_fitting
            and self._layer_sync is not None
            and not self.data_axis.is_sharded  # whose shards know the modules that hold them
        ):
            self.model = self._layer_sync.revert(self.model)
        try:
            self.data_axis.release()
        finally:
            self._tear_down_rest()

    def _tear_down_rest(self) -> None:
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
