"""Sends rows to the ranks that have their experts, and returns the results.

``ExpertExchange.run`` is a forward pass of one layer's experts. Each rank has different tokens, and
chooses experts for them that may be on other ranks:

1. ``RoutePlan``: numbers of rows and choices for each rank. They are exchanged first, and the host
   reads them once, on a separate stream; nothing else waits.
2. ``_Dispatch``: a row goes to a rank once, however many of its experts are there, with the numbers
   and weights of all of its choices. The backward pass returns the gradients of rows and weights.
3. On that rank every choice of a local expert becomes a row, with its weight.
4. ``RoutePlan.bring_back``: the sum of each row's results is sent back, and added to those of other
   ranks.

[Note: Each rank takes part in each exchange]
The exchanges of the backward pass are collectives as well, so a rank that received no row has to be
in the graph like any other. Rows and weights are one node, which sends zeros for missing gradients,
and ``_Unused`` connects unused tensors: gradients of unused weights are zeros, as in one process
with a stacked parameter.

Source: GShard, Lepikhin et al. 2020, https://arxiv.org/abs/2006.16668
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn.functional import pad
from typing_extensions import override

from boltmesh.strategies.object_collectives import noop
from boltmesh.strategies.torch_compat.autograd import linear_map
from boltmesh.strategies.torch_compat.communication import all_gather_single

Compute = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Takes rows ``(N, E)``, a local expert for each ``(N,)`` and its weight ``(N,)``; returns results
``(N, output width)``."""


@dataclass(frozen=True)
class RoutePlan:
    """Numbers of rows in one exchange, by rank of the group."""

    group: ProcessGroup
    sent_rows: list[int]
    """Rows sent to each rank."""
    received_rows: list[int]
    """Rows received from each rank."""

    @classmethod
    def even(cls, group: ProcessGroup, count: int) -> "RoutePlan":
        """Return the plan by which each rank sends ``count`` rows to each."""
        return cls(group, *([[count] * group.size()] * 2))

    def swap(self, tensor: Tensor, sent: list[int], received: list[int]) -> Tensor:
        """Send parts of a tensor along its first dim; return the received rows. Collective.

        Args:
            tensor: Shape ``(sum(sent), *)``; the other dims are equal on all ranks.
            sent: Rows for each rank.
            received: Rows from each rank.

        Returns:
            Shape ``(sum(received), *)``.
        """
        came = tensor.new_empty((sum(received), *tensor.shape[1:]))
        dist.all_to_all_single(came, tensor.contiguous(), received, sent, group=self.group)
        return came

    def swap_together(
        self, tensors: Sequence[Tensor], sent: list[int], received: list[int]
    ) -> list[Tensor]:
        """Run ``swap`` for several tensors ``(sum(sent), width)`` in one message. Collective."""
        if len(tensors) == 1:
            return [self.swap(tensors[0], sent, received)]
        parts = [each.contiguous().view(torch.uint8) for each in tensors]
        came = self.swap(torch.cat(parts, 1), sent, received)
        split = came.split_with_sizes([each.shape[1] for each in parts], 1)
        return [
            part.clone(memory_format=torch.contiguous_format).view(each.dtype)
            for part, each in zip(split, tensors, strict=True)
        ]

    def bring_back(self, results: Tensor) -> Tensor:
        """Send results to the source ranks of their rows. Collective, and so is its backward pass.

        Args:
            results: Shape ``(received rows, width)``.

        Returns:
            Shape ``(sent rows, width)``.
        """
        return linear_map(
            results,
            lambda results: self.swap(results, self.received_rows, self.sent_rows),
            lambda gradient: self.swap(gradient, self.sent_rows, self.received_rows),
        )


class _Dispatch(torch.autograd.Function):
    """Sends rows with weights and numbers, see [Note: Each rank takes part in each exchange]."""

    @staticmethod
    @override
    def forward(
        ctx: Any, plan: RoutePlan, rows: Tensor, weights: Tensor, *numbers: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.plan, ctx.num_inputs = plan, 3 + len(numbers)
        sent = rows, weights, *numbers
        came = plan.swap_together(sent, plan.sent_rows, plan.received_rows)
        ctx.mark_non_differentiable(*came[2:])
        return tuple(came)

    @staticmethod
    @override
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        plan: RoutePlan = ctx.plan
        back: list[Tensor | None] = [None] * ctx.num_inputs
        needed = [place for place in (1, 2) if ctx.needs_input_grad[place]]
        if needed:
            given = [gradients[place - 1] for place in needed]
            came = plan.swap_together(given, plan.received_rows, plan.sent_rows)
            for place, each in zip(needed, came, strict=True):
                back[place] = each
        return tuple(back)


class _Unused(torch.autograd.Function):
    """Returns the first tensor unchanged; the others get gradients of zero."""

    @staticmethod
    @override
    def forward(ctx: Any, result: Tensor, *unused: Tensor) -> Tensor:
        ctx.save_for_backward(*unused)
        return result.view_as(result)

    @staticmethod
    @override
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, ...]:
        return gradients[0], *(torch.zeros_like(each) for each in ctx.saved_tensors)


