"""``MeshStrategy``: set-up, checkpoints and end of a run on the axes of a mesh.

It implements Lightning's strategy interface. The class of an axis implements how the model is put
on that axis and how a step runs there. The LightningModule is not modified.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.fabric.utilities.types import _PATH
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.plugins import Precision
from torch.nn import Parameter
from torch.optim import Optimizer
from typing_extensions import override

from boltmesh.errors import ConfigError
from boltmesh.strategies import lightning_compat as compat
from boltmesh.strategies import telemetry as telemetry_module
from boltmesh.strategies.activation_checkpointing import ActivationCheckpointing, RecomputeShare
from boltmesh.strategies.checkpoint.adapters import TRAINABLE_ONLY
from boltmesh.strategies.checkpoint.async_save import refuse_beside
from boltmesh.strategies.checkpoint.directory import mend_folders, refuse_unshared_folders
from boltmesh.strategies.checkpoint.file import AtomicCheckpointIO
from boltmesh.strategies.checkpoint.optimizer_state import is_named
from boltmesh.strategies.checkpoint.shard_reader import Placeholder
from boltmesh.strategies.compiled_blocks import CompiledBlocks
from boltmesh.strategies.deferred_initialization.deferred import deferred_init
from boltmesh.strategies.deferred_initialization.materialize import materialize
from boltmesh.strategies.dry_run.unsupported import refuse_callbacks, refuse_lone_work, refuse_run
from boltmesh.strategies.engine.axis import Axis
from boltmesh.strategies.engine.checkpointing import AFTER_SAVING, Checkpointing
from boltmesh.strategies.engine.groups import StartMethod, in_order
from boltmesh.strategies.engine.loops import LoopStrategy
from boltmesh.strategies.engine.memory_checkpoints import MemoryCheckpoints
from boltmesh.strategies.engine.replica_check import ReplicaCheck
from boltmesh.strategies.engine.resume import ResumeManager
from boltmesh.strategies.engine.weight_averaging import average_shards, gather_for_averages
from boltmesh.strategies.float8 import Float8Products, Recipe
from boltmesh.strategies.lightning_compat.loops import agree_in_loops, without_shown_loader
from boltmesh.strategies.lightning_compat.trainer import (
    callbacks_of,
    in_precision,
    is_wrapping,
    prepare_for_parts,
    reads_gradients,
    trainer_of,
)
from boltmesh.strategies.parameter_access import WholeShapes
from boltmesh.strategies.random_state import seed_random_state, share_random_state
from boltmesh.strategies.tiling.logits import LogitTiling
from boltmesh.telemetry.snapshot import AlertThresholds, MemoryKind
from boltmesh.telemetry.traffic import ExpectedTraffic, added_up


class MeshStrategy(LoopStrategy):
    """Runs a LightningModule on a mesh of ranks, through the axes of the mesh.

    Args:
        axes: Axes of the mesh, in any order. One is a data axis, which takes the ranks that the
            sizes of the others leave.
        timeout_s: How long a collective may take before the run ends with an error, seconds.
        telemetry: Write the records that ``boltmesh top`` shows.
        activation_checkpointing, activation_offload: As for ``ActivationCheckpointing``.
        compile_blocks: Compile each repeated block by ``torch.compile``, for training.
        float8: Scaling of the matrix products of repeated blocks, see ``Float8Products``.
        tile_logits: Positions whose logits exist at the same time, see ``LogitTiling``.
        seed: Give every data rank a random stream of its own, derived from this number, once the
            model is built: dropout then differs between ranks and repeats between runs. With None
            the streams stay as ``seed_everything`` left them, the same on every rank.
        async_save: Write checkpoints beside training: a save copies what this rank holds into host
            memory and returns. The next save and the end of the run wait for it and raise its
            error; the checkpoint that it replaces is deleted once it is complete.
        process_group_backend: ``gloo`` or ``nccl``; by default the one that fits the device.
        start_method: ``popen`` runs the script again for each rank; ``spawn``, ``fork`` and
            ``forkserver`` start functions, for notebooks and tests.
        save_trainable_only: Leave out of checkpoints the frozen parameters that have not changed
            since training began. A run resumes from such a checkpoint in a module with the same
            frozen parameters; in another module it ends with an error.
        verify_replicas_every: Optimizer steps between two runs of ``ReplicaCheck``; None for none.
        checkpoint_in_memory_every: Most optimizer steps that a failure of ``boltmesh fit`` loses,
            see ``MemoryCheckpoints``; None for no copies in memory.
        accelerator: As in any Lightning strategy, like the arguments below.
    """

    strategy_name = "bolt_mesh"

    def __init__(
        self,
        *,
        axes: Sequence[Axis],
        timeout_s: float = 1800.0,
        telemetry: bool = True,
        activation_checkpointing: RecomputeShare | None = None,
        activation_offload: bool | str | Path = False,
        compile_blocks: bool = False,
        float8: Recipe | None = None,
        tile_logits: int | None = None,
        seed: int | None = None,
        async_save: bool = False,
        save_trainable_only: bool = False,
        verify_replicas_every: int | None = None,
        checkpoint_in_memory_every: int | None = None,
        process_group_backend: str | None = None,
        start_method: StartMethod = "popen",
        accelerator: Accelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
    ) -> None:
        super().__init__(
            axes=axes,
            timeout_s=timeout_s,
            process_group_backend=process_group_backend,
            start_method=start_method,
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            precision_plugin=precision_plugin,
        )
        self._forward_redirection = compat.DDPForwardRedirection()
        if checkpoint_io is not None:
            self.checkpoint_io = checkpoint_io  # which ranks with shards refuse
        self.telemetry = telemetry
        self.recomputation = ActivationCheckpointing(activation_checkpointing, activation_offload)
        self.compilation = CompiledBlocks(self.recomputation.kind, is_on=compile_blocks)
        self.float8 = Float8Products(float8)
        self.logit_tiling = LogitTiling(tile_logits)
        self.seed = seed
        self.async_save = async_save
        self.save_trainable_only = save_trainable_only
        if verify_replicas_every is not None:
            self.replica_check = ReplicaCheck(self, verify_replicas_every)
        if checkpoint_in_memory_every is not None:
            self.memory_checkpoints = MemoryCheckpoints(self, checkpoint_in_memory_every)
        self.checkpoints = Checkpointing(self)
        self.recipe: str | None = None
        self.settings: Mapping[str, object] = {}
        self.alerts: AlertThresholds | None = None
        """Set by ``boltmesh fit``: name of the config, its values by dotted keys, its limits."""
        self.is_placed = False
        """Whether each rank has its part of a model."""
        for axis in self.axes:
            axis.attach(self)

    def add_axis(self, axis: Axis) -> None:
        """Add an axis, or replace the axis of the same name."""
        self.axes = in_order([axis, *(each for each in self.axes if each.name != axis.name)])
        axis.attach(self)

    @property
    def public_name(self) -> str:
        """Class name of the strategy, shown in errors and in the dashboard."""
        return type(self).__name__

    @property
    def defers_building(self) -> bool:
        """Whether the model of ``configure_model`` may be larger than this rank's memory.

        Parameters are then initialised when the model is divided: each rank computes its part of
        the values that the user's initialisation gives.
        """
        return any(axis.defers_building for axis in self.axes)

    # Set-up.

    @override
    def setup_environment(self) -> None:
        super().setup_environment()
        self.resume = ResumeManager(self)
        trainer = trainer_of(self.lightning_module)
        telemetry_module.follow_loops(trainer)
        if self.stores_shards and trainer is not None:
            average_shards(trainer)
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
    def setup(self, trainer: Trainer) -> None:
        assert self.accelerator is not None
        assert self.model is not None
        if self.shares_batches:
            self.gather_metrics()
        if self.stores_shards:
            refuse_callbacks(callbacks_of(trainer), self.public_name)
            gather_for_averages(trainer.lightning_module)
            if self.world_size > 1:
                refuse_lone_work(trainer)
        self.follow_generation()
        without_shown_loader(self._place, trainer)
        is_sharded = self.data_axis.is_sharded
        self.accelerator.setup(trainer)
        if self.is_fitting:
            self._prepare_fit(trainer)
        self.model = in_precision(self.precision_plugin, self.model)
        if not is_sharded:
            self.model_to_device()
        if self.is_fitting or is_sharded:
            self._wrap(trainer)
        else:
            self.data_axis.share_weights(self.model)
        if self.is_fitting:
            self._adopt_optimizers(trainer)
        elif is_sharded:
            self.data_axis.adopt([], reads_gradients=False)
        self.setup_precision_plugin()
        if self.stores_shards:
            prepare_for_parts(trainer, self.run_generation, is_sharded=is_sharded)
        if self.is_fitting:
            agree_in_loops(trainer, self, getattr(self.resume, "monitored", None))
            telemetry_module.record_expectations(self)
            if self.seed is not None:
                seed_random_state(self.seed + self.coordinates["data"], self.root_device)
        for axis in reversed(self.axes):
            axis.start(trainer)

    def _place(self, trainer: Trainer) -> None:
        """Put the model on the axes, before it is moved or wrapped. Collective."""
        module = self.lightning_module
        assert module is not None
        for axis in self.axes:
            axis.refuse(trainer, module)
        if self.is_fitting:
            self.float8.refuse(self.root_device, self.axes)
        if self.shares_batches:
            self._share_randomness(trainer, module)
            if self.gradient_group.size() == 1:
                self.add_axis(self.data_axis.for_one_rank())
        for axis in self.axes:
            axis.look_at_whole(trainer)
        for axis in reversed(self.axes):  # stages are made of divided layers
            axis.place(trainer)
        self.is_placed = True

    def _share_randomness(self, trainer: Trainer, module: LightningModule) -> None:
        """Let ranks that share batches draw the same random numbers. Collective over all ranks.

        Raises:
            ConfigError: In the run one rank does work that the others do not.
        """
        reasons = next((axis.reasons for axis in self.axes if axis.reasons is not None), None)
        if reasons is not None:
            refuse_run(
                trainer,
                module,
                self.step_name,
                synchronises_norms=self._layer_sync is not None,
                because=reasons,
            )
        for axis in self.axes:
            if axis.shares_batches:
                share_random_state(axis.sharing_group, self.root_device)

    def _prepare_fit(self, trainer: Trainer) -> None:
        """Prepare for saving, and change the model's modules for training."""
        mend_folders(trainer)
        if self.stores_shards:
            refuse_unshared_folders(trainer)
        if self.async_save:
            keeps_state_on_disk = self.data_axis.keeps_state_on_disk
            refuse_beside(trainer, self.checkpoint_io, keeps_state_on_disk=keeps_state_on_disk)
            self.checkpoints.open()
        assert self.model is not None
        self.float8.put_on(self.model, self.root_device)
        self.compilation.put_on(self.model, self.root_device)
        self.recomputation.put_on(self.model, rank=self.global_rank, recorder=self.recorder)
        self.logit_tiling.put_on(self.model, is_divided=self.divides_layers)
        if self._layer_sync is not None:
            self.model = self._layer_sync.apply(self.model)

    def _wrap(self, trainer: Trainer) -> None:
        """Make replicas or shards of the model; this may replace parameters by other objects."""
        assert self.model is not None
        for axis in self.axes:
            axis.before_wrap()
        self.model = self.data_axis.wrap(self.model, self.data_axis.context(trainer))
        for axis in self.axes:
            axis.after_wrap()

    def _adopt_optimizers(self, trainer: Trainer) -> None:
        """Make the user's optimizers and give them to the data axis, which steps its part."""
        self.setup_optimizers(trainer)
        assert self.lightning_module is not None
        may_be_read = reads_gradients(trainer, self.lightning_module)
        self.data_axis.adopt(self.optimizers, reads_gradients=may_be_read)
        if not self.data_axis.is_sharded:
            compat.optimizers_to_device(self.optimizers, self.root_device)

    @override
    def setup_optimizers(self, trainer: Trainer) -> None:
        with WholeShapes(self.lightning_module, self.checkpoints.division):
            super().setup_optimizers(trainer)
        for axis in reversed(self.axes):
            axis.check_optimizers(self.optimizers)

    @override
    def model_to_device(self) -> None:
        assert self.model is not None
        for axis in self.axes:
            axis.before_transfer(self.root_device)
        materialize(self.model, self.root_device)
        self.model.to(self.root_device)

    # Parameters and buffers of this rank; forecasts.

    @property
    def stores_shards(self) -> bool:
        """Whether ranks hold parts of the model, and checkpoints are directories of shards."""
        return any(axis.stores_shards for axis in self.axes)

    @property
    def divides_modules(self) -> bool:
        """Whether each parameter is whole, and on some of the ranks only."""
        return any(axis.divides_modules for axis in self.axes)

    def held_parameters(self) -> Collection[Parameter]:
        """Return the module's parameters that this rank has values of, as shards or whole."""
        for axis in self.axes:
            held = axis.held_parameters()
            if held is not None:
                return held
        return [] if self.lightning_module is None else list(self.lightning_module.parameters())

    def holds(self, name: str) -> bool:
        """Whether this rank has a part of a parameter or buffer of the module."""
        return all(axis.holds(name) for axis in self.axes)

    def holds_buffer(self, name: str) -> bool:
        """Whether this rank has the model's value of a buffer; others may have a stale one."""
        return all(axis.holds_buffer(name) for axis in self.axes)

    def expected_traffic(self) -> list[ExpectedTraffic]:
        """Return the traffic expected of one optimizer step on this rank.

        Empty where telemetry does not show it: ``shows_expectations``.
        """
        if self.model is None or not telemetry_module.shows_expectations(self):
            return []
        return added_up(each for axis in self.axes for each in axis.expected_traffic(self.model))

    def expected_memory(self) -> list[MemoryKind]:
        """Return the memory expected on this rank, by kind and place."""
        if self.model is None:
            return []
        kinds = self.data_axis.expected_memory(self.model, self.optimizers)
        for axis in reversed(self.axes):
            kinds = axis.adjust_memory(kinds)
        return kinds

    # Checkpoints: files as Lightning writes them where each rank has the whole model.

    @property  # type: ignore[explicit-override]
    @override
    def checkpoint_io(self) -> CheckpointIO:
        if self._checkpoint_io is None:
            self._checkpoint_io = AtomicCheckpointIO()
        elif is_wrapping(self._checkpoint_io):
            self._checkpoint_io.checkpoint_io = AtomicCheckpointIO()  # type: ignore[attr-defined]
        return self._checkpoint_io

    @checkpoint_io.setter
    @override
    def checkpoint_io(self, io: CheckpointIO) -> None:
        if self.stores_shards:
            instead = " and give the strategy async_save=True" if is_wrapping(io) else ""
            raise ConfigError(
                f"{self.public_name} writes its checkpoints by shards and would never call "
                f"{type(io).__name__}. Take the plugin out of Trainer(plugins=...){instead}."
            )
        self._checkpoint_io = io

    @property
    @override
    def restore_checkpoint_after_setup(self) -> bool:
        return self.stores_shards

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        if not self.stores_shards:
            return super().lightning_module_state_dict()
        return self.checkpoints.model_state()

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        if not self.stores_shards:
            return super().optimizer_state(optimizer)
        return self.checkpoints.optimizer_state(optimizer)

    @override
    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: _PATH, storage_options: Any | None = None
    ) -> None:
        write_file = super().save_checkpoint
        self.checkpoints.save(checkpoint, filepath, storage_options, write_file=write_file)

    @override
    def remove_checkpoint(self, filepath: _PATH) -> None:
        self.checkpoints.remove(filepath)

    def finish_saving(self) -> None:
        """Wait for the checkpoint that is written beside training, see ``Checkpointing.finish``."""
        self.checkpoints.finish()

    @override
    def on_train_start(self) -> None:
        super().on_train_start()
        self.checkpoints.begin_training()

    @override
    def on_train_end(self) -> None:
        super().on_train_end()
        self.finish_saving()

    @override
    def barrier(self, name: str | None = None) -> None:
        # The Trainer calls it after each save, and a failing rank may save in a callback, alone.
        if not (name == AFTER_SAVING and self.checkpoints.is_alone):
            super().barrier(name)

    @override
    def load_checkpoint(
        self, checkpoint_path: _PATH, weights_only: bool | None = None, **kwargs: Any
    ) -> dict[str, Any]:
        plugin = super().load_checkpoint
        return self.checkpoints.load(
            checkpoint_path, weights_only, read_file=lambda path: plugin(path, True, **kwargs)
        )

    @override
    def load_model_state_dict(
        self, checkpoint: Mapping[str, Any], strict: bool = True, **kwargs: Any
    ) -> None:
        is_in_shards = any(isinstance(v, Placeholder) for v in checkpoint["state_dict"].values())
        if self.stores_shards or is_in_shards or TRAINABLE_ONLY in checkpoint:
            self.checkpoints.load_model_state(checkpoint, strict=strict)
        else:
            super().load_model_state_dict(checkpoint, strict, **kwargs)

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        states = checkpoint["optimizer_states"]
        if self.stores_shards or any(map(is_named, states)):
            self.checkpoints.load_optimizer_states(states)
        else:
            super().load_optimizer_state_dict(checkpoint)

    @override
    def on_exception(self, exception: BaseException) -> None:
        self.explain(exception)
        self.recorder.fail(exception)
        for axis in self.axes:
            axis.report(exception)

    def explain(self, exception: BaseException) -> None:
        """Add this rank's knowledge of the cause to an error that ends the run.

        A rank that lost a peer may know why. Callbacks that forward an error call this, because
        Lightning calls them before the strategy.
        """
        self.data_axis.explain(exception)
        self.recorder.explain(exception)
        for axis in self.model_axes:
            axis.explain(exception)

    @override
    def teardown(self) -> None:
        for axis in self.axes:
            axis.close()
        if self.shares_batches:
            self.forget_metrics()
        self.checkpoints.close()
        if self.sigterm is not None:
            self.sigterm.end()
            self.sigterm = None
        for feature in (self.recomputation, self.compilation, self.float8, self.logit_tiling):
            feature.take_off()
        self.model = self.lightning_module
        is_whole = not self.data_axis.is_sharded  # shards know the modules that hold them
        if self.model is not None and self.is_fitting and self._layer_sync is not None and is_whole:
            self.model = self._layer_sync.revert(self.model)
        self.forget_generation()
        try:
            for axis in self.axes:
                axis.release()
        finally:
            self._tear_down_rest()

    def _tear_down_rest(self) -> None:
        self.end_run()
        if not self.stores_shards:
            super().teardown()
            return
        # Parts of the model stay on the device where their axis put them.
        assert self.cluster_environment is not None
        assert self.accelerator is not None
        self.cluster_environment.teardown()
        self.precision_plugin.teardown()
        self.accelerator.teardown()

    @override
    def __getstate__(self) -> dict[str, Any]:
        # Spawned ranks make their own hooks.
        return {**super().__getstate__(), "resume": None, "sigterm": None}
