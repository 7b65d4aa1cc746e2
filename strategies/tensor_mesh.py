"""The tensor axis in the engine: where its part is asked, and what changes for the others."""

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from torch.distributed import ProcessGroup
from torch.nn import Module
from typing_extensions import override

from boltmesh.strategies import lightning_compat as compat
from boltmesh.strategies.building.deferred import deferred_init
from boltmesh.strategies.checkpoint.parts import Division
from boltmesh.strategies.data.lone import LoneRank
from boltmesh.strategies.data.refusals import refuse_callbacks, refuse_lone_saves
from boltmesh.strategies.data.replica_memory import expected_held_memory
from boltmesh.strategies.engine import MeshStrategy
from boltmesh.strategies.joint_norms import NormShare
from boltmesh.strategies.steps.alike import of_first_rank, share_random_state
from boltmesh.strategies.steps.local_metrics import gather_over, let_gather
from boltmesh.strategies.steps.sample import sample_batch
from boltmesh.strategies.tensor.axis import TensorAxis, TensorContext, TensorOptions
from boltmesh.strategies.tensor.plan import TensorPlan
from boltmesh.strategies.tensor.refusals import refuse_late_proof, refuse_parameters, refuse_run
from boltmesh.strategies.tensor.shard_steps import refuse_optimizers
from boltmesh.strategies.tensor.telling import told
from boltmesh.strategies.tensor.traffic import FakeRun
from boltmesh.strategies.torch_compat import total_norm_replaced
from boltmesh.telemetry.snapshot import MemoryKind
from boltmesh.telemetry.traffic import ExpectedTraffic


