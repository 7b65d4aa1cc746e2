"""``Axis``: the interface between the engine and one axis of the mesh, with its defaults.

An axis puts the model on its ranks and takes part in steps, checkpoints and forecasts.
``MeshStrategy`` holds the axes of a run in the order of ``AXES`` and calls them one after the
other. A new axis is a subclass of ``Axis`` and an entry in ``AXES``.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn import Module, Parameter
from torch.optim import Optimizer
from typing_extensions import override

from boltmesh.errors import ConfigError
from boltmesh.strategies.checkpoint.chunks import DimDivision
from boltmesh.strategies.checkpoint.optimizer_state import Take
from boltmesh.strategies.dry_run.batch_check import BatchDigest, SameBatchCheck
from boltmesh.strategies.dry_run.unsupported import Reasons
from boltmesh.strategies.grad_norm import NormShare
from boltmesh.strategies.mesh import MeshLayout
from boltmesh.strategies.owner_exchange import PartExchange
from boltmesh.strategies.torch_compat.tensors import FakeTensorMode
from boltmesh.telemetry.snapshot import MemoryKind
from boltmesh.telemetry.traffic import ExpectedTraffic

if TYPE_CHECKING:
    from boltmesh.strategies.engine.data_axis import OwnedRows
    from boltmesh.strategies.engine.strategy import MeshStrategy
    from boltmesh.strategies.lightning_compat.launchers import SigtermAgreement
    from boltmesh.strategies.pipeline.stage.cut import StageBoundaries

StepFunction = Callable[[Any, Any], Any]
"""Runs a step of the module through the inner axes and the engine, with ``args`` and ``kwargs``."""

FakeRun = Callable[[FakeTensorMode], object]
"""Runs a model whose parameters are fake tensors of that mode."""

FakeRuns = Sequence[tuple[FakeRun, int]]
"""Different runs, each with the number of times that a batch has it."""


class Axis:
    """One axis of the mesh. The defaults are those of an axis without any effect.

    All methods are called on every rank, in the same order. Collective ones are marked.
    """

    name: str
    """One of ``AXES``, unless the axis ``folds`` another one."""
    folds: str | None = None
    """The axis whose ranks this one divides a second time; None if it is one of ``AXES``."""
    wanted_size: int | None = None
    """Requested ranks along the axis; None lets ``MeshStrategy.choose_layout`` decide."""
    strategy: "MeshStrategy"
    """The strategy of the axis; set by ``attach``."""

    shares_batches = True
    """Whether the ranks of the axis get the same batches and draw the same random numbers."""
    averages_gradients = False
    """Whether gradients are averaged over the ranks of this axis, too: the data axis then
    averages, shards and replicates over both."""
    divides_modules = False
    """Whether each parameter is whole, and on some of the ranks only."""
    cuda_variables: Mapping[str, str] = MappingProxyType({})
    """Environment variables for CUDA on ranks of the axis; variables that are set stay."""
    can_compile = True
    """Whether blocks may be compiled: the compiler can trace their communication."""
    operand_divider: str | None = None
    """The argument that divides the operands of a layer's matrix product over ranks: its weight,
    or rows that belong together."""
    coupled: ProcessGroup | None = None
    """Ranks with other batches that compute layers together with this one; a group on the CPU."""
    parts_per_batch = 1
    """Number of parts in which a batch goes through the layers."""
    reasons: Reasons | None = None
    """Why ranks of the axis cannot do by themselves what one process does, for error messages."""

    @property
    def stores_shards(self) -> bool:
        """Whether ranks hold parts of the model, so that checkpoints are directories of shards."""
        return False

    @property
    def defers_building(self) -> bool:
        """Whether the model of ``configure_model`` may be larger than this rank's memory."""
        return False

    @property
    def size(self) -> int:
        """Ranks along the axis in this job."""
        return self.strategy.layout.size(self.name)

    @property
    def module(self) -> LightningModule:
        """The module of this run."""
        module = self.strategy.lightning_module
        assert module is not None
        return module

    # Set-up, in this order.

    def attach(self, strategy: "MeshStrategy") -> None:
        """Attach the axis to a strategy.

        Raises:
            ConfigError: An option contradicts one of the strategy or of an outer axis.
        """
        self.strategy = strategy
        if strategy.compilation.is_on and not self.can_compile:
            raise ConfigError(
                f"compile_blocks=True cannot trace what ranks of a {self.name} axis exchange "
                f"within layers. Leave compile_blocks or {self.name} out."
            )

    def check_layout(self, layout: MeshLayout) -> None:
        """Refuse sizes of the mesh that the axis cannot run on.

        Raises:
            ConfigError: With sizes or options that work.
        """

    def near_groups(self) -> dict[str, list[list[int]]]:
        """Return the groups of ranks that should have fast links between them, by kind."""
        layout = self.strategy.layout
        if self.size in {1, layout.world_size}:  # of all ranks there is one group in any order
            return {}
        return {self.name: layout.groups(self.name)}

    def build_groups(self) -> None:
        """Make further process groups of the axis. Collective over all ranks."""

    @property
    def sharing_group(self) -> ProcessGroup:
        """Group of the ranks of the axis that share batches, for small objects."""
        return self.strategy.groups[self.name]

    def refuse(self, trainer: Trainer, module: LightningModule) -> None:
        """Refuse a run that the axis does not support, before any communication.

        Raises:
            ConfigError: The run is not supported.
        """

    def look_at_whole(self, trainer: Trainer) -> None:
        """Analyse the model before an inner axis divides it. Collective over all ranks.

        Raises:
            ConfigError: The axis cannot divide the model.
        """

    def place(self, trainer: Trainer) -> None:
        """Put the model on the axis. Collective over all ranks; inner axes first.

        Called before the model moves to a device and before the data axis wraps it.
        """

    def refuse_placed(self, module: LightningModule) -> None:
        """Refuse a model that this axis has changed in a way that an inner axis cannot analyse.

        Raises:
            ConfigError: With the order of calls that works.
        """

    def cut_into_stages(self, units: Mapping[str, Module]) -> None:
        """Prepare the layers that this axis divides for pipeline stages.

        Args:
            units: The pipeline units by dotted name; each rank runs some of them.
        """

    def stage_boundaries(self) -> "StageBoundaries | None":
        """Return how values pass between stages if this rank has parts of them, else None."""
        return None

    @contextmanager
    def others_without_collectives(self) -> Iterator[None]:
        """Return a context in which layers send nothing along the other axes."""
        with ExitStack() as stack:
            for axis in self.strategy.axes:
                if axis is not self:
                    stack.enter_context(axis.without_collectives())
            yield

    def without_collectives(self) -> AbstractContextManager[None]:
        """Return a context without collectives, for runs of this rank alone without data."""
        return nullcontext()

    def before_transfer(self, device: torch.device) -> None:
        """Called before the model moves to a device."""

    def before_wrap(self) -> None:
        """Called before the data axis wraps the model, which may replace its parameters."""

    def after_wrap(self) -> None:
        """Called after the data axis has wrapped the model."""

    @property
    def has_equal_weights(self) -> bool:
        """Whether all ranks of the job have the weights of rank 0 after ``place``."""
        return False

    def check_optimizers(self, optimizers: Sequence[Optimizer]) -> None:
        """Refuse optimizers that need more of the model than this rank has.

        Raises:
            ConfigError: Naming the optimizer.
        """

    def part_exchange(self) -> PartExchange | None:
        """Return what joins parameters that the axis divides, or None.

        Valid once the data axis has wrapped the model.
        """
        return None

    def start(self, trainer: Trainer) -> None:
        """Called at the end of ``setup``. Collective over all ranks; inner axes first."""

    # Parameters and buffers of this rank.

    def held_parameters(self) -> Collection[Parameter] | None:
        """Return the module's parameters that this rank has values of; None means all."""
        return None

    def kept_whole(self) -> Collection[str]:
        """Return names of parameters that inner axes leave whole, because this one divides them."""
        return ()

    def owned_rows(self) -> "OwnedRows | None":
        """Return parameters whose rows have an owner rank, which computes with them for others."""
        return None

    def holds_buffer(self, name: str) -> bool:
        """Whether this rank has the model's value of a buffer."""
        return True

    def kept_beside(self) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        """Return further versions of weights and of gradients that this rank keeps.

        Each has the shape of a parameter.
        """
        return (), ()

    # Loops and steps.

    def check_dataloader(self, dataloader: object) -> None:
        """Called with each dataloader of a run. Collective over the axis."""

    def begin_training(self) -> None:
        """Called when the loop of a fit begins."""

    def find_metrics(self) -> None:
        """Find the module's metrics, which may not exist before the start of a loop."""

    def drain(self) -> None:
        """Finish the work that training left for the next batch. Collective over the axis."""

    def begin_evaluation(self, num_batches: float, *, draws_batches: bool) -> None:
        """Called before an evaluation loop. Collective over the axis.

        Args:
            num_batches: Batches of this rank; infinity if unknown.
            draws_batches: The steps draw their batches themselves.
        """

    def evaluation_batch(self, is_last: Callable[[], bool]) -> AbstractContextManager[None]:
        """Return a context for each step of an evaluation loop. ``is_last`` is called after it."""
        return nullcontext()

    def run_out_of_batches(self, num_served: int) -> None:
        """Called when the loaders of an evaluation loop end, after ``num_served`` batches.

        May be one batch ahead of the steps, or within a step that draws its batches.
        """

    def end_evaluation(self) -> None:
        """Called after an evaluation loop."""

    def announce_batch(self, batch: Any, digest: BatchDigest) -> None:
        """Take the next batch of this rank, for the comparison in ``check_batch``.

        Args:
            batch: The batch on the device, as the step gets it.
            digest: Digest of the batch before its transfer.
        """

    def check_batch(self, batch: Any) -> None:
        """Raise if ranks that share the model have a batch other than this one."""

    def run_step(self, step: str, run: StepFunction, args: Any, kwargs: Any) -> Any:
        """Run a step of the module on a batch.

        Args:
            step: ``training_step``, ``validation_step``, ``test_step`` or ``predict_step``.
            run: Runs the step through the inner axes, with the arguments below. An axis that
                replaces the step does not call it.
            args: Positional arguments of the step; the first is the batch on the device.
            kwargs: Keyword arguments of the step.
        """
        return run(args, kwargs)

    def run_generation(self, run: Callable[[], Any]) -> Any:
        """Run a call of Hugging Face's ``generate``, within a step or outside of steps.

        Args:
            run: Makes the call through the inner axes.

        Raises:
            UnsupportedError: The axis cannot run it here.
        """
        return run()

    def norm_shares(self) -> Sequence[NormShare]:
        """Return this rank's part of gradient norms; empty if the ranks hold equal gradients."""
        return ()

    def sigterm_agreement(self) -> "SigtermAgreement | None":
        """Return how ranks agree on a SIGTERM if they exchange it with the steps, else None."""
        return None

    # Checkpoints.

    def holds(self, name: str) -> bool:
        """Whether this rank has a part of a parameter or buffer of the module."""
        return True

    def stores(self, name: str) -> bool:
        """Whether this rank writes its part of a parameter or buffer into checkpoints."""
        return True

    def division(self, name: str) -> DimDivision | None:
        """Return how a parameter is divided if this rank has a part as a plain tensor, else None.

        Args:
            name: Key in the module's state dict; any of them for a parameter with several.
        """
        return None

    def opened(self) -> AbstractContextManager[None]:
        """Return a context in which ``state_dict`` gives this rank's part instead of raising."""
        return nullcontext()

    def join_model_state(self, state: dict[str, Any]) -> dict[str, Any]:
        """Return the whole model's state from one that is whole over the inner axes. Collective."""
        return state

    def keeps_whole_state(self, parameter: Tensor) -> bool | None:
        """Whether this rank keeps a parameter's whole optimizer state; None: that of its part."""
        return None

    def join_optimizer_state(self, state: dict[str, Any]) -> dict[str, Any]:
        """Add the optimizer state that is stored once for all ranks. Collective over all ranks."""
        return state

    def take_pending(self) -> Take | None:
        """Return what loads gradients that the saved run had not applied; None drops them."""
        return None

    def kept_for_resume(self) -> dict[str, Any]:
        """Return the axis's entries of a checkpoint: numbers and strings, equal on all ranks."""
        return {}

    def take_kept(self, state: Mapping[str, Any]) -> None:
        """Load the entries that ``kept_for_resume`` of all axes gave in the resumed run."""

    # Forecasts, shown beside the measurements.

    def dry_batch(self) -> tuple[FakeRuns, torch.device] | None:
        """Return this rank's work on a training batch as fake runs, and the batch's device.

        None from an axis that leaves steps to the inner ones.
        """
        return None

    def expected_traffic(self, module: Module) -> list[ExpectedTraffic]:
        """Return the traffic of one optimizer step on one rank, accumulated batches included.

        Args:
            module: As the data axis has wrapped it.
        """
        return []

    def adjust_memory(self, kinds: list[MemoryKind]) -> list[MemoryKind]:
        """Return the memory that one rank needs, from what the data and inner axes expect."""
        return kinds

    # Ending.

    def explain(self, error: BaseException) -> None:
        """Add this axis's knowledge of the cause to an error that ends the run.

        May be called more than once for one error.
        """

    def report(self, error: BaseException) -> None:
        """Report the error that ends this rank to the other ranks."""

    def close(self) -> None:
        """Stop background work. Called first in ``teardown``."""

    def release(self) -> None:
        """Free what only training needs, once saves are complete. Parameters stay."""


