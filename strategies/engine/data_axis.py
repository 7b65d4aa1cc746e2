"""``DataAxis``: the interface of the data axis, which has the parameters and the optimizers.

Its subclasses keep replicas (``data_parallel/ddp.py``) or shards (``data_parallel/zero.py``). They
wrap the model that the other axes have divided, average gradients over batches, clip them and step.
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
from boltmesh.strategies.torch_compat.communication import exclude_from_ddp
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
    """The module whose forward exchanges rows or parameters between ranks."""
    note: Callable[[str], None]
    """Called before each exchange with a description of it; to be replaced."""

    def is_on(self) -> bool:
        """Whether the module's forward exchanges rather than runs on this rank alone."""
        ...

    def attend(self) -> None:
        """Take part in an exchange without rows of this rank. Collective."""


@dataclass(eq=False)
class FetchedParams:
    """Parameters that a data axis sends to the ranks that compute with them, in each batch."""

    called: set[int] = field(default_factory=set, init=False)
    """Numbers of modules that were called without rows since their parameters arrived: their
    gradients are then zeros and not missing."""
    anchors: Sequence[Tensor] = field(default=(), init=False)
    """Tensors that this rank's results depend on, whichever parameters they used, so that every
    rank takes part when gradients are sent back."""


@dataclass(eq=False)
class OwnedModules(FetchedParams):
    """Equal modules, divided in order over a group: each rank computes with equally many."""

    modules: Sequence[Module]
    """The modules of all ranks."""


