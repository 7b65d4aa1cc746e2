"""What the engine calls on each axis of the mesh, and what happens on an axis that does not care.

An axis is an object: it puts the model on its ranks, and answers for its ranks in steps,
checkpoints and forecasts. ``MeshStrategy`` holds the axes of a run in the order of ``AXES`` and
calls them one after the other. A new axis is a subclass of ``Axis`` and an entry in ``AXES``.
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
"""Runs a step of the module by its ``args`` and ``kwargs``, as inner axes and the engine do it."""

FakeRun = Callable[[FakeTensorMode], object]
"""Runs something with a model whose parameters are tensors of that mode, without data."""

FakeRuns = Sequence[tuple[FakeRun, int]]
"""Runs that differ, each with how often a batch has it."""


class Axis:
    """One axis of the mesh. Each default is what an axis of ranks without a task does.

    Called on every rank, in the same order. Collective where a method says so.
    """

    name: str
    """One of ``AXES``, unless the axis ``folds`` another one."""
    folds: str | None = None
    """The axis whose ranks this one divides a second time; None: it is one of ``AXES``."""
    wanted_size: int | None = None
    """Ranks along the axis that were asked for; None: what ``MeshStrategy.choose_layout`` gives."""
    strategy: "MeshStrategy"
    """That the axis belongs to, from ``attach`` on."""

    shares_batches = True
    """Whether the ranks of the axis get the same batches, and draw the same random numbers."""
    averages_gradients = False
    """Whether a parameter's gradient is the mean over the ranks of this axis, too: the data axis
    then averages, shards and replicates over both."""
    divides_modules = False
    """Whether parameters are whole, each on some of the ranks."""
    cuda_variables: Mapping[str, str] = MappingProxyType({})
    """Variables of the environment for CUDA on ranks of the axis, where they are not set."""
    can_compile = True
    """Whether blocks may be compiled: the compiler can trace what ranks exchange within them."""
    operand_divider: str | None = None
    """The argument by which ranks have parts of the operands of a layer's product: of its weight,
    or of rows that belong together."""
    coupled: ProcessGroup | None = None
    """Ranks of other batches that layers compute together with, in a group on the CPU."""
    parts_per_batch = 1
    """In how many parts a batch goes through the layers."""
    reasons: Reasons | None = None
    """Why ranks of the axis cannot do separately what one process does, for error messages."""

    @property
    def stores_shards(self) -> bool:
        """Whether ranks hold parts of the model, so that checkpoints are directories of shards."""
        return False

    @property
    def defers_building(self) -> bool:
        """Whether what ``configure_model`` makes may be larger than this rank's memory."""
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
        """Join a strategy that is being made.

        Raises:
            ConfigError: When an option contradicts one of the strategy or of an outer axis.
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
        """Return, by kind, the groups of ranks that should have fast links between them."""
        layout = self.strategy.layout
        if self.size in {1, layout.world_size}:  # of all ranks there is one group in any order
            return {}
        return {self.name: layout.groups(self.name)}

    def build_groups(self) -> None:
        """Make process groups beside the one of the axis. Collective over all ranks."""

    @property
    def sharing_group(self) -> ProcessGroup:
        """The ranks of the axis that share batches, for small objects."""
        return self.strategy.groups[self.name]

    def refuse(self, trainer: Trainer, module: LightningModule) -> None:
        """Refuse a run that the axis cannot carry out, before anything is communicated.

        Raises:
            ConfigError: With what to write instead.
        """

    def look_at_whole(self, trainer: Trainer) -> None:
        """Look at the model before an inner axis divides it. Collective over all ranks."""

    def place(self, trainer: Trainer) -> None:
        """Put the model on the axis. Collective over all ranks; inner axes go first.

        Before the model is moved to a device, and before the data axis wraps it.
        """

    def refuse_placed(self, module: LightningModule) -> None:
        """Refuse a model of which this axis has taken away what an inner one has to see.

        Raises:
            ConfigError: With what to do in which order.
        """

    def cut_into_stages(self, units: Mapping[str, Module]) -> None:
        """Prepare layers that this axis divides for ranks that run some of the units each.

        Args:
            units: What is run as a whole, by dotted name.
        """

    def stage_boundaries(self) -> "StageBoundaries | None":
        """How values cross from one stage to the next where this rank has a part of each."""
        return None

    @contextmanager
    def others_without_collectives(self) -> Iterator[None]:
        """Within it, layers send nothing along the other axes."""
        with ExitStack() as stack:
            for axis in self.strategy.axes:
                if axis is not self:
                    stack.enter_context(axis.without_collectives())
            yield

    def without_collectives(self) -> AbstractContextManager[None]:
        """Within it, this rank alone runs layers on tensors without data, without collectives."""
        return nullcontext()

    def before_transfer(self, device: torch.device) -> None:
        """Called before the model moves to a device."""

    def before_wrap(self) -> None:
        """Called before the data axis wraps the model, which may exchange its parameters."""

    def after_wrap(self) -> None:
        """Called when it has."""

    @property
    def has_equal_weights(self) -> bool:
        """Whether ``place`` has given all ranks of the job the first one's weights."""
        return False

    def check_optimizers(self, optimizers: Sequence[Optimizer]) -> None:
        """Refuse optimizers that need more of the model than a rank of the axis has.

        Raises:
            ConfigError: Naming the optimizer.
        """

    def part_exchange(self) -> PartExchange | None:
        """Return what joins parameters of which a rank of the axis has parts, or None.

        Valid once the data axis has wrapped the model.
        """
        return None

    def start(self, trainer: Trainer) -> None:
        """Called at the end of ``setup``. Collective over all ranks; inner axes go first."""

    # What this rank has.

    def held_parameters(self) -> Collection[Parameter] | None:
        """The module's parameters of which this rank has values; None: all of them."""
        return None

    def kept_whole(self) -> Collection[str]:
        """Names of parameters that inner axes are to leave whole, for this one to divide."""
        return ()

    def owned_rows(self) -> "OwnedRows | None":
        """Parameters of which each rank has rows of its own that it computes with for others."""
        return None

    def holds_buffer(self, name: str) -> bool:
        """Whether this rank has the model's value of a buffer."""
        return True

    def kept_beside(self) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        """Other versions of weights and gradients that this rank keeps."""
        return (), ()

    # Loops and steps.

    def check_dataloader(self, dataloader: object) -> None:
        """Called with each dataloader of a run. Collective over the axis."""

    def begin_training(self) -> None:
        """Called when the loop of a fit begins."""

    def find_metrics(self) -> None:
        """Look for metrics on the module, which it may make as late as at the start of a loop."""

    def drain(self) -> None:
        """Finish what training has left to the next batch. Collective over the axis."""

    def begin_evaluation(self, num_batches: float, *, draws_batches: bool) -> None:
        """Called before a loop that trains nothing. Collective over the axis.

        Args:
            num_batches: Of this rank; infinity where it is unknown.
            draws_batches: The steps draw their batches themselves.
        """

    def evaluation_batch(self, is_last: Callable[[], bool]) -> AbstractContextManager[None]:
        """Around each step of such a loop. ``is_last`` is called after it."""
        return nullcontext()

    def run_out_of_batches(self, num_served: int) -> None:
        """Called when the loaders of such a loop end, after so many batches.

        May be one batch ahead of the steps, or within a step that draws its batches.
        """

    def end_evaluation(self) -> None:
        """Called after such a loop."""

    def announce_batch(self, batch: Any, digest: BatchDigest) -> None:
        """Take the next batch of this rank, to be compared before a step with it.

        Args:
            batch: As the step gets it.
            digest: Of the batch before its transfer.
        """

    def check_batch(self, batch: Any) -> None:
        """Raise where ranks that share the model were given another batch than this one."""

    def run_step(self, step: str, run: StepFunction, args: Any, kwargs: Any) -> Any:
        """Run a step of the module on a batch.

        Args:
            step: ``training_step``, ``validation_step``, ``test_step`` or ``predict_step``.
            run: The step with what inner axes do around it, to be called with the arguments below.
                An axis that runs the step in a way of its own does not call it.
            args: Of the step, the batch on the device first.
            kwargs: Of the step.
        """
        return run(args, kwargs)

    def run_generation(self, run: Callable[[], Any]) -> Any:
        """Run a call of Hugging Face's ``generate``, within a step or outside of steps.

        Args:
            run: The call with what inner axes do around it.
        """
        return run()

    def norm_shares(self) -> Sequence[NormShare]:
        """What this rank counts of norms of gradients; empty if the ranks hold equal gradients."""
        return ()

    def sigterm_agreement(self) -> "SigtermAgreement | None":
        """Return how ranks agree on a SIGTERM, where they exchange it with the steps."""
        return None

    # Checkpoints.

    def holds(self, name: str) -> bool:
        """Whether this rank has a part of a parameter or buffer of the module."""
        return True

    def stores(self, name: str) -> bool:
        """Whether this rank writes what it has of it into checkpoints."""
        return True

    def division(self, name: str) -> DimDivision | None:
        """How a parameter is divided of which this rank has a part in a plain tensor; else None.

        Args:
            name: In the module's state; any name of a parameter that has several.
        """
        return None

    def opened(self) -> AbstractContextManager[None]:
        """Within it, ``state_dict`` gives what this rank has instead of raising."""
        return nullcontext()

    def join_model_state(self, state: dict[str, Any]) -> dict[str, Any]:
        """Return the whole model's state of what inner axes have made whole. Collective."""
        return state

    def keeps_whole_state(self, parameter: Tensor) -> bool | None:
        """Whether this rank keeps whole state of a parameter; None: state of what it has of it."""
        return None

    def join_optimizer_state(self, state: dict[str, Any]) -> dict[str, Any]:
        """Add to an optimizer's state what is stored once for all. Collective over all ranks."""
        return state

    def take_pending(self) -> Take | None:
        """Return what takes gradients that the saved run had not applied; None to drop them."""
        return None

    def kept_for_resume(self) -> dict[str, Any]:
        """What a checkpoint keeps of the axis: numbers and strings, equal on all ranks."""
        return {}

    def take_kept(self, state: Mapping[str, Any]) -> None:
        """Take what ``kept_for_resume`` of all axes gave in the run that is resumed."""

    # Forecasts, shown beside what is measured.

    def dry_batch(self) -> tuple[FakeRuns, torch.device] | None:
        """Return what this rank runs of a batch of training, and where the batch is.

        None from an axis that leaves steps to the inner ones.
        """
        return None

    def expected_traffic(self, module: Module) -> list[ExpectedTraffic]:
        """What one optimizer step moves on one rank, its accumulated batches included.

        Args:
            module: As the data axis has wrapped it.
        """
        return []

    def adjust_memory(self, kinds: list[MemoryKind]) -> list[MemoryKind]:
        """Return what one rank needs of memory, of what the data axis and inner axes expect."""
        return kinds

    # Ending.

    def explain(self, error: BaseException) -> None:
        """Put into an error that ends the run what this axis knows of its cause.

        May be called more than once for one error.
        """

    def report(self, error: BaseException) -> None:
        """Report to other ranks the error that ends this one."""

    def close(self) -> None:
        """End what runs beside training; the first thing in ``teardown``."""

    def release(self) -> None:
        """Give back what training alone needs, when saves are complete. Parameters stay."""


class LayerAxis(Axis):
    """An axis whose ranks compute each layer together, each with parts of its operands.

    Their batches are compared before each step.
    """

    _control: ProcessGroup | None = None
    """The ranks of the axis on the CPU."""
    world_cpu_group: ProcessGroup | None = None
    """All ranks of the job on the CPU."""
    _batches: SameBatchCheck | None = None
    """Compares the batches of the axis; None before a model was placed."""

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
