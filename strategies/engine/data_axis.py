"""What the engine calls on the data axis: the axis that has the parameters and the optimizers.

Whatever fills it, replicas (``data_parallel/ddp.py``) or shards (``data_parallel/zero.py``), wraps
the model as the other axes have left it, averages gradients over batches, clips them, and steps.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor
from torch.amp import GradScaler
from torch.distributed import ProcessGroup
from torch.nn import Module, Parameter
from torch.optim import Optimizer
from typing_extensions import override

from boltmesh.strategies import grad_norm
from boltmesh.strategies import lightning_compat as compat
from boltmesh.strategies.deferred_initialization.materialize import broadcast_tensors
from boltmesh.strategies.dry_run.unsupported import refuse_quantized
from boltmesh.strategies.engine.axis import Axis
from boltmesh.strategies.grad_norm import JointNorms, NormShare
from boltmesh.strategies.lightning_compat.trainer import (
    autocast_dtype,
    begins_window,
    has_norm_clipping,
    reads_gradients,
    zeroes_gradients,
)
from boltmesh.strategies.patch import patched
from boltmesh.strategies.torch_compat.communication import leave_to_caller
from boltmesh.strategies.torch_compat.tensors import is_composite
from boltmesh.strategies.whole_steps import WholeSteps
from boltmesh.telemetry.snapshot import MemoryKind
from boltmesh.telemetry.traffic import ExpectedTraffic
from boltmesh.telemetry.writer.memory import StoredBytes
from boltmesh.telemetry.writer.null_recorder import NullRecorder
from boltmesh.telemetry.writer.recorder import Recorder


class OwnerExchange(Protocol):
    """Lets ranks that own different rows of parameters compute with them for each other."""

    name: str
    module: Module
    """In whose forward ranks exchange what they compute with."""
    note: Callable[[str], None]
    """Called before each exchange with what this rank is about to do; to be replaced."""

    def is_on(self) -> bool:
        """Whether the module's forward exchanges, and does not run on this rank alone."""
        ...

    def attend(self) -> None:
        """Take part in an exchange of the others. Collective."""


class Brought:
    """Parameters that a data axis brings to the ranks that compute with them, in each batch."""

    def __init__(self) -> None:
        self.called: set[int] = set()
        """Numbers of modules that were called without rows since their parameters are there: their
        gradients are zeros then, and not missing."""
        self.anchors: Sequence[Tensor] = ()
        """Tensors that this rank's results depend on, whichever parameters they have used, so that
        every rank takes part when gradients are brought back."""


class OwnedModules(Brought):
    """Equal modules of which each rank of a group computes with equally many, in their order.

    Args:
        modules: All of them.
    """

    def __init__(self, modules: Sequence[Module]) -> None:
        super().__init__()
        self.modules = modules