@dataclass(eq=False)
class OwnedColumns(FetchedParams):
    """Matrices with interleaved columns of all experts: column c is of expert c % num_experts.

    Each rank of a group computes with the columns of its experts, equally many, in their order.
    """

    places: Sequence[tuple[Module, str]]
    """Modules and the names of their parameters."""
    num_experts: int
    """Experts of all ranks."""

    def part(self, rows: Tensor, rank: int, num_ranks: int) -> Tensor:
        """Return the columns of a rank's experts, interleaved in the same way.

        Args:
            rows: Rows of such a matrix, shape ``(rows, columns)``; there may be none.
            rank: Rank within the group.
            num_ranks: Ranks of the group.

        Returns:
            Shape ``(rows, columns / num_ranks)``.
        """
        count, width = rows.shape
        by_expert = rows.reshape(count, width // self.num_experts, self.num_experts)
        return by_expert.tensor_split(num_ranks, -1)[rank].flatten(1)


@dataclass(frozen=True)
class OwnedRows:
    """Parameters divided over a group: each rank owns some rows and computes with them."""

    parameters: set[Parameter]
    """The parameters that are still whole; each leaves the set when it is divided."""
    group: ProcessGroup
    """The ranks that own all rows together, equally many each, in order."""
    replicas: ProcessGroup
    """The ranks that have the same rows."""
    ranks: Sequence[Sequence[int]]
    """Ranks of all groups whose rows are replicas of each other: a sequence for each group."""
    exchanges: Sequence[OwnerExchange]
    fetched: Sequence[FetchedParams] = ()
    """Parameters that are sent to their owners for a step, and are shards between steps."""


@dataclass(frozen=True)
class AxisContext:
    """The run and the ranks that a data axis wraps a model for."""

    group: ProcessGroup
    """The ranks that average gradients: of the data axis and of axes that average with it."""
    device: torch.device
    cut_group: Callable[[Callable[[list[int]], Sequence[Sequence[int]]], str], ProcessGroup]
    """See ``DataAxis._cut_group``."""
    compute_dtype: torch.dtype | None
    """Dtype of autocast under ``bf16-mixed`` and ``16-mixed``; None without autocast."""
    ranks_per_node: int
    """Ranks of this job on one host."""
    num_microbatches: int
    """Batches of a rank per optimizer step, when the run begins."""
    has_norm_clipping: bool
    """Whether the Trainer clips gradients by their norm."""
    reads_gradients: bool
    """Whether code of the user may read ``.grad`` before the optimizer steps."""
    norm_shares: Sequence[NormShare]
    """Parts of gradient norms on the other axes."""
    scaler: GradScaler | None
    """Scales losses and skips steps under ``16-mixed``."""
    zeroes_gradients: Callable[[], bool]
    """Whether the Trainer zeroes gradients after the forward pass that is about to begin, and no
    code reads them before."""
    begins_window: Callable[[], bool]
    """Whether the current batch is known to be the first of an accumulation window."""
    recorder: Recorder | NullRecorder
    recomputed: frozenset[Module]
    """Blocks whose forward pass runs again in the backward pass."""
    held: Collection[Parameter] | None
    """The parameters that the ranks of the axis have values of; None: all of the module."""
    holds_buffer: Callable[[str], bool]
    """Whether these ranks have the model's value of a buffer, by its name."""
    owned: OwnedRows | None
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
    """Keeps one model over the ranks of the data axis, as replicas or as shards."""

    name = "data"
    shares_batches = False

    is_sharded = False
    """Whether ranks hold parts: parameters are then DTensors, in training and in evaluation, the
    axis itself places them on devices, and checkpoints are written by shards."""

    has_late_gradients = False
    """Whether it takes all gradients of a batch at its end, as a pipeline makes them: it is a
    ``LateGradientsAxis``."""

    is_synchronised = True
    """Whether the batch is the last one of an accumulation window."""

    other_shares: Sequence[NormShare] = ()
    """Parts of gradient norms on the other axes. Set by ``wrap``."""

    whole_steps: Sequence[WholeSteps] = ()
    """Steps of optimizers that need whole parameters, if the axis has shards of them."""

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
        groups = super().near_groups()
        ranks_per_node = self.strategy.num_processes
        shards = [
            shard
            for ranks in self.strategy.layout.groups(*self.strategy.gradient_axes)
            for shard in self.shard_groups(ranks, ranks_per_node=ranks_per_node)
        ]
        return {**groups, "shard": shards} if shards else groups

    def shard_groups(self, ranks: Sequence[int], *, ranks_per_node: int) -> list[list[int]]:
        """Divide ranks of the axis into groups that hold one copy of the model together.

        Args:
            ranks: Global ranks of one group of the axis.
            ranks_per_node: Ranks of this job on one host.

        Returns:
            Empty if each rank has a copy, or all of them have one together.

        Raises:
            LayoutError: They cannot be divided as requested.
        """
        return []

    @property
    def own_shares(self) -> Sequence[NormShare]:
        """This axis's parts of gradient norms; empty if its ranks hold equal gradients."""
        return ()

    @property
    def norms(self) -> JointNorms:
        """Computes norms of ``.grad`` over all axes. Valid once a module is wrapped."""
        return JointNorms([*self.other_shares, *self.own_shares])

    def for_one_rank(self) -> "DataAxis":
        """Return the data axis to use instead if the other axes take all ranks."""
        return self

    def context(self, trainer: Trainer) -> AxisContext:
        """Return the context of ``wrap`` for a run that is set up."""
        strategy = self.strategy
        owned = (axis.owned_rows() for axis in strategy.axes)
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
            owned=next((each for each in owned if each is not None), None),
        )

    def _cut_group(
        self, cut: Callable[[list[int]], Sequence[Sequence[int]]], name: str
    ) -> ProcessGroup:
        """Return this rank's group of a division of the gradient ranks. Collective over all ranks.

        Args:
            cut: Divides the ranks that average gradients with each other into groups.
            name: Description of the groups in messages of torch.
        """
        ranks = self.strategy.layout.groups(*self.strategy.gradient_axes)
        cut_ranks = [each for group in ranks for each in cut(group)]
        group = self.strategy.enumerated_group(cut_ranks, name)
        assert group is not None
        return group

    def share_weights(self, module: Module) -> None:
        """Broadcast the model of the first rank, for a run without training.

        Collective over all ranks. Not called if ranks hold shards.
        """
        if not any(axis.has_equal_weights for axis in self.strategy.axes):
            broadcast_composites(module, self.strategy.gradient_group)
            compat.sync_module_states(module)

    @property
    def keeps_state_on_disk(self) -> bool:
        """Whether this rank's part of model or optimizer may be larger than its memory."""
        return False

    @property
    def has_whole_steps(self) -> bool:
        """Whether this rank's state is of a complete step, even after an error within one."""
        return True

    @abstractmethod
    def wrap(self, module: Module, context: AxisContext) -> Module:
        """Prepare the module and return the one that the forward pass calls.

        Collective over ``context.group``: afterwards every rank has the parameters of its first
        rank. An axis of replicas wraps only for training.
        """

    def adopt(self, optimizers: Sequence[Optimizer], *, reads_gradients: bool) -> None:
        """Called once the user's optimizers exist, before the first step.

        Args:
            optimizers: Those of ``configure_optimizers``; none for an evaluation, before which
                only sharded axes are called.
            reads_gradients: ``.grad`` may be read between backward pass and step: by hooks of the
                module or of callbacks, a gradient scaler, manual optimisation.
        """

    def clip_by_norm(
        self, optimizer: Optimizer, parameters: Iterable[Parameter], max_norm: float
    ) -> Tensor:
        """Scale the gradients to a joint norm of at most ``max_norm``.

        Collective over all ranks that share the model.

        Returns:
            The norm before scaling, shape ``()``.
        """
        if self.other_shares:
            return self.norms.clip(list(parameters), max_norm)
        return grad_norm.clip_by_norm(parameters, max_norm)

    def gradient_norm(self, optimizer: Optimizer) -> float | None:
        """Return the L2 norm of this optimizer's gradients over all ranks, before clipping.

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
        """Wait until no step is pending; parameters and ``optimizer.state`` are then current."""

    def prepare_state(self, optimizer: Optimizer) -> None:
        """Called before a checkpoint is loaded into ``optimizer.state``.

        State that the axis keeps elsewhere is put there, to be filled in place.
        """

    def state_loaded(self, optimizer: Optimizer) -> None:
        """Called after ``optimizer.state`` was replaced by that of a checkpoint."""

    def parameters_loaded(self) -> None:
        """Called after the parameters were replaced by those of a checkpoint."""

    def tensors_by_kind(
        self, module: Module, optimizers: Sequence[Optimizer]
    ) -> Mapping[str, Sequence[Tensor | StoredBytes]] | None:
        """Return this rank's tensors by kind of memory; None: those of module and optimizers."""
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
        """Return the traffic of one optimizer step on one rank, accumulated batches included."""

    @abstractmethod
    def expected_memory(self, module: Module, optimizers: Sequence[Optimizer]) -> list[MemoryKind]:
        """Return the expected memory of one rank, by kind and place, once every state exists."""


def broadcast_composites(module: Module, group: ProcessGroup) -> None:
    """Give all ranks the first one's parameters that consist of several tensors.

    Collective over the group. ``DistributedDataParallel`` leaves them alone afterwards.
    """
    found = {name: each for name, each in module.named_parameters() if is_composite(each)}
    if found:
        exclude_from_ddp(module, found)
        broadcast_tensors(list(found.values()), group)