class TensorMeshStrategy(MeshStrategy):
    """The engine with ranks that share each layer; what a door with a tensor axis stands on.

    Args:
        tensor_options: What the user asked of the axis.
        **kwargs: As for ``MeshStrategy``.
    """

    def __init__(self, *, tensor_options: TensorOptions, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.tensor_axis = TensorAxis(tensor_options)
        self._control: dict[str, ProcessGroup] = {}
        """On the CPU: ``"tensor"`` and, for all ranks of the job, ``"all"``."""
        self._sample: tuple[Any, tuple[Any, ...]] = None, ()
        """A batch of the run that is set up, and what a step is called with behind it."""

    # Starting.

    @property
    @override
    def is_distributed(self) -> bool:  # type: ignore[override]
        """Whether the Trainer has to deal the data out: the ranks of a tensor group get the same.

        So loaders keep the sampler that their author gave them where there are no replicas.
        """
        return self.layout.data > 1

    @override
    def _reset_seed(self) -> None:
        # Ranks that run the script themselves stand where one process would; ``setup`` makes them
        # alike. Those that begin as empty processes have nothing but the seed.
        if self.layout.data > 1 or self._start_method in {"spawn", "forkserver"}:
            super()._reset_seed()

    @override
    def _build_groups(self) -> dict[str, ProcessGroup]:
        groups = super()._build_groups()
        if "tensor" not in groups:  # of one rank, which has everything
            groups["tensor"] = self._new_group(timedelta(seconds=self.timeout_s))
        timeout = timedelta(seconds=self.timeout_s)
        self._control = {
            "tensor": self._new_group(timeout, backend="gloo"),
            "all": dist.new_group(backend="gloo", timeout=timeout),
        }
        return groups

    def _new_group(self, timeout: timedelta, *, backend: str | None = None) -> ProcessGroup:
        """Return one more group of this rank's tensor group. Collective over all ranks."""
        group: ProcessGroup | None
        group, _ = dist.new_subgroups_by_enumeration(  # type: ignore[no-untyped-call]
            self.layout.groups("tensor"), timeout=timeout, backend=backend, group_desc="tensor"
        )
        assert group is not None
        return group

    @override
    def place(self, trainer: Trainer) -> None:
        super().place(trainer)
        module = self.lightning_module
        assert module is not None
        refuse_callbacks(compat.callbacks_of(trainer), self.public_name)
        if self.world_size > 1:
            refuse_lone_saves(compat.callbacks_of(trainer))
        step = self._step_name
        refuse_run(trainer, module, step, synchronises_norms=self._layer_sync is not None)
        if self.layout.data == 1 and not self.data_axis.serves_one_rank:
            self.data_axis = LoneRank()
        share_random_state(self._control["tensor"], self.root_device)
        self.tensor_axis.begin(self._tensor_context())
        self.recorder.name_group(self._control["tensor"], "tensor")
        if self._divides:
            self._place(trainer, module)

    @property
    def _divides(self) -> bool:
        """Whether ranks share layers at all; a door may leave all ranks to other axes."""
        return self.layout.tensor > 1

    def _place(self, trainer: Trainer, module: LightningModule) -> None:
        """Divide the model, unless an earlier run has."""
        axis, step = self.tensor_axis, self._step_name
        is_new = not axis.is_placed(module, step)
        if is_new or self._is_fitting:
            batch = of_first_rank(sample_batch(trainer).batch, self._control["all"])
            self._sample = batch, compat.step_arguments(module, step)
        if is_new:
            refuse_late_proof(module, is_divided=axis.holds(module))
            refuse_parameters(module)
            self.refuse_remains(module)
            self._tell(axis.place(module, step, *self._sample))
        if self.plan is not None:
            self.recorder.tensor_plan(told(self.plan))

    @override
    def setup(self, trainer: Trainer) -> None:
        gather_over(self._metric_owners(), self.groups["data"])
        super().setup(trainer)
        self._sample = None, ()
        if self._is_fitting:
            self.tensor_axis.follow_scaler()

    @override
    def put_on_data_axis(self, trainer: Trainer) -> None:
        if self._divides and self._is_fitting:
            self._count_step()
        super().put_on_data_axis(trainer)
        self.tensor_axis.follow_parameters()

    def _count_step(self) -> None:
        """Find out what a step moves while parameters are plain tensors, before they are shards."""
        assert self.lightning_module is not None
        if self.lightning_module.automatic_optimization:
            run, device = self.rehearsed_batch()
            self.tensor_axis.count(run, self.precision_plugin.train_step_context, device)

    def rehearsed_batch(self) -> tuple[FakeRun, torch.device]:
        """Return what this rank runs of a batch of training, and where the batch is."""
        return self.tensor_axis.rehearsed(*self._sample), torch.device("cpu")

    def _tell(self, notes: Sequence[str]) -> None:
        """Warn once of what of the plan did not verify."""
        if self.is_global_zero:
            for each in notes:
                warnings.warn(f"Tensor plan: {each}.", stacklevel=2)

    @override
    @contextmanager
    def tensor_init_context(self, empty_init: bool | None = None) -> Iterator[None]:
        # What ``configure_model`` makes may be larger than this rank's memory. Of every parameter
        # it is given the part of what its author's initialisation gives.
        with deferred_init(), self.precision_plugin.tensor_init_context():
            yield

    def _tensor_context(self) -> TensorContext:
        return TensorContext(
            group=self.groups["tensor"],
            control=self._control["tensor"],
            judges=self._control["all"],
            new_group=self._new_group,
            device=self.root_device,
            timeout=timedelta(seconds=self.timeout_s),
            scaler=getattr(self.precision_plugin, "scaler", None),
        )

    @property
    def plan(self) -> TensorPlan | None:
        """What is divided and how it is run; None before ``setup``."""
        placed = self.tensor_axis.placement
        return None if placed is None else placed.plan

    @override
    def setup_optimizers(self, trainer: Trainer) -> None:
        super().setup_optimizers(trainer)
        if self._divides:
            refuse_optimizers(self.optimizers)

    @override
    def cut_into_stages(self, units: Mapping[str, Module]) -> None:
        if self._divides:
            self.tensor_axis.cut_into_stages(units)

    @override
    def without_communication(self) -> AbstractContextManager[None]:
        return self.tensor_axis.silenced() if self._divides else nullcontext()

    @override
    def _share_weights(self) -> None:
        if not self._divides:  # or else they are alike since then
            super()._share_weights()

    @override
    def expected_traffic(self) -> list[ExpectedTraffic]:
        trainer = compat.trainer_of(self.lightning_module)
        module = self.lightning_module
        assert trainer is not None
        assert module is not None
        if not self._divides or not module.automatic_optimization:
            return super().expected_traffic()
        return super().expected_traffic() + self.tensor_axis.expected_traffic(
            accumulated=trainer.accumulate_grad_batches,
            num_norms=int(compat.has_norm_clipping(trainer)),
        )

    @override
    def expected_memory(self) -> list[MemoryKind]:
        assert self.lightning_module is not None
        if self.data_axis.is_sharded:
            return super().expected_memory()
        return expected_held_memory(self.lightning_module, self.optimizers)

    # The loops.

    @override
    def on_train_start(self) -> None:
        super().on_train_start()
        self._adopt_metrics()

    @override
    def _begin_evaluation(self) -> None:
        super()._begin_evaluation()
        self._adopt_metrics()

    def _adopt_metrics(self) -> None:
        """Metrics may have been made as late as in the user's hooks at the start of a loop."""
        gather_over(self._metric_owners(), self.groups["data"])

    def _metric_owners(self) -> list[object]:
        trainer = compat.trainer_of(self.lightning_module)
        callbacks = [] if trainer is None else compat.callbacks_of(trainer)
        return [self.lightning_module, *callbacks]

    @override
    def process_dataloader(self, dataloader: object) -> object:
        dataloader = super().process_dataloader(dataloader)
        # Lightning would seed them by the global rank: other crops and masks on every rank.
        compat.seed_workers(dataloader, self.coordinates["data"])
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
        self.tensor_axis.batches.ask(seen, ready, is_last=is_last)
        return ready

    @override
    def check_batch(self, batch: Any) -> None:
        self.tensor_axis.batches.settle(batch)

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        # Under manual optimisation a step may clip by what torch has.
        with self._true_norms():
            return super().training_step(*args, **kwargs)

    # Gradients.

    @override
    def optimizer_step(self, *args: Any, **kwargs: Any) -> Any:
        # A hook of the user's may clip by what torch has.
        with self._true_norms():
            return super().optimizer_step(*args, **kwargs)

    @override
    def norm_shares(self) -> list[NormShare]:
        if not self._divides:
            return super().norm_shares()
        return [self.tensor_axis.norm_share, *super().norm_shares()]

    def _true_norms(self) -> AbstractContextManager[None]:
        """Let torch clip by the norm of the whole model, where a rank has parts of it."""
        return total_norm_replaced(self.data_axis.norms.total) if self._divides else nullcontext()

    # Checkpoints.

    @property
    @override
    def stores_shards(self) -> bool:
        return True

    @override
    def division(self, name: str) -> Division | None:
        return self.tensor_axis.division(name)

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        with self.tensor_axis.opened():
            return super().lightning_module_state_dict()

    @override
    def whole_state(self, state_dict: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        axis = self.tensor_axis
        with axis.opened():
            state = super().whole_state(state_dict)
        return {
            name: axis.joined(name, each)
            if self.holds(name) and axis.division(name) is not None
            else each
            for name, each in state.items()
        }

    # Ending.

    @override
    def teardown(self) -> None:
        let_gather(self._metric_owners())
        self.tensor_axis.end()
        super().teardown()

    @override
    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_control": {}}
