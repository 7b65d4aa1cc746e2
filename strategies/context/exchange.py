"""Communication of a context group; the backward pass of each function is its exact adjoint.

Every rank starts its backward pass from the same loss. So the sum over the ranks of a parameter's
gradients is that of as many losses, and their *mean* is the gradient of one process: for uses on
cut tensors, for uses on whole ones that every rank computes, and for both together. An all-reduce
with the identity as its backward pass would only be right if no parameters came after it.

All functions are collective over the group. Bytes that a rank sends, with ``row`` the bytes of one
position: ``fetch`` sends ``row`` for each position that another rank wants, and in the backward
pass for each that it wanted from another; ``total`` of n bytes is an all-reduce of n bytes in both
passes; ``swap_to_heads`` sends other ranks' heads of its positions, ``swap_to_positions`` its heads
of other ranks' positions.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import prod
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function
from typing_extensions import override

from boltmesh.strategies.context.positions import (
    Intervals,
    Positions,
    common,
    num_positions,
    places,
)
from boltmesh.strategies.tensor.expected_traffic import OperatorTraffic, expected_traffic
from boltmesh.strategies.tensor.runtime.collectives import TensorGroup
from boltmesh.strategies.torch_compat.autograd import linear_map
from boltmesh.strategies.torch_compat.communication import all_to_all
from boltmesh.telemetry.traffic import ExpectedTraffic


@dataclass(frozen=True)
class ContextGroup(TensorGroup):
    """The ranks that divide a sequence, and this process's rank among them."""

    sent: Counter[str] = field(default_factory=Counter)
    """Bytes that this rank sent to others, by purpose."""

    @override
    def _fix_mesh(self) -> None:
        pass  # there are no DTensors on this group

    def exchange(
        self, pieces: Sequence[Tensor], numels: Sequence[int], purpose: str
    ) -> list[Tensor]:
        """Send ``pieces[r]`` to rank r and return the tensors from each rank, flat. Collective.

        Args:
            pieces: One for each rank, any shapes, of one dtype.
            numels: Number of elements from each rank.
            purpose: Key for the count of bytes.
        """
        dtype = pieces[0].dtype
        away = (each.nbytes for rank, each in enumerate(pieces) if rank != self.rank)
        self.sent[purpose] += sum(away)
        # As bytes: backends do not send every dtype.
        flat = [each.detach().reshape(-1).contiguous().view(torch.uint8) for each in pieces]
        sizes = [numel * dtype.itemsize for numel in numels]
        got = all_to_all([[each] for each in flat], sizes, flat[0], self.process_group)
        return [each.view(dtype) for each in got]

    def on_all_ranks(
        self, device: torch.device, flags: Sequence[Tensor | bool]
    ) -> tuple[Tensor, ...]:
        """Return whether each flag is set on all ranks, as scalars on ``device``. Collective."""
        both = torch.stack([torch.as_tensor(each, device=device).to(torch.uint8) for each in flags])
        dist.all_reduce(both, dist.ReduceOp.MIN, group=self.process_group)
        return tuple(both.bool())


class SumOverRanks(Function):
    """Sums over the ranks; its gradient is summed, too.

    A pipeline reads from its node by how much a loss was divided.
    """

    @staticmethod
    @override
    def forward(ctx: Any, value: Tensor, group: ContextGroup, num_summed: int) -> Tensor:
        ctx.group, ctx.num_summed = group, num_summed
        ctx.on_all_ranks = partial(group.on_all_ranks, value.device)
        whole = value.detach().clone(memory_format=torch.contiguous_format)
        group.sent["sums"] += whole.nbytes
        dist.all_reduce(whole, group=group.process_group)
        return whole

    @staticmethod
    @override
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return total(gradient, ctx.group), None, None


def total(value: Tensor, group: ContextGroup, num_summed: int = 1) -> Tensor:
    """Return the sum over the ranks, same shape and dtype; the gradient is summed, too. Collective.

    Args:
        value: This rank's summand, any shape.
        group: The ranks.
        num_summed: Number of elements of all ranks summed in one element of the result.
    """
    result: Tensor = SumOverRanks.apply(value, group, num_summed)  # type: ignore[no-untyped-call]
    return result


