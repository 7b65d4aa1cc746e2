"""Replicas of a pipeline: gradients are averaged once per optimizer step, when all are there.

``DistributedDataParallel`` hooks into one forward pass of the module and the backward pass of its
graph. A pipeline has neither: its gradients appear together, at the end of a batch. So
``agree_on_gradients`` finds which parameters have a gradient on any rank, and ``average`` reduces
all gradients in flat buckets of a bounded size.
"""

from collections import deque
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, Work
from torch.nn import Module, Parameter
from torch.optim import Optimizer
from typing_extensions import override

from boltmesh.errors import ConfigError, DivergenceError
from boltmesh.strategies.data_parallel.expected_memory import expected_held_memory
from boltmesh.strategies.data_parallel.param_state import BufferSync
from boltmesh.strategies.engine.data_axis import AxisContext, DataAxis
from boltmesh.strategies.torch_compat.communication import broadcast_coalesced, sum_flags
from boltmesh.telemetry.snapshot import MemoryKind
from boltmesh.telemetry.traffic import ExpectedTraffic

FLAG: Final = torch.int32
"""Dtype of the flags that ranks exchange: one for the loss and one per trained parameter."""


def agree_on_gradients(
    trained: Sequence[Parameter], group: ProcessGroup, device: torch.device, *, has_loss: bool
) -> list[Parameter]:
    """Return the parameters that have a gradient on any rank; missing ones are set to zeros.

    A parameter without a gradient on any rank keeps none: optimizers skip it. Collective;
    ``trained`` is the same on all ranks.

    Raises:
        ConfigError: For sparse gradients.
        DivergenceError: When some ranks have a loss and others have none.
    """
    flags = [has_loss, *(each.grad is not None for each in trained)]
    num_losses, *counts = sum_flags(flags, group, device, dtype=FLAG)
    size = group.size()
    if all(flags) and device.type != "cpu":
        num_losses = size  # not read from the device; a rank without a loss raises the error
    if num_losses not in {0, size}:
        raise DivergenceError(
            f"training_step gave a loss on {num_losses} of {size} data ranks and None on the "
            f"others, in the last batch before an optimizer step. Return a loss on all of them: "
            f"one that is zero times an output has no influence."
        )
    used = [each for each, count in zip(trained, counts, strict=True) if count]
    for each in used:
        if each.grad is None:
            each.grad = torch.zeros_like(each)
        elif each.grad.layout != torch.strided:
            raise ConfigError(
                f"A parameter of the shape {tuple(each.shape)} has a sparse gradient, and "
                f"pipelines average dense ones. Leave sparse=True out of its embedding."
            )
    return used


def agreement_bytes(num_trained: int) -> int:
    """Return the bytes that ``agree_on_gradients`` sums."""
    return FLAG.itemsize * (1 + num_trained)


_IN_FLIGHT = 2
"""Buckets reduced at once: one is filled or emptied while the other is reduced."""


@dataclass
class _PendingAllReduce:
    work: Work | None
    flat: Tensor
    members: Sequence[Tensor]
    """Tensors that ``flat`` is copied into; empty where it is the gradient itself."""


def divide_into_buckets(tensors: Sequence[Tensor], bucket_bytes: int) -> list[list[Tensor]]:
    """Return tensors in order, in groups of one dtype and at most ``bucket_bytes``.

    A larger tensor is a group by itself. Equal shapes and dtypes give equal buckets on all ranks.
    """
    buckets: list[list[Tensor]] = []
    room = 0
    for each in tensors:
        size = each.numel() * each.element_size()
        if not buckets or size > room or buckets[-1][0].dtype != each.dtype:
            buckets.append([])
            room = bucket_bytes
        buckets[-1].append(each)
        room -= size
    return buckets


@torch.no_grad()
def average(gradients: Sequence[Tensor], group: ProcessGroup, bucket_bytes: int) -> None:
    """Replace gradients by their averages over a group, in place. Collective.

    As in ``DistributedDataParallel``, each rank's gradients are divided first, then summed.

    Args:
        gradients: Any shapes and dtypes, equal on all ranks.
        group: The ranks.
        bucket_bytes: Largest size of one message, unless one gradient is larger.
    """
    under_way: deque[_PendingAllReduce] = deque()
    for bucket in divide_into_buckets(gradients, bucket_bytes):
        if len(under_way) == _IN_FLIGHT:
            _finish(under_way.popleft())
        under_way.append(_begin(bucket, group))
    while under_way:
        _finish(under_way.popleft())


