"""Data parallelism on groups of its own, and how ranks reach each other."""

from collections.abc import Sequence
from typing import Any, Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import ReduceScatterOptions
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override


class Replica(DistributedDataParallel):
    """DDP on a group of its own that can be copied all the same.

    DDP refuses to be pickled or deep-copied with any but the default group, because a copy gets
    the default group. Where the group holds all ranks, that is the same.
    """

    @override
    def _check_default_group(self) -> None:
        if dist.get_world_size(self.process_group) != dist.get_world_size():
            super()._check_default_group()  # type: ignore[no-untyped-call]


def flush_static_graph(module: DistributedDataParallel) -> None:
    """Launch the all-reduces that DDP postpones in the first iteration of a static graph.

    DDP queues this flush on the autograd engine in its forward pass. Under manual optimisation
    gradients are prepared outside of that forward pass, so nobody would launch them.
    """
    module.reducer._delay_all_reduce()  # type: ignore[attr-defined]


def _named(newest: str, before: str) -> Any:
    """Return a function of ``torch.distributed`` whose name changed, whichever this torch has."""
    return getattr(dist, newest, None) or getattr(dist, before)


# The names until torch 2.12 still work, and warn on every rank.
all_gather_single = _named("all_gather_single", "all_gather_into_tensor")
reduce_scatter_single = _named("reduce_scatter_single", "reduce_scatter_tensor")


def device_index(device: torch.device) -> list[int] | None:
    """What DDP and ``barrier`` call ``device_ids``: an accelerator's index, None on the CPU."""
    return None if device.type == "cpu" or device.index is None else [device.index]


class HostBackend(Protocol):
    """What torch's stubs leave out of a backend."""

    def send(self, tensors: list[Tensor], dst: int, tag: int, /) -> dist.Work:
        """Send one contiguous tensor to a rank of the group."""

    def recv(self, tensors: list[Tensor], src: int, tag: int, /) -> dist.Work:
        """Receive one from a rank of the group."""

    def _allgather_base(self, output: Tensor, part: Tensor, /) -> dist.Work:
        """Gather equal parts into one tensor."""

    def _reduce_scatter_base(
        self, output: Tensor, whole: Tensor, options: ReduceScatterOptions, /
    ) -> dist.Work:
        """Reduce tensors of all ranks; give each rank its part."""


def host_backend(group: dist.ProcessGroup) -> HostBackend:
    """Return what carries a group's messages over the CPU, behind torch's dispatcher."""
    return cast("HostBackend", group._get_backend(torch.device("cpu")))


def gather_on_host(output: Tensor, part: Tensor, group: dist.ProcessGroup) -> dist.Work:
    """``all_gather_single`` over the CPU, behind torch's dispatcher; returns at once."""
    if output.is_complex():
        output, part = torch.view_as_real(output), torch.view_as_real(part)
    return host_backend(group)._allgather_base(output, part)


def reduce_scatter_on_host(
    output: Tensor,
    whole: Tensor,
    group: dist.ProcessGroup,
    operation: dist.ReduceOp | dist.ReduceOp.RedOpType,
) -> dist.Work:
    """``reduce_scatter_single`` over the CPU, behind torch's dispatcher; returns at once."""
    options = ReduceScatterOptions()
    options.reduceOp = operation  # type: ignore[assignment]
    return host_backend(group)._reduce_scatter_base(output, whole, options)


BROADCAST_BUCKET_BYTES = 250 << 20
"""How much is flattened for one broadcast, as ``DistributedDataParallel`` does."""


def broadcast_coalesced(tensors: list[Tensor], group: dist.ProcessGroup) -> None:
    """Give every rank of a group the values of its first one, in few messages. Collective."""
    dist._broadcast_coalesced(group, tensors, BROADCAST_BUCKET_BYTES, 0)  # type: ignore[attr-defined]


def sum_flags(
    flags: Sequence[bool], group: dist.ProcessGroup, device: torch.device, *, dtype: torch.dtype
) -> list[int]:
    """Return on how many ranks of a group each flag is set. Collective.

    A rank with a GPU reads the sums only if one of its own flags is not set, because reading waits
    for all queued work. Otherwise it returns 1 for each: no sum is 0.

    Args:
        flags: One for each question, in the same order on all ranks.
        group: The ranks.
        device: Device of the communication.
        dtype: Integer type of the sums.
    """
    are_set = all(flags)
    if are_set:
        sums = torch.ones(len(flags), dtype=dtype, device=device)
    else:
        sums = torch.tensor(flags, dtype=dtype, device=device)
    dist.all_reduce(sums, group=group)
    if are_set and device.type != "cpu":
        return [1] * len(flags)
    counts: list[int] = sums.tolist()
    return counts
