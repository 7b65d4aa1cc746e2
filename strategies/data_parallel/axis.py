"""What the engine asks of whatever fills the data axis: replicas now, shards with ZeRO.

What a pipeline asks of the data axis.

Its stages run pieces of the LightningModule, several microbatches at once, and hand the gradients
of a batch over when all of them are made. So there is no forward pass of the module that a data
axis could go along with: it is told when a batch begins, and when its gradients are in ``.grad``.

A data axis of one rank: nothing is shared out, so nothing has to be kept alike.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from datetime import timedelta

import torch
from torch import Tensor
from torch.amp import GradScaler
from torch.distributed import ProcessGroup
from torch.nn import Module, Parameter
from torch.optim import Optimizer
from typing_extensions import override

from boltmesh.strategies import grad_norm
from boltmesh.strategies.data_parallel.expected_memory import expected_held_memory
from boltmesh.strategies.grad_norm import JointNorms, NormShare
from boltmesh.telemetry.snapshot import MemoryKind
from boltmesh.telemetry.traffic import ExpectedTraffic
from boltmesh.telemetry.writer.memory import StoredBytes
from boltmesh.telemetry.writer.null_recorder import NullRecorder
from boltmesh.telemetry.writer.recorder import Recorder


@dataclass(frozen=True)
class AxisContext:
    """Where a data axis finds itself."""

    group: ProcessGroup
    """The ranks of the axis that this rank belongs to."""
    device: torch.device
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
    timeout: timedelta | None = None
    """How long a collective of a further group may take; None: torch's default."""
    norm_shares: Sequence[NormShare] = ()
    """What the axes beside this one say of norms of gradients."""
    scaler: GradScaler | None = None
    """What scales losses and skips steps under ``16-mixed``."""
    zeroes_gradients: Callable[[], bool] = field(default=lambda: False)
    """Whether the Trainer zeroes gradients after the forward pass that is about to begin, and
    nobody looks at them before."""
    recorder: Recorder | NullRecorder = field(default_factory=NullRecorder)
    recomputed: frozenset[Module] = frozenset()
    """Blocks whose forward pass runs once more in the backward pass."""
    held: Collection[Parameter] | None = None
    """The parameters of which the ranks of the axis have values; None: all of the module."""
    holds_buffer: Callable[[str], bool] | None = None
    """Whether they have the model's value of a buffer, by its name; None: of all."""