@dataclass(frozen=True)
class _RowFetch:
    """Rows along a dim, the ranks that have them, and the ranks that want them."""

    dim: int
    has: tuple[Intervals, ...]
    wants: tuple[Intervals, ...]
    group: ContextGroup
    purpose: str

    def run(self, local: Tensor) -> Tensor:
        """Return the rows that this rank wants, ``(..., wanted, ...)`` along ``dim``. Collective.

        Several ranks may want the same row.

        Args:
            local: The rows that this rank has, ``(..., own rows, ...)``.
        """
        rows = local.movedim(self.dim, 0)
        received = dict(self._received(rows, self.has, self.wants, self.purpose))
        found = [received[start] for start in sorted(received)]
        made = torch.cat(found) if found else rows.new_empty(0, *rows.shape[1:])
        return made.movedim(0, self.dim).contiguous()

    def add_back(self, gradient: Tensor) -> Tensor:
        """Return the summed gradients of this rank's rows, the adjoint of ``run``. Collective.

        Args:
            gradient: Gradient of the result of ``run``, in its shape.
        """
        rows = gradient.movedim(self.dim, 0)
        made = rows.new_zeros(num_positions(self.has[self.group.rank]), *rows.shape[1:])
        purpose = f"{self.purpose} (backward)"
        for start, part in self._received(rows, self.wants, self.has, purpose):
            made.narrow(0, start, len(part)).add_(part)
        return made.movedim(0, self.dim).contiguous()

    def _received(
        self,
        rows: Tensor,
        has: Sequence[Intervals],
        wants: Sequence[Intervals],
        purpose: str,
    ) -> Iterator[tuple[int, Tensor]]:
        """Send rows to the ranks that want them; yield what comes, with its place. Collective."""
        me, ranks = self.group.rank, range(self.group.size)
        send = [_taken(rows, places(common(has[me], wants[r]), has[me])) for r in ranks]
        come = [common(has[r], wants[me]) for r in ranks]
        numels = [num_positions(each) * rows.shape[1:].numel() for each in come]
        for intervals, got in zip(come, self.group.exchange(send, numels, purpose), strict=True):
            pieces = got.view(num_positions(intervals), *rows.shape[1:])
            counts = [stop - start for start, stop in intervals]
            starts = [start for start, _ in places(intervals, wants[me])]
            yield from zip(starts, pieces.split_with_sizes(counts), strict=True)


def _taken(rows: Tensor, intervals: Intervals) -> Tensor:
    parts = [rows.narrow(0, start, stop - start) for start, stop in intervals]
    return torch.cat(parts) if parts else rows.narrow(0, 0, 0)


def fetch(
    local: Tensor,
    dim: int,
    positions: Positions,
    wants: Sequence[Intervals],
    group: ContextGroup,
    purpose: str,
) -> Tensor:
    """Return the positions that this rank wants, from the ranks that have them. Collective.

    A gather if every rank wants all, a halo if it wants its neighbour's, another division, or one
    row. The gradient of a position is summed over the ranks that wanted it, at its owner.

    Args:
        local: This rank's positions along ``dim``, ``(..., s, ...)``.
        dim: The dim.
        positions: The positions of each rank.
        wants: Wanted positions by rank, ascending.
        group: The ranks.
        purpose: Key for the count of bytes.

    Returns:
        The wanted positions along ``dim``, ascending; same dtype.
    """
    rows = _RowFetch(dim, positions.parts, tuple(wants), group, purpose)
    return _fetched(local, rows)


def _fetched(local: Tensor, rows: _RowFetch) -> Tensor:
    return linear_map(local, rows.run, lambda gradient: _added_back(gradient, rows))


def _added_back(gradient: Tensor, rows: _RowFetch) -> Tensor:
    return linear_map(gradient, rows.add_back, lambda value: _fetched(value, rows))