class EqualRows:
    """Divides rows that are equal on all ranks of a group, such as a tensor group.

    Each rank sends its part of them, and the results of all parts are gathered. So the ranks of the
    group do the work of one rank together, and gradients count every row once.

    Args:
        group: The ranks.
    """

    def __init__(self, group: ProcessGroup) -> None:
        self.group = group

    def part(self, whole: Tensor) -> Tensor:
        """Return this rank's part along the first dim. The backward pass is collective.

        Args:
            whole: Shape ``(N, *)``, equal on all ranks.

        Returns:
            Shape ``(n, *)`` with ``n`` at most ``most(N)``.
        """
        count = whole.shape[0]
        return linear_map(
            whole,
            lambda whole: self.cut(whole).clone(),
            lambda gradient: self.joined(gradient, count),
        )

    def whole(self, part: Tensor, count: int) -> Tensor:
        """Return all rows, shape ``(count, *)``, from this rank's part. Collective."""
        return linear_map(part, lambda part: self.joined(part, count), self.cut)

    def most(self, count: int) -> int:
        """Return the number of rows of a part; the last parts may have fewer."""
        return -(-count // self.group.size())

    def cut(self, whole: Tensor) -> Tensor:
        """Return a view of this rank's part of a tensor ``(N, *)``."""
        most = self.most(whole.shape[0])
        return whole[self.group.rank() * most : (self.group.rank() + 1) * most]

    def joined(self, part: Tensor, count: int) -> Tensor:
        """Return all rows, shape ``(count, *)``, without a gradient. Collective."""
        most = self.most(count)
        padded = part.new_zeros((most, *part.shape[1:]))
        padded[: part.shape[0]] = part
        came = part.new_empty((most * self.group.size(), *part.shape[1:]))
        all_gather_single(came, padded, group=self.group)
        return came[:count]


def with_unused(result: Tensor, unused: Iterable[Tensor]) -> Tensor:
    """Return the result with further tensors in its graph, which get gradients of zero.

    Args:
        result: Tensor of any shape.
        unused: Tensors of any shapes that it was not computed from.
    """
    connected: Tensor = _Unused.apply(result, *unused)  # type: ignore[no-untyped-call]
    return connected


class ExpertExchange:
    """The exchanges of one module's experts.

    Args:
        num_experts: Experts of all ranks of the group, divided equally and in order.
        group: The ranks that have all experts together.
    """

    def __init__(self, num_experts: int, group: ProcessGroup) -> None:
        self.num_experts, self.group = num_experts, group
        self.num_local = num_experts // group.size()
        self.capacity: int | None = None
        """Most rows that this rank sends to an expert in training; None for no limit."""
        self.drop: Callable[[Tensor], None] = noop
        """Called with the number of dropped choices, shape ``()``, on the device."""

    def run(self, rows: Tensor, experts: Tensor, weights: Tensor, compute: Compute) -> Tensor:
        """Return the sum over the chosen experts' results for each row. Collective over the group.

        Args:
            rows: Shape ``(N, E)``; N differs between ranks and may be 0.
            experts: Numbers of experts, shape ``(N, K)``, int64.
            weights: Shape ``(N, K)``; K may differ between ranks.
            compute: Runs the experts of this rank; also called without rows.

        Returns:
            Shape ``(N, output width)``.
        """
        size, (num_rows, num_choices) = self.group.size(), experts.shape
        owner = experts // self.num_local
        wanted = torch.zeros(num_rows, size, dtype=torch.bool, device=experts.device)
        wanted.scatter_(1, owner, True)
        flat = owner.reshape(-1)
        choices = flat.new_zeros(size).scatter_add_(0, flat, torch.ones_like(flat))
        width = torch.full_like(choices, num_choices)
        sizes = self._exchange_sizes(torch.stack((wanted.sum(0), choices, width), 1))
        is_sent = wanted.T.reshape(-1)  # the first rank's rows come first
        (sent_rows, _, _), (received_rows, received_choices, widths) = sizes()
        plan = RoutePlan(self.group, sent_rows, received_rows)
        row = _true_places(is_sent, sum(sent_rows)) % max(1, num_rows)
        more = (0, max(widths) - num_choices)
        came, weight, number = _Dispatch.apply(  # type: ignore[no-untyped-call]
            plan,
            rows.index_select(0, row),
            pad(weights.index_select(0, row), more),
            pad(experts.index_select(0, row).int(), more, value=-1),
        )
        local = number.reshape(-1) - self.group.rank() * self.num_local
        is_here = (local >= 0) & (local < self.num_local)
        chosen = _true_places(is_here, sum(received_choices))
        place = chosen // max(widths)
        results = compute(
            came.index_select(0, place),
            local.index_select(0, chosen).long(),
            weight.reshape(-1).index_select(0, chosen),
        )
        if not came.shape[0]:
            results = with_unused(results, (came, weight))
        sums = results.new_zeros((came.shape[0], *results.shape[1:])).index_add_(0, place, results)
        back = plan.bring_back(sums)
        return back.new_zeros((num_rows, *back.shape[1:])).index_add_(0, row, back)

    def run_in_places(
        self, rows: Tensor, experts: Tensor, weights: Tensor, compute: Compute
    ) -> Tensor:
        """Run the first ``capacity`` choices of each expert only; arguments as for ``run``.

        All sizes are known in advance, so nothing waits for the device. Empty places are sent as
        zeros, and their results are ignored. Collective over the group.
        """
        assert self.capacity is not None
        places, num_choices = self.capacity * self.num_experts, experts.shape[-1]
        flat = experts.reshape(-1)
        order = flat.argsort(stable=True)
        counts = flat.new_zeros(self.num_experts).scatter_add_(0, flat, torch.ones_like(flat))
        rank_in_all = torch.arange(len(flat), device=flat.device)
        first = counts.cumsum(0) - counts
        rank = torch.empty_like(flat).scatter_(0, order, rank_in_all - first[flat[order]])
        is_kept = rank < self.capacity
        place = torch.where(is_kept, flat * self.capacity + rank, places)
        self.drop((~is_kept).sum())
        # Empty places send zeros from several rows: gradients of one row would be added serially.
        row = len(rows) + torch.arange(places + 1, device=flat.device) % self.capacity
        row.scatter_(0, place, rank_in_all // num_choices)
        zeros = rows.new_zeros((self.capacity, rows.shape[1]))
        given = torch.cat((rows, zeros)).index_select(0, row[:-1])
        weight = weights.new_zeros(places + 1).scatter(0, place, weights.reshape(-1))
        plan = RoutePlan.even(self.group, self.capacity * self.num_local)
        came, weight = _Dispatch.apply(plan, given, weight[:-1, None])  # type: ignore[no-untyped-call]
        local = torch.arange(self.num_local, device=flat.device)
        local = local.repeat_interleave(self.capacity).repeat(self.group.size())
        back = plan.bring_back(compute(came, local, weight[:, 0]))
        results = torch.cat((back, back.new_zeros((1, back.shape[1])))).index_select(0, place)
        return results.view(len(rows), num_choices, back.shape[1]).sum(1)

    def _exchange_sizes(self, sent: Tensor) -> Callable[[], Any]:
        """Exchange numbers for each rank. Collective.

        Args:
            sent: Numbers by rank, shape ``(R, numbers)``.

        Returns:
            A function that waits on the host and returns the sent and the received numbers, as
            lists ``[2][numbers][R]``.
        """
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=self.group)
        return _read_later(torch.stack((sent, received)).transpose(1, 2).contiguous())


def _true_places(flags: Tensor, count: int) -> Tensor:
    """Return the indices of true flags, shape ``(count,)``, int64.

    Args:
        flags: Booleans, shape ``(N,)``.
        count: Number of true flags; counting them would wait for the device.
    """
    place = torch.where(flags, flags.cumsum(0) - 1, count)
    numbers = torch.arange(len(flags), device=flags.device)
    return numbers.new_empty(count + 1).scatter_(0, place, numbers)[:count]


def _read_later(numbers: Tensor) -> Callable[[], Any]:
    """Copy numbers to the host asynchronously; return a function that waits for them."""
    device = numbers.device
    if device.type == "cpu":
        return numbers.tolist
    stream = _STREAMS.setdefault(device, torch.Stream(device))
    stream.wait_stream(torch.accelerator.current_stream(device))
    with stream:
        host = torch.empty_like(numbers, device="cpu", pin_memory=True)
        host.copy_(numbers, non_blocking=True)
        event = stream.record_event()
    numbers.record_stream(stream)

    def wait() -> Any:
        event.synchronize()
        return host.tolist()

    return wait


_STREAMS: dict[torch.device, torch.Stream] = {}
"""Streams for copies of sizes, by device."""