class DataAxis(ABC):
    """Keeps the ranks of the data axis one model, whatever each of them holds of it."""

    is_sharded = False
    """Whether ranks hold parts: parameters are then DTensors, in training and evaluation alike,
    the axis itself places them on devices, and checkpoints are written by shards."""

    other_shares: Sequence[NormShare] = ()
    """What the axes beside this one say of norms of gradients. Set by ``wrap``."""

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

    @property
    def serves_one_rank(self) -> bool:
        """Whether it does something for a rank that has nobody to share with."""
        return False

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

    def adopt(self, optimizers: Sequence[Optimizer], *, reads_gradients: bool) -> None:  # noqa: B027 - replicas need none
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

    def after_optimizer_step(self, module: Module, optimizer: Optimizer) -> None:  # noqa: B027 - replicas need none
        """Called after each step of an optimizer."""

    def synchronize(self) -> None:  # noqa: B027 - replicas need none
        """Return when no step is pending, and parameters and ``optimizer.state`` are up to date."""

    def prepare_state(self, optimizer: Optimizer) -> None:  # noqa: B027 - replicas need none
        """Called before a checkpoint is loaded into ``optimizer.state``.

        What the axis keeps elsewhere is shown there, to be filled in place.
        """

    def state_loaded(self, optimizer: Optimizer) -> None:  # noqa: B027 - replicas need none
        """Called when ``optimizer.state`` has been replaced by that of a checkpoint."""

    def parameters_loaded(self) -> None:  # noqa: B027 - replicas need none
        """Called when the parameters have been replaced by those of a checkpoint."""

    def explain(self, error: BaseException) -> None:  # noqa: B027 - replicas need none
        """Put into an error that ends the run what this axis knows of its cause.

        Called more than once for one error.
        """

    def tensors_by_kind(
        self, module: Module, optimizers: Sequence[Optimizer]
    ) -> Mapping[str, Sequence[Tensor | StoredBytes]] | None:
        """What this rank holds, by kind of memory; None where parameters and state tell it all."""
        return None

    def release(self) -> None:  # noqa: B027 - replicas need none
        """Give back what training alone needs; parameters stay. Called when a run ends."""

    def begin_evaluation(self, num_batches: float, *, draws_batches: bool) -> None:  # noqa: B027 - replicas need none
        """Called before a loop that trains nothing. Collective over the axis.

        Args:
            num_batches: Of this rank; infinity where nobody knows.
            draws_batches: The steps draw their batches themselves.
        """

    def evaluation_batch(self, is_last: Callable[[], bool]) -> AbstractContextManager[None]:
        """Around each step of such a loop. ``is_last`` tells after it whether it was the last."""
        return nullcontext()

    def run_out_of_batches(self, num_served: int) -> None:  # noqa: B027 - replicas need none
        """Called when the loaders of such a loop end, after so many batches.

        May be one batch ahead of the steps, or within a step that draws its batches.
        """

    def end_evaluation(self) -> None:  # noqa: B027 - replicas need none
        """Called after such a loop."""

    @abstractmethod
    def no_sync(self, module: Module) -> AbstractContextManager[None]:
        """Keep gradients local, for all but the last batch of an accumulation window."""

    def before_manual_backward(self, module: Module, loss: Tensor) -> None:  # noqa: B027 - only DDP's reducer has to be armed
        """Called before each ``manual_backward``."""

    def after_manual_backward(self, module: Module) -> None:  # noqa: B027 - likewise
        """Called after each ``manual_backward``."""

    @abstractmethod
    def expected_traffic(self, module: Module) -> list[ExpectedTraffic]:
        """What one optimizer step moves on one rank, its accumulated batches included."""

    @abstractmethod
    def expected_memory(self, module: Module, optimizers: Sequence[Optimizer]) -> list[MemoryKind]:
        """What memory one rank should need, by kind and place, once every state exists."""


class PipelineDataAxis(DataAxis):
    """A data axis that can be used where the gradients of a batch come all at once."""

    _is_synchronised = True
    """Whether the batch is the last one of an accumulation window."""

    @override
    @contextmanager
    def no_sync(self, module: Module) -> Iterator[None]:
        self._is_synchronised = False
        try:
            yield
        finally:
            self._is_synchronised = True

    @abstractmethod
    def begin_batch(self) -> None:
        """Called before each batch of training. Collective over the axis."""

    def end_batch(self) -> bool:
        """Called within the backward pass of a batch, when its gradients are in ``.grad``.

        Collective over the axis for the last batch of an accumulation window, as ``no_sync`` tells.

        Returns:
            Whether ``.grad`` holds averages over several ranks now.

        Raises:
            DivergenceError: When another rank has no loss for its batch.
        """
        return self._finish(has_loss=True)

    def pass_over_batch(self) -> bool:
        """Called in the place of ``end_batch`` where a batch gave no loss. Collective likewise.

        Raises:
            DivergenceError: When another rank has one.
        """
        return self._finish(has_loss=False)

    @abstractmethod
    def _finish(self, *, has_loss: bool) -> bool:
        """Average what is due after a batch; return whether ``.grad`` holds averages now."""


class SingleRankAxis(PipelineDataAxis):
    """The data axis of layouts that use their ranks for other axes."""

    _held: Collection[Parameter] | None = None

    @override
    def wrap(self, module: Module, context: AxisContext) -> Module:
        self.other_shares, self._held = context.norm_shares, context.held
        return module

    @override
    def begin_batch(self) -> None:
        pass

    @override
    def _finish(self, *, has_loss: bool) -> bool:
        return False

    @override
    def expected_traffic(self, module: Module) -> list[ExpectedTraffic]:
        return []

    @override
    def expected_memory(self, module: Module, optimizers: Sequence[Optimizer]) -> list[MemoryKind]:
        return expected_held_memory(module, optimizers, self._held)