def _begin(bucket: Sequence[Tensor], group: ProcessGroup) -> _PendingAllReduce:
    is_flat = len(bucket) == 1 and bucket[0].is_contiguous()
    flat = bucket[0] if is_flat else torch.cat([each.reshape(-1) for each in bucket])
    members = () if is_flat else tuple(bucket)
    flat.div_(group.size())
    return _PendingAllReduce(dist.all_reduce(flat, group=group, async_op=True), flat, members)


def _finish(reduction: _PendingAllReduce) -> None:
    if reduction.work is not None:
        reduction.work.wait()
    members = reduction.members
    if members:
        parts = reduction.flat.split_with_sizes([each.numel() for each in members])
        for member, part in zip(members, parts, strict=True):
            member.copy_(part.view(member.shape))


BUCKET_BYTES = 25 << 20
"""Size of a message, as in ``DistributedDataParallel``."""


class PipelineDdpAxis(DataAxis):
    """The data axis of replicas whose gradients appear together. Does nothing for one rank."""

    has_late_gradients = True

    def __init__(self) -> None:
        self._context: AxisContext | None = None
        self._held: Collection[Parameter] = ()
        self._buffers: BufferSync | None = None

    @override
    def wrap(self, module: Module, context: AxisContext) -> Module:
        self._context, self.other_shares = context, context.norm_shares
        self._held = list(module.parameters()) if context.held is None else context.held
        self._buffers = BufferSync(module, context.group, holds=context.holds_buffer)
        share_state(self._held, self._buffers, context.group)
        return module

    @override
    def share_weights(self, module: Module) -> None:
        # The ranks of a pipeline hold different parameters, those of this group the same.
        strategy = self.strategy
        group = strategy.groups[self.name]
        buffers = BufferSync(module, group, holds=strategy.holds_buffer)
        share_state(strategy.held_parameters(), buffers, group)

    # A batch.

    def before_batch(self) -> None:
        """Broadcast the first rank's buffers, where gradients are averaged after the batch."""
        if self.is_synchronised and self._buffers is not None:
            self._buffers.send()

    def reduce_gradients(self, *, has_loss: bool) -> bool:
        """Average gradients; see ``LateGradientsAxis``."""
        context = self._context
        if not self.is_synchronised or context is None or context.group.size() == 1:
            return False
        used = agree_on_gradients(self._trained(), context.group, context.device, has_loss=has_loss)
        gradients = [each.grad for each in used if each.grad is not None]
        average(gradients, context.group, BUCKET_BYTES)
        return True

    def _trained(self) -> list[Parameter]:
        return [each for each in self._held if each.requires_grad]

    # Outside of batches.

    @override
    def begin_evaluation(self, num_batches: float, *, draws_batches: bool) -> None:
        if self._buffers is not None:
            self._buffers.send()

    @override
    def release(self) -> None:
        self._context = self._buffers = None

    # Expected traffic and memory.

    @override
    def expected_traffic(self, module: Module) -> list[ExpectedTraffic]:
        if self._context is None or self._context.group.size() == 1:
            return []
        held = self._buffers.held() if self._buffers is not None else ()
        return replica_traffic(self._trained(), _size(held))

    @override
    def expected_memory(self, module: Module, optimizers: Sequence[Optimizer]) -> list[MemoryKind]:
        return expected_held_memory(module, optimizers, self._held)


def replica_traffic(trained: Sequence[Tensor], buffer_bytes: int) -> list[ExpectedTraffic]:
    """Return one rank's traffic on the data axis in an optimizer step of several pipelines."""
    flags = agreement_bytes(len(trained))
    calls = 1 + len(divide_into_buckets(trained, BUCKET_BYTES))
    why = "gradients of the parameters held here, once per optimizer step; 4 bytes for each"
    traffic = [ExpectedTraffic("data", "allreduce", _size(trained) + flags, calls, why)]
    if buffer_bytes:
        why = "buffers of the first data rank, before a synchronised batch"
        traffic.append(ExpectedTraffic("data", "broadcast", buffer_bytes, None, why))
    return traffic


def share_state(parameters: Iterable[Parameter], buffers: BufferSync, group: ProcessGroup) -> None:
    """Send the first rank's parameters and buffers to all ranks of a group. Collective."""
    values = [each.detach() for each in parameters]
    if group.size() > 1 and values:
        broadcast_coalesced(values, group)
    buffers.send()


def _size(tensors: Sequence[Tensor]) -> int:
    return sum(each.numel() * each.element_size() for each in tensors)
