"""The tensor axis in the engine: where its part is asked, and what changes for the others."""

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from torch.distributed import ProcessGroup
from torch.nn import Module
from typing_extensions import override

from boltmesh.strategies.checkpoint.chunks import DimDivision
from boltmesh.strategies.data_parallel.axis import SingleRankAxis
from boltmesh.strategies.data_parallel.expected_memory import expected_held_memory
from boltmesh.strategies.dry_run.batch_check import BatchDigest
from boltmesh.strategies.dry_run.broadcast import broadcast_from_rank0
from boltmesh.strategies.dry_run.sample import sample_batch
from boltmesh.strategies.engine.shared_batch import SharedBatchStrategy
from boltmesh.strategies.grad_norm import NormShare
from boltmesh.strategies.lightning_compat.loops import step_arguments
from boltmesh.strategies.lightning_compat.trainer import has_norm_clipping
from boltmesh.strategies.optimizer_probe import refuse_optimizers
from boltmesh.strategies.tensor.axis import TensorAxis
from boltmesh.strategies.tensor.expected_traffic import FakeRun
from boltmesh.strategies.tensor.options import (
    LAYERS,
    TensorOptions,
    refuse_late_proof,
    refuse_parameters,
)
from boltmesh.strategies.tensor.placement import TensorContext
from boltmesh.strategies.tensor.plan import TensorPlan
from boltmesh.strategies.tensor.plan_report import plan_table
from boltmesh.telemetry.snapshot import MemoryKind
from boltmesh.telemetry.traffic import ExpectedTraffic


class TensorMeshStrategy(SharedBatchStrategy):
    """The engine with ranks that share each layer; what a door with a tensor axis stands on.

    Args:
        tensor_options: What the user asked of the axis.
        **kwargs: As for ``MeshStrategy``.
    """

    reasons = LAYERS

    def __init__(self, *, tensor_options: TensorOptions, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.tensor_axis = TensorAxis(tensor_options)
        self._control: ProcessGroup | None = None
        """The ranks of the tensor group on the CPU."""
        self._judges: ProcessGroup | None = None
        """All ranks of the job on the CPU."""

    # Starting.

    @override
    def _asks_group(self, axis: str) -> bool:
        return axis == "tensor" or super()._asks_group(axis)

    @override
    def _build_groups(self) -> dict[str, ProcessGroup]:
        groups = super()._build_groups()
        self._control = self.new_group("tensor", backend="gloo")
        self._judges = dist.new_group(backend="gloo", timeout=self.timeout)
        return groups

    @override
    def sharing_groups(self) -> list[ProcessGroup]:
        assert self._control is not None
        return [*super().sharing_groups(), self._control]

    @override
    def place(self, trainer: Trainer) -> None:
        super().place(trainer)
        module = self.lightning_module
        assert module is not None
        if self.layout.data == 1 and not self.data_axis.serves_one_rank:
            self.data_axis = SingleRankAxis()
        context = self._tensor_context()
        self.tensor_axis.begin(context)
        self.recorder.name_group(context.control, "tensor")
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
            batch = broadcast_from_rank0(sample_batch(trainer).batch, self._judges)
            self._sample = batch, step_arguments(module, step)
        if is_new:
            refuse_late_proof(module, is_divided=axis.holds(module))
            refuse_parameters(module)
            self.refuse_remains(module)
            self._tell(axis.place(module, step, *self._sample))
        if self.plan is not None:
            self.recorder.tensor_plan(plan_table(self.plan))

    @override
    def setup(self, trainer: Trainer) -> None:
        super().setup(trainer)
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

    def _tensor_context(self) -> TensorContext:
        assert self._control is not None
        assert self._judges is not None
        return TensorContext(
            group=self.groups["tensor"],
            control=self._control,
            judges=self._judges,
            new_group=partial(self.new_group, "tensor"),
            device=self.root_device,
            timeout=self.timeout,
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
        module = self.lightning_module
        assert module is not None
        if not self._divides or not module.automatic_optimization:
            return super().expected_traffic()
        return super().expected_traffic() + self.tensor_axis.expected_traffic(
            accumulated=self._trainer.accumulate_grad_batches,
            num_norms=int(has_norm_clipping(self._trainer)),
        )

    @override
    def expected_memory(self) -> list[MemoryKind]:
        assert self.lightning_module is not None
        if self.data_axis.is_sharded:
            return super().expected_memory()
        return expected_held_memory(self.lightning_module, self.optimizers)

    # Steps.

    @override
    def announce_batch(self, batch: Any, digest: BatchDigest) -> None:
        super().announce_batch(batch, digest)
        self.tensor_axis.batches.start(batch, digest)

    @override
    def check_batch(self, batch: Any) -> None:
        self.tensor_axis.batches.wait(batch)

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        # Under manual optimisation a step may clip by what torch has.
        with self._true_norms():
            return super().training_step(*args, **kwargs)

    @override
    def norm_shares(self) -> list[NormShare]:
        if not self._divides:
            return super().norm_shares()
        return [self.tensor_axis.norm_share, *super().norm_shares()]

    # Checkpoints.

    @override
    def division(self, name: str) -> DimDivision | None:
        return self.tensor_axis.division(name)

    @override
    @contextmanager
    def opened(self) -> Iterator[None]:
        with super().opened(), self.tensor_axis.opened():
            yield

    @override
    def whole_state(self, state_dict: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        axis = self.tensor_axis
        return {
            name: axis.joined(name, each)
            if self.holds(name) and axis.division(name) is not None
            else each
            for name, each in super().whole_state(state_dict).items()
        }

    # Ending.

    @override
    def teardown(self) -> None:
        self.tensor_axis.end()
        super().teardown()

    @override
    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_control": None, "_judges": None}