class LayerAxis(Axis):
    """An axis whose ranks compute each layer together, each with a part of its operands.

    Their batches are compared before each step.
    """

    _control: ProcessGroup | None = None
    """The ranks of the axis on the CPU."""
    world_cpu_group: ProcessGroup | None = None
    """All ranks of the job on the CPU."""
    _batches: SameBatchCheck | None = None
    """Compares the batches of the axis; None before ``place``."""

    def __getstate__(self) -> dict[str, Any]:
        # Spawned ranks make their own groups.
        return {**vars(self), "_control": None, "world_cpu_group": None, "_batches": None}

    @override
    def build_groups(self) -> None:
        self._control = self.strategy.new_group(self.name, backend="gloo")
        ranks = [range(self.strategy.layout.world_size)]
        self.world_cpu_group = self.strategy.enumerated_group(ranks, "proofs", backend="gloo")

    @property
    @override
    def sharing_group(self) -> ProcessGroup:
        assert self._control is not None
        return self._control

    @override
    def place(self, trainer: Trainer) -> None:
        assert self._control is not None
        self.strategy.recorder.name_group(self._control, self.name)
        self._batches = SameBatchCheck(self._control, f"{self.name} group")

    @override
    def announce_batch(self, batch: Any, digest: BatchDigest) -> None:
        if self.size > 1 and self._batches is not None:
            self._batches.start(batch, digest)

    @override
    def check_batch(self, batch: Any) -> None:
        if self.size > 1 and self._batches is not None:
            self._batches.wait(batch)
