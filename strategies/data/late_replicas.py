"""Replicas of a pipeline: its gradients are averaged once per optimizer step, when all are made.

``DistributedDataParallel`` goes along with one forward pass of the module and the backward pass of
its graph. A pipeline has neither: its gradients are in ``.grad`` at once, at the end of a batch.
"""

from collections.abc import Collection, Iterable, Sequence

from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn import Module, Parameter
from torch.optim import Optimizer
from typing_extensions import override

from boltmesh.strategies.data.agreed_gradients import agree_on_gradients, agreement_bytes
from boltmesh.strategies.data.axis import AxisContext
from boltmesh.strategies.data.buffers import BufferSync
from boltmesh.strategies.data.flat_buckets import average, divide_into_buckets
from boltmesh.strategies.data.late import LateGradients
from boltmesh.strategies.data.replica_memory import expected_held_memory
from boltmesh.strategies.torch_compat import broadcast_coalesced
from boltmesh.telemetry.snapshot import MemoryKind
from boltmesh.telemetry.traffic import ExpectedTraffic

BUCKET_BYTES = 25 << 20
"""Of a message, as ``DistributedDataParallel`` has it."""


class LateReplicas(LateGradients):
    """The data axis of replicas whose gradients come all at once. Of one rank, it does nothing."""

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

    # A batch.

    @override
    def begin_batch(self) -> None:
        if self._is_synchronised and self._buffers is not None:
            self._buffers.send()

    @override
    def _finish(self, *, has_loss: bool) -> bool:
        context = self._context
        if not self._is_synchronised or context is None or context.group.size() == 1:
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

    # What is to be expected.

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
    """Return what an optimizer step of several pipelines moves over the data axis on one rank.

    Args:
        trained: Parameters of its stages that get gradients.
        buffer_bytes: Of the buffers that it sends.
    """
    flags = agreement_bytes(len(trained))
    calls = 1 + len(divide_into_buckets(trained, BUCKET_BYTES))
    why = "gradients of the parameters held here, once per optimizer step; 4 bytes for each"
    traffic = [ExpectedTraffic("data", "allreduce", _size(trained) + flags, calls, why)]
    if buffer_bytes:
        why = "buffers of the first data rank, before a synchronised batch"
        traffic.append(ExpectedTraffic("data", "broadcast", buffer_bytes, None, why))
    return traffic


def share_state(parameters: Iterable[Parameter], buffers: BufferSync, group: ProcessGroup) -> None:
    """Give all ranks what the first one has of a model. Collective over the group.

    Args:
        parameters: That these ranks hold.
        buffers: Likewise.
        group: The ranks.
    """
    values = [each.detach() for each in parameters]
    if group.size() > 1 and values:
        broadcast_coalesced(values, group)
    buffers.send()


def _size(tensors: Sequence[Tensor]) -> int:
    return sum(each.numel() * each.element_size() for each in tensors)