class OwnedColumns(Brought):
    """Matrices whose columns are those of experts in turns: column c is of expert c % num_experts.

    Each rank of a group computes with the columns of its experts, equally many, in their order.

    Args:
        places: Modules and the names of their parameters.
        num_experts: Of all ranks.
    """

    def __init__(self, places: Sequence[tuple[Module, str]], num_experts: int) -> None:
        super().__init__()
        self.places, self.num_experts = places, num_experts

    def part(self, rows: Tensor, rank: int, num_ranks: int) -> Tensor:
        """Return the columns of a rank, ``[rows, columns / num_ranks]``."""
        count, width = rows.shape  # there may be no rows
        by_expert = rows.reshape(count, width // self.num_experts, self.num_experts)
        return by_expert.tensor_split(num_ranks, -1)[rank].flatten(1)


@dataclass(frozen=True)
class OwnedRows:
    """Parameters of which each rank of a group has a part of its own, and computes with it."""

    parameters: set[Parameter]
    """Those that are whole; each leaves the set when it is cut."""
    group: ProcessGroup
    """The ranks that have all rows together, equally many each, in order."""
    replicas: ProcessGroup
    """The ranks that have the same rows."""
    ranks: Sequence[Sequence[int]]
    """All ranks of such groups that have replicas of each other's rows: a row for each group."""
    exchanges: Sequence[OwnerExchange]
    brought: Sequence[Brought] = ()
    """Those that are brought to their owners for a step, and shards between steps."""


@dataclass(frozen=True)
class AxisContext:
    """Where a data axis finds itself."""

    group: ProcessGroup
    """The ranks that average gradients: those of the axis, and of axes that average with it."""
    device: torch.device
    cut_group: Callable[[Callable[[list[int]], Sequence[Sequence[int]]], str], ProcessGroup]
    """See ``DataAxis._cut_group``."""
    compute_dtype: torch.dtype | None = None
    """What autocast computes in under ``bf16-mixed`` and ``16-mixed``; None without autocast."""
    ranks_per_node: int = 1
    """How many ranks of this job one host has."""
    num_microbatches: int = 1
    """How many batches of a rank make an optimizer step, when the run begins."""
    has_norm_clipping: bool = False
    """Whether the Trainer clips gradients by their norm."""
    reads_gradients: bool = False
    """Whether something of the user's may look at ``.grad`` before an optimizer has stepped."""
    norm_shares: Sequence[NormShare] = ()
    """What the axes beside this one say of norms of gradients."""
    scaler: GradScaler | None = None
    """What scales losses and skips steps under ``16-mixed``."""
    zeroes_gradients: Callable[[], bool] = field(default=lambda: False)
    """Whether the Trainer zeroes gradients after the forward pass that is about to begin, and
    nobody looks at them before."""
    begins_window: Callable[[], bool] = field(default=lambda: False)
    """Whether the batch in work is known to be the first of an accumulation window."""
    recorder: Recorder | NullRecorder = field(default_factory=NullRecorder)
    recomputed: frozenset[Module] = frozenset()
    """Blocks whose forward pass runs once more in the backward pass."""
    held: Collection[Parameter] | None = None
    """The parameters of which the ranks of the axis have values; None: all of the module."""
    holds_buffer: Callable[[str], bool] | None = None
    """Whether they have the model's value of a buffer, by its name; None: of all."""
    owned: OwnedRows | None = None
    """Parameters that an axis within the data axis has divided."""


class LateGradientsAxis(Protocol):
    """A data axis beside a pipeline.

    The stages of a pipeline run pieces of the LightningModule, several microbatches at once, and
    hand the gradients of a batch over when all of them are made. So there is no forward pass of the
    module in which the axis could gather and reduce: it is called before and after a batch.
    """

    def before_batch(self) -> None:
        """Called before each batch of training. Collective over the axis."""

    def reduce_gradients(self, *, has_loss: bool) -> bool:
        """Called within the backward pass of a batch, when its gradients are in ``.grad``.

        Collective over the axis for the last batch of an accumulation window (``no_sync``).

        Args:
            has_loss: Whether the batch has a loss. Without one it has no gradients.

        Returns:
            Whether ``.grad`` holds averages over several ranks now.

        Raises:
            DivergenceError: Some ranks have a loss for their batches and others not.
        """
        ...


class DataAxis(Axis, ABC):
    """Keeps the ranks of the data axis one model, whatever each of them holds of it."""

    name = "data"
    shares_batches = False

    is_sharded = False
    """Whether ranks hold parts: parameters are then DTensors, in training and evaluation alike,
    the axis itself places them on devices, and checkpoints are written by shards."""

    has_late_gradients = False
    """Whether it takes the gradients of a batch all at once, when the batch is over, as a pipeline
    makes them: it is a ``LateGradientsAxis``."""

    is_synchronised = True
    """Whether the batch is the last one of an accumulation window."""

    other_shares: Sequence[NormShare] = ()
    """What the axes beside this one say of norms of gradients. Set by ``wrap``."""

    whole_steps: Sequence[WholeSteps] = ()
    """Steps of optimizers that need whole parameters, where the axis has shards of them."""

    @override
    def refuse(self, trainer: Trainer, module: LightningModule) -> None:
        divides_layers = any(axis.size > 1 for axis in self.strategy.model_axes)
        refuse_quantized(module, self.strategy.public_name, divides_layers=divides_layers)

    @property
    @override
    def stores_shards(self) -> bool:
        return self.is_sharded

    @override
    def near_groups(self) -> dict[str, list[list[int]]]:
        found = super().near_groups()
        ranks_per_node = self.strategy.num_processes
        shards = [
            shard
            for ranks in self.strategy.layout.groups(*self.strategy.gradient_axes)
            for shard in self.shard_groups(ranks, ranks_per_node=ranks_per_node)
        ]
        return {**found, "shard": shards} if shards else found

    def shard_groups(self, ranks: Sequence[int], *, ranks_per_node: int) -> list[list[int]]:
        """Cut ranks of the axis into those that hold one copy of the model together.

        Args:
            ranks: One group of the axis, global ones.
            ranks_per_node: How many ranks of this job one host has.

        Returns:
            Nothing where each rank has a copy, or all of them have one.

        Raises:
            LayoutError: They cannot be cut as was asked for.
        """
        return []

    @property
    def own_shares(self) -> Sequence[NormShare]:
        """What this axis says of norms of gradients: nothing where its ranks have all alike."""
        return ()

    @property
    def norms(self) -> JointNorms:
        """Norms of what is in ``.grad``, over all axes. Valid once a module is wrapped."""
        return JointNorms([*self.other_shares, *self.own_shares])

    def for_one_rank(self) -> "DataAxis":
        """Return what takes its place where all ranks are used for other axes."""
        return self

    def context(self, trainer: Trainer) -> AxisContext:
        """Return where the axis finds itself in a run that is set up."""
        strategy = self.strategy
        return AxisContext(
            group=strategy.gradient_group,
            device=strategy.root_device,
            compute_dtype=autocast_dtype(strategy.precision_plugin),
            ranks_per_node=strategy.num_processes,
            num_microbatches=trainer.accumulate_grad_batches,
            has_norm_clipping=has_norm_clipping(trainer),
            reads_gradients=reads_gradients(trainer, self.module),
            cut_group=self._cut_group,
            norm_shares=strategy.norm_shares(),
            scaler=strategy.scaler,
            zeroes_gradients=partial(zeroes_gradients, trainer),
            begins_window=partial(begins_window, trainer),
            recorder=strategy.recorder,
            recomputed=strategy.recomputation.blocks,
            # A model that is whole has no list: it would keep parameters that become shards.
            held=strategy.held_parameters() if strategy.divides_modules else None,
            holds_buffer=strategy.holds_buffer,
            owned=next((each for each in map(_owned_by, strategy.axes) if each is not None), None),
        )

    def _cut_group(
        self, cut: Callable[[list[int]], Sequence[Sequence[int]]], name: str
    ) -> ProcessGroup:
        """Return a group of some ranks that average gradients. Collective over all ranks.

        Args:
            cut: Divides all ranks that average gradients with each other into such groups.
            name: What messages of torch call them.
        """
        ranks = self.strategy.layout.groups(*self.strategy.gradient_axes)
        cut_ranks = [each for group in ranks for each in cut(group)]
        group = self.strategy.enumerated_group(cut_ranks, name)
        assert group is not None
        return group

    def share_weights(self, module: Module) -> None:
        """Give every rank the first one's model, for a run that trains nothing.

        Collective over all ranks. Not called where ranks hold shards.
        """
        if not any(axis.has_equal_weights for axis in self.strategy.axes):
            send_composites(module, self.strategy.gradient_group)
            compat.sync_module_states(module)

    @property
    def keeps_state_on_disk(self) -> bool:
        """Whether this rank's share of model or optimizer may be larger than its memory."""
        return False

    @property
    def has_whole_steps(self) -> bool:
        """Whether what this rank holds is not left half-way between two steps."""
        return True

    @abstractmethod
    def wrap(self, module: Module, context: AxisContext) -> Module:
        """Prepare the module and return what the forward pass goes through.

        Collective over ``context.group``: afterwards every rank has the parameters of its first
        rank. An axis of replicas is asked only when the run trains.
        """

    def adopt(self, optimizers: Sequence[Optimizer], *, reads_gradients: bool) -> None:
        """Called once the user's optimizers exist, before the first step.

        Args:
            optimizers: As ``configure_optimizers`` made them; none for an evaluation, of which
                only sharded axes are told.
            reads_gradients: Somebody may look at ``.grad`` between backward pass and step: hooks
                of the module or of callbacks, a gradient scaler, manual optimisation.
        """

    def clip_by_norm(
        self, optimizer: Optimizer, parameters: Iterable[Parameter], max_norm: float
    ) -> Tensor:
        """Scale the gradients so that their joint norm is at most ``max_norm``; return the norm.

        Collective over all ranks that share the model.
        """
        if self.other_shares:
            return self.norms.clip(list(parameters), max_norm)
        return grad_norm.clip_by_norm(parameters, max_norm)

    def gradient_norm(self, optimizer: Optimizer) -> float | None:
        """Return the norm of this optimizer's gradients over all ranks, before clipping.

        Valid between the backward pass and the optimizer's step. None without any gradient.
        Collective over all ranks that share the model.
        """
        parameters = [each for group in optimizer.param_groups for each in group["params"]]
        if self.other_shares:
            return float(self.norms.norm(parameters))
        return grad_norm.gradient_norm(parameters)

    def after_optimizer_step(self, module: Module, optimizer: Optimizer) -> None:
        """Called after each step of an optimizer."""

    def synchronize(self) -> None:
        """Return when no step is pending, and parameters and ``optimizer.state`` are up to date."""

    def prepare_state(self, optimizer: Optimizer) -> None:
        """Called before a checkpoint is loaded into ``optimizer.state``.

        What the axis keeps elsewhere is shown there, to be filled in place.
        """

    def state_loaded(self, optimizer: Optimizer) -> None:
        """Called when ``optimizer.state`` has been replaced by that of a checkpoint."""

    def parameters_loaded(self) -> None:
        """Called when the parameters have been replaced by those of a checkpoint."""

    def tensors_by_kind(
        self, module: Module, optimizers: Sequence[Optimizer]
    ) -> Mapping[str, Sequence[Tensor | StoredBytes]] | None:
        """What this rank holds, by kind of memory; None where parameters and state tell it all."""
        return None

    @contextmanager
    def no_sync(self, module: Module) -> Iterator[None]:
        """Keep gradients local, for all but the last batch of an accumulation window."""
        with patched(self, is_synchronised=False):
            yield

    def before_backward(self, loss: Tensor) -> None:
        """Called before each backward pass of automatic optimisation."""

    def before_manual_backward(self, module: Module, loss: Tensor) -> None:
        """Called before each ``manual_backward``."""

    def after_manual_backward(self, module: Module) -> None:
        """Called after each ``manual_backward``."""

    @override
    @abstractmethod
    def expected_traffic(self, module: Module) -> list[ExpectedTraffic]:
        """What one optimizer step moves on one rank, its accumulated batches included."""

    @abstractmethod
    def expected_memory(self, module: Module, optimizers: Sequence[Optimizer]) -> list[MemoryKind]:
        """What memory one rank should need, by kind and place, once every state exists."""


def send_composites(module: Module, group: ProcessGroup) -> None:
    """Give all ranks the first one's parameters that consist of several tensors.

    Collective over the group. ``DistributedDataParallel`` leaves them alone afterwards.
    """
    found = {name: each for name, each in module.named_parameters() if is_composite(each)}
    if found:
        leave_to_caller(module, found)
        broadcast_tensors(list(found.values()), group)


def _owned_by(axis: Axis) -> OwnedRows | None:
    owned: OwnedRows | None = axis.owned_rows()
    return owned