@dataclass(frozen=True)
class _HeadSwap:
    """Positions of each rank, and the heads that it gets of all positions."""

    positions: Positions
    heads: tuple[tuple[int, ...], ...]
    """By rank; several ranks may get the same head."""
    num_heads: int
    group: ContextGroup
    purpose: str

    def to_heads(self, local: Tensor) -> Tensor:
        """Convert ``(B, H, s, D)`` to all positions of own heads, ``(B, own heads, S, D)``."""
        batch, _, _, channels = local.shape
        ranks = range(self.group.size)
        own = len(self.heads[self.group.rank])
        send = [local[:, list(self.heads[r])] for r in ranks]
        counts = [self.positions.count(r) for r in ranks]
        got = self.group.exchange(
            send, [batch * own * count * channels for count in counts], self.purpose
        )
        made = local.new_empty(batch, own, self.positions.length, channels)
        for r, each in enumerate(got):
            part, at = each.view(batch, own, counts[r], channels), 0
            for start, stop in self.positions.parts[r]:
                made[:, :, start:stop] = part[:, :, at : at + stop - start]
                at += stop - start
        return made

    def to_positions(self, whole: Tensor) -> Tensor:
        """Convert ``(B, own heads, S, D)`` to ``(B, H, s, D)``; equal heads of ranks are summed."""
        batch, _, _, channels = whole.shape
        ranks = range(self.group.size)
        mine = self.positions.count(self.group.rank)
        send = [
            torch.cat([whole[:, :, start:stop] for start, stop in parts] or [whole[:, :, :0]], 2)
            for parts in self.positions.parts
        ]
        numels = [batch * len(self.heads[r]) * mine * channels for r in ranks]
        got = self.group.exchange(send, numels, self.purpose)
        made = whole.new_zeros(batch, self.num_heads, mine, channels)
        for r, each in enumerate(got):
            part = each.view(batch, len(self.heads[r]), mine, channels)
            for at, head in enumerate(self.heads[r]):
                made[:, head] += part[:, at]
        return made


def swap_to_heads(
    local: Tensor,
    positions: Positions,
    heads: Sequence[Sequence[int]],
    group: ContextGroup,
    purpose: str,
) -> Tensor:
    """Exchange all heads of this rank's positions for some heads of all positions. Collective.

    Args:
        local: ``(B, H, s, D)``.
        positions: The positions of each rank.
        heads: The heads that each rank gets.
        group: The ranks.
        purpose: Key for the count of bytes.

    Returns:
        ``(B, own heads, S, D)``, same dtype.
    """
    swap = _HeadSwap(positions, tuple(map(tuple, heads)), local.shape[1], group, purpose)
    return _to_heads(local, swap)


def swap_to_positions(
    whole: Tensor,
    positions: Positions,
    heads: Sequence[Sequence[int]],
    group: ContextGroup,
    purpose: str,
) -> Tensor:
    """Return all heads of this rank's positions, ``(B, H, s, D)``: reverses ``swap_to_heads``.

    Collective. Arguments are those of ``swap_to_heads``, with its result in place of ``local``.
    """
    num_heads = sum(map(len, heads))
    swap = _HeadSwap(positions, tuple(map(tuple, heads)), num_heads, group, purpose)
    return _to_positions(whole, swap)


def _to_heads(local: Tensor, swap: _HeadSwap) -> Tensor:
    return linear_map(local, swap.to_heads, lambda gradient: _to_positions(gradient, swap))


def _to_positions(whole: Tensor, swap: _HeadSwap) -> Tensor:
    return linear_map(whole, swap.to_positions, lambda gradient: _to_heads(gradient, swap))


def send_around(tensor: Tensor, shape: Sequence[int], group: ContextGroup, purpose: str) -> Tensor:
    """Send a tensor to the next rank; return the previous rank's, of ``shape``. No autograd."""
    following, previous = (group.rank + 1) % group.size, (group.rank - 1) % group.size
    pieces = [tensor if r == following else tensor.new_empty(0) for r in range(group.size)]
    numels = [prod(shape) if r == previous else 0 for r in range(group.size)]
    return group.exchange(pieces, numels, purpose)[previous].view(*shape)


_WHY = {
    "allreduce": "sums over the sequence and their gradients, digests of batches",
    "alltoall_base": "keys of attention and gathered positions, and their gradients",
}


def expected_context_traffic(
    counted: Mapping[str, OperatorTraffic], *, size: int, accumulated: int
) -> list[ExpectedTraffic]:
    """Return the collectives of one optimizer step on one rank.

    Args:
        counted: Traffic of one batch by operator; batches of other lengths move other bytes.
        size: Ranks of the context group.
        accumulated: Batches per optimizer step.
    """
    every = expected_traffic(
        counted, size=size, accumulated=accumulated, num_norms=0, agrees_on_overflow=False
    )
    return [
        msgspec.structs.replace(
            each, axis="context", why=_WHY.get(each.operator, "positions of the sequence")
        )
        for each in every
    ]
