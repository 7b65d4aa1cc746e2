"""Data parallelism on groups of its own, and how ranks reach each other.

[Note: Ranks that torchrun starts again]
torchrun keeps one store over all attempts of a job. torch writes the same keys in each
attempt, so a rank of the second would connect to addresses of the first, which are closed.
``store_of_attempt`` prefixes all keys with a random id, one per attempt.

``TORCHELASTIC_RESTART_COUNT`` cannot be this id: over several hosts each counts its own failures.
Instead the ranks agree on an id through the store. Each writes a random number. Rank 0 answers each
with that number and the id, again whenever the number changes: so a rank can distinguish an answer
to itself from one to its predecessor. Rank 0 begins when all have written the id back.
"""

import os
import time
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from secrets import token_hex
from typing import Any, Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, ReduceScatterOptions, Store
from torch.distributed.distributed_c10d import (  # type: ignore[attr-defined]
    _abort_process_group,
    _resolve_process_group,
)
from torch.distributed.rendezvous import rendezvous
from torch.nn import Module
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override

from boltmesh.errors import RankError


class Replica(DistributedDataParallel):
    """DDP on a process group of its own, which can be copied.

    DDP refuses to be pickled or deep-copied with any but the default group, because a copy gets
    the default group. If the group holds all ranks, that is equivalent.
    """

    @override
    def _check_default_group(self) -> None:
        if dist.get_world_size(self.process_group) != dist.get_world_size():
            super()._check_default_group()  # type: ignore[no-untyped-call]

    @override
    def _distributed_broadcast_coalesced(
        self, tensors: Sequence[Tensor], buffer_size: int, authoritative_rank: int = 0
    ) -> None:
        flat = [_flat(each) for each in tensors]
        super()._distributed_broadcast_coalesced(  # type: ignore[no-untyped-call]
            flat, buffer_size, authoritative_rank
        )


def exclude_from_ddp(module: Module, names: Iterable[str]) -> None:
    """Have ``DistributedDataParallel`` neither send nor reduce some parameters of a module."""
    known = getattr(module, "_ddp_params_and_buffers_to_ignore", ())
    ignore: Any = DistributedDataParallel._set_params_and_buffers_to_ignore_for_model
    ignore(module, [*known, *names])


def flush_static_graph(module: DistributedDataParallel) -> None:
    """Launch the all-reduces that DDP postpones in the first iteration of a static graph.

    DDP queues this flush on the autograd engine in its forward pass. Under manual optimisation
    gradients are prepared outside of that forward pass, so it must be launched separately.
    """
    module.reducer._delay_all_reduce()  # type: ignore[attr-defined]


def _named(newest: str, before: str) -> Any:
    """Return a function of ``torch.distributed`` by its new or its old name."""
    return getattr(dist, newest, None) or getattr(dist, before)


# The names until torch 2.12 still work, and warn on every rank.
all_gather_single = _named("all_gather_single", "all_gather_into_tensor")
reduce_scatter_single = _named("reduce_scatter_single", "reduce_scatter_tensor")


# [Note: Collectives in compiled code]
# Dynamo rewrites `dist.all_reduce` to an operator and a copy into its argument. Until torch 2.12
# such a copy in the forward pass of an autograd.Function loses the gradient of the result without
# an error. An operator of its own is one node of the graph, whose result is a new tensor. For the
# same reason it is followed by `clone`, not by `contiguous`, which may return its argument.


def _group_named(name: str) -> dist.ProcessGroup:
    return _resolve_process_group(cast("Any", name))


@torch.library.custom_op("boltmesh::all_reduce", mutates_args=())
def compiled_all_reduce(value: Tensor, group_name: str, is_maximum: bool) -> Tensor:
    """Return sum or maximum over a group's ranks, a new tensor of equal shape. Collective."""
    total = value.clone(memory_format=torch.contiguous_format)
    operation = dist.ReduceOp.MAX if is_maximum else dist.ReduceOp.SUM
    dist.all_reduce(total, operation, group=_group_named(group_name))
    return total


@compiled_all_reduce.register_fake
def _(value: Tensor, group_name: str, is_maximum: bool) -> Tensor:
    return torch.empty_like(value, memory_format=torch.contiguous_format)


@torch.library.custom_op("boltmesh::all_gather", mutates_args=())
def compiled_all_gather(part: Tensor, group_name: str, group_size: int) -> Tensor:
    """Return the parts ``(n, ...)`` of all ranks joined, ``(ranks * n, ...)``. Collective."""
    joined = part.new_empty(group_size * part.shape[0], *part.shape[1:])
    all_gather_single(joined, part.contiguous(), group=_group_named(group_name))
    return joined


@compiled_all_gather.register_fake
def _(part: Tensor, group_name: str, group_size: int) -> Tensor:
    return part.new_empty(group_size * part.shape[0], *part.shape[1:])


@torch.library.custom_op("boltmesh::reduce_scatter", mutates_args=())
def compiled_reduce_scatter(value: Tensor, group_name: str, group_size: int) -> Tensor:
    """Return this rank's ``(n, ...)`` of the sum of values ``(ranks * n, ...)``. Collective."""
    own = value.new_empty(value.shape[0] // group_size, *value.shape[1:])
    reduce_scatter_single(own, value.contiguous(), group=_group_named(group_name))
    return own


@compiled_reduce_scatter.register_fake
def _(value: Tensor, group_name: str, group_size: int) -> Tensor:
    return value.new_empty(value.shape[0] // group_size, *value.shape[1:])


def device_index(device: torch.device) -> list[int] | None:
    """Return ``device_ids`` for DDP and ``barrier``: an accelerator's index, None on the CPU."""
    return None if device.type == "cpu" or device.index is None else [device.index]


def destroy_group(group: dist.ProcessGroup, *, is_idle: bool) -> None:
    """Destroy a temporary group; its NCCL communicator holds 0.3 to 1 GB of a GPU.

    Called by all of its ranks.

    Args:
        group: Not used by any mesh.
        is_idle: False if messages may be in flight. NCCL aborts them; gloo would wait for them, so
            its group is kept.
    """
    if is_idle:
        dist.destroy_process_group(group)
    elif dist.get_backend(group) == dist.Backend.NCCL:
        _abort_process_group(group)


class HostBackend(Protocol):
    """Methods of a backend that torch's stubs omit."""

    def send(self, tensors: list[Tensor], dst: int, tag: int, /) -> dist.Work:
        """Send one contiguous tensor to a rank of the group."""

    def recv(self, tensors: list[Tensor], src: int, tag: int, /) -> dist.Work:
        """Receive one contiguous tensor from a rank of the group."""

    def _allgather_base(self, output: Tensor, part: Tensor, /) -> dist.Work:
        """Gather parts ``(N,)`` of all ranks into ``output``, ``(ranks * N,)``."""

    def _reduce_scatter_base(
        self, output: Tensor, whole: Tensor, options: ReduceScatterOptions, /
    ) -> dist.Work:
        """Reduce ``(ranks * N,)`` of all ranks; each gets its part, ``(N,)``."""


def host_backend(group: dist.ProcessGroup) -> HostBackend:
    """Return the backend of a group's messages over the CPU, below torch's dispatcher."""
    return cast("HostBackend", group._get_backend(torch.device("cpu")))


def gather_on_host(output: Tensor, part: Tensor, group: dist.ProcessGroup) -> dist.Work:
    """Post ``all_gather_single`` over the CPU, below torch's dispatcher; returns at once.

    Args:
        output: ``(ranks * n, ...)``, contiguous.
        part: ``(n, ...)``, contiguous.
        group: The ranks.
    """
    if output.is_complex():
        output, part = torch.view_as_real(output), torch.view_as_real(part)
    return host_backend(group)._allgather_base(output, part)


def reduce_scatter_on_host(
    output: Tensor,
    whole: Tensor,
    group: dist.ProcessGroup,
    operation: dist.ReduceOp | dist.ReduceOp.RedOpType,
) -> dist.Work:
    """Post ``reduce_scatter_single`` over the CPU, below torch's dispatcher; returns at once.

    Args:
        output: ``(n, ...)``, contiguous.
        whole: ``(ranks * n, ...)``, contiguous.
        group: The ranks.
        operation: Sum or average.
    """
    options = ReduceScatterOptions()
    options.reduceOp = operation  # type: ignore[assignment]
    return host_backend(group)._reduce_scatter_base(output, whole, options)


BROADCAST_BUCKET_BYTES = 250 << 20
"""Size of one broadcast, as in ``DistributedDataParallel``."""


def broadcast_coalesced(tensors: list[Tensor], group: dist.ProcessGroup) -> None:
    """Overwrite tensors with those of the group's first rank, in few messages. Collective."""
    flat = [_flat(each) for each in tensors]
    dist._broadcast_coalesced(group, flat, BROADCAST_BUCKET_BYTES, 0)  # type: ignore[attr-defined]


def _flat(tensor: Tensor) -> Tensor:
    """Return a contiguous tensor as a vector over the same memory, others as they are.

    A broadcast of one tensor fails in torch if a dim of one element has a stride of its own, as in
    ``pe.unsqueeze(0).transpose(0, 1)``, the positions of torch's tutorial.
    """
    return tensor.view(-1) if tensor.is_contiguous() else tensor


def all_to_all(
    sent: Sequence[Sequence[Tensor]],
    received: Sequence[int],
    like: Tensor,
    group: dist.ProcessGroup,
) -> list[Tensor]:
    """Send tensors to each rank of a group; return those received from each, flat. Collective.

    Args:
        sent: Tensors for each rank, any shapes.
        received: Number of elements from each rank.
        like: A tensor with the dtype and device of all tensors.
        group: The ranks.
    """
    packed, sizes = _packed(sent, like)
    came = like.new_empty(sum(received))
    dist.all_to_all_single(came, packed, list(received), sizes, group=group)
    return list(came.split_with_sizes(list(received)))


def start_all_to_all(
    sent: Sequence[Sequence[Tensor]],
    received: Sequence[int],
    like: Tensor,
    group: dist.ProcessGroup,
) -> Callable[[], list[Tensor]]:
    """Start ``all_to_all``; returns a function that waits for what is received. Collective.

    Tensors in ``sent`` are copied: they may change at once.
    """
    packed, sizes = _packed(sent, like)
    came = like.new_empty(sum(received))
    work = dist.all_to_all_single(came, packed, list(received), sizes, group=group, async_op=True)

    def finish() -> list[Tensor]:
        work.wait()
        return list(came.split_with_sizes(list(received)))

    return finish


def _packed(sent: Sequence[Sequence[Tensor]], like: Tensor) -> tuple[Tensor, list[int]]:
    """Return tensors for each rank in one, and the number of elements for each."""
    flat = [each.reshape(-1) for tensors in sent for each in tensors]
    sizes = [sum(each.numel() for each in tensors) for tensors in sent]
    return torch.cat(flat) if flat else like.new_empty(0), sizes


def sum_flags(
    flags: Sequence[bool], group: dist.ProcessGroup, device: torch.device, *, dtype: torch.dtype
) -> list[int]:
    """Return on how many ranks of a group each flag is set, in the same order on all. Collective.

    A rank with a GPU reads the sums only if one of its own flags is not set, because reading waits
    for all queued work. Otherwise it returns 1 for each: no sum is 0.
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


POLL_S = 0.05


def store_of_attempt(rank: int, world_size: int, timeout: timedelta) -> Store | None:
    """Return the store of this attempt; None if the launcher makes a new store for each.

    Collective over all ranks.

    Raises:
        RankError: A rank did not join in time.
    """
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None
    store, _, _ = next(rendezvous("env://", rank, world_size, timeout=timeout))
    attempt = agree(PrefixStore("boltmesh-join", store), rank, world_size, timeout)
    return PrefixStore(f"boltmesh-{attempt}", store)


def agree(store: Store, rank: int, world_size: int, timeout: timedelta) -> str:
    """Return a random id that is equal on all ranks of this attempt. Collective.

    The store may hold keys of earlier attempts, so each rank brings a random number, with which the
    first rank answers it.

    Raises:
        RankError: A rank did not join in time.
    """
    until = time.monotonic() + timeout.total_seconds()
    own = token_hex(8)
    if rank == 0:
        return _lead(store, own, range(1, world_size), until)
    store.set(f"number-{rank}", own)
    key = f"answer-{rank}"
    while True:
        if store.check([key]):
            number, attempt = store.get(key).decode().split()
            if number == own:
                store.set(f"joined-{rank}", attempt)
                return attempt
        _wait(until, "rank 0")


def _lead(store: Store, attempt: str, others: range, until: float) -> str:
    numbers: dict[int, str] = {}
    missing = set(others)
    while missing:
        for rank in sorted(missing):
            if not store.check([f"number-{rank}"]):
                continue
            number = store.get(f"number-{rank}").decode()
            if numbers.get(rank) != number:
                numbers[rank] = number
                store.set(f"answer-{rank}", f"{number} {attempt}")
            if store.check([f"joined-{rank}"]) and store.get(f"joined-{rank}").decode() == attempt:
                missing.discard(rank)
        if missing:
            _wait(until, f"rank {min(missing)}")
    return attempt


def _wait(until: float, missing: str) -> None:
    if time.monotonic() > until:
        raise RankError(
            f"{missing} has not joined the others in time. See what it printed; if it only starts "
            f"slowly, give the strategy a larger timeout_s."
        )
    time.sleep(POLL_S)
