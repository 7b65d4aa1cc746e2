"""Sends rows to the ranks that have their experts, and brings the results back.

``ExpertExchange.run`` is a forward pass of one layer's experts. Each rank has tokens of its own,
and chooses experts for them that may be on other ranks:

1. ``RoutePlan``: how many rows and choices go to each rank. The numbers are exchanged first, and
   read by the host once, on a stream beside that of the computation; nothing else waits.
2. ``_Dispatch``: a row goes to a rank once, however many of its experts are there; the row, the
   expert and the weight of each choice follow in one message. In the backward pass the gradients
   of rows and weights come back.
3. There every choice becomes a row, with one local expert and its weight.
4. ``_Return``: the sum of each row's results goes back, and is added to those of other ranks.

[Note: Each rank takes part in each exchange]
The exchanges of the backward pass are collectives as well, so a rank to which no row was sent has
to be in the graph like any other. Rows and weights are one node, which sends zeros where there is
no gradient, and ``_Unused`` connects what was not computed with: zeros as gradients of unused
weights, as one process has for a stacked parameter.

Source: GShard, Lepikhin et al. 2020, https://arxiv.org/abs/2006.16668
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from typing_extensions import override

from boltmesh.strategies.torch_compat.communication import all_gather_single

Compute = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Returns ``[P, H]`` for rows ``[P, H]``, one local expert each ``[P]`` and its weight ``[P]``."""


@dataclass(frozen=True)
class RoutePlan:
    """Numbers of rows and choices in one exchange. Ranks are those of the group, in its order."""

    group: ProcessGroup
    sent_rows: list[int]
    """Rows to each rank."""
    received_rows: list[int]
    sent_choices: list[int]
    """Choices whose expert is on each rank; at least as many as rows."""
    received_choices: list[int]

    @classmethod
    def even(cls, group: ProcessGroup, count: int) -> "RoutePlan":
        """Return the plan by which each rank sends as many rows to each, one for each choice."""
        return cls(group, *([[count] * group.size()] * 4))

    def swap(self, tensor: Tensor, sent: list[int], received: list[int]) -> Tensor:
        """Send parts of a tensor along its first dim; return what came. Collective."""
        came = tensor.new_empty((sum(received), *tensor.shape[1:]))
        dist.all_to_all_single(came, tensor.contiguous(), received, sent, group=self.group)
        return came


class _Dispatch(torch.autograd.Function):
    """Rows and weights to the owners, see [Note: Each rank takes part in each exchange]."""

    @staticmethod
    @override
    def forward(
        ctx: Any, rows: Tensor, weights: Tensor, numbers: Tensor, plan: RoutePlan
    ) -> tuple[Tensor, Tensor, Tensor]:
        ctx.plan = plan
        came = plan.swap(rows, plan.sent_rows, plan.received_rows)
        both = torch.cat((numbers.view(torch.uint8), weights[:, None].view(torch.uint8)), 1)
        both = plan.swap(both, plan.sent_choices, plan.received_choices)
        num_bytes = numbers.shape[1] * numbers.itemsize
        numbers = both[:, :num_bytes].contiguous().view(numbers.dtype)
        ctx.mark_non_differentiable(numbers)
        return came, both[:, num_bytes:].contiguous().view(weights.dtype)[:, 0], numbers

    @staticmethod
    @override
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        plan: RoutePlan = ctx.plan
        rows = weights = None
        if ctx.needs_input_grad[0]:
            rows = plan.swap(gradients[0], plan.received_rows, plan.sent_rows)
        if ctx.needs_input_grad[1]:
            weights = plan.swap(gradients[1], plan.received_choices, plan.sent_choices)
        return rows, weights, None, None


class _Return(torch.autograd.Function):
    """Results to the ranks that the rows are from."""

    @staticmethod
    @override
    def forward(ctx: Any, results: Tensor, plan: RoutePlan) -> Tensor:
        ctx.plan = plan
        return plan.swap(results, plan.received_rows, plan.sent_rows)

    @staticmethod
    @override
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        plan: RoutePlan = ctx.plan
        return plan.swap(gradients[0], plan.sent_rows, plan.received_rows), None


class _Unused(torch.autograd.Function):
    """The first tensor as it is; the others get gradients of zero."""

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
    """Rows that all ranks of a group have in common, such as those of a tensor group.

    Each rank sends its part of them, and the results of all parts are put together. So the ranks
    of the group do the work of one rank together, and gradients count every row once.

    Args:
        group: The ranks.
    """

    def __init__(self, group: ProcessGroup) -> None:
        self.group = group

    def part(self, whole: Tensor) -> Tensor:
        """Return this rank's part along the first dim. The backward pass is collective."""
        part: Tensor = _TakePart.apply(whole, self)  # type: ignore[no-untyped-call]
        return part

    def whole(self, part: Tensor, count: int) -> Tensor:
        """Return all rows, given this rank's part and their number. Collective."""
        whole: Tensor = _JoinParts.apply(part, self, count)  # type: ignore[no-untyped-call]
        return whole

    def most(self, count: int) -> int:
        """Return the rows of a part; the last ones may have fewer."""
        return -(-count // self.group.size())

    def cut(self, whole: Tensor) -> Tensor:
        """Return a view of this rank's part."""
        most = self.most(whole.shape[0])
        return whole[self.group.rank() * most : (self.group.rank() + 1) * most]

    def joined(self, part: Tensor, count: int) -> Tensor:
        """Return all rows, without a gradient. Collective."""
        most = self.most(count)
        padded = part.new_zeros((most, *part.shape[1:]))
        padded[: part.shape[0]] = part
        came = part.new_empty((most * self.group.size(), *part.shape[1:]))
        all_gather_single(came, padded, group=self.group)
        return came[:count]


class _TakePart(torch.autograd.Function):
    @staticmethod
    @override
    def forward(ctx: Any, whole: Tensor, rows: EqualRows) -> Tensor:
        ctx.rows, ctx.count = rows, whole.shape[0]
        return rows.cut(whole).clone()

    @staticmethod
    @override
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return ctx.rows.joined(gradients[0], ctx.count), None


class _JoinParts(torch.autograd.Function):
    @staticmethod
    @override
    def forward(ctx: Any, part: Tensor, rows: EqualRows, count: int) -> Tensor:
        ctx.rows = rows
        return rows.joined(part, count)

    @staticmethod
    @override
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return ctx.rows.cut(gradients[0]), None, None


def with_unused(result: Tensor, unused: Iterable[Tensor]) -> Tensor:
    """Return the result, on which tensors that it was not computed with depend from now on."""
    connected: Tensor = _Unused.apply(result, *unused)  # type: ignore[no-untyped-call]
    return connected


class ExpertExchange:
    """The exchanges of one module's experts.

    Args:
        name: The module, for messages.
        num_experts: Experts of all ranks of the group; each has as many as any other, in order.
        group: The ranks that have all experts together.
    """

    def __init__(self, name: str, num_experts: int, group: ProcessGroup) -> None:
        self.name, self.num_experts, self.group = name, num_experts, group
        self.num_local = num_experts // group.size()
        self.capacity: int | None = None
        """Rows that this rank may send to an expert in training; None: all, sizes are exchanged."""
        self.drop: Callable[[Tensor], None] = _drop_uncounted
        """Called with the number of choices that found no place, still on the device."""
        self.note: Callable[[str], None] = _nothing
        """Called before each exchange with what this rank is about to do."""

    def run(self, rows: Tensor, experts: Tensor, weights: Tensor, compute: Compute) -> Tensor:
        """Return the sums of what the experts of each row give. Collective over the group.

        Args:
            rows: ``[T, H]``; another T on each rank, or 0.
            experts: ``[T, k]``, numbers of experts.
            weights: ``[T, k]``.
            compute: Runs the experts of this rank; also called where no row came.
        """
        self.note(f"exchanged the rows of {self.name!r}")
        size, num_rows = self.group.size(), rows.shape[0]
        owner = experts // self.num_local
        flat = owner.reshape(-1)
        wanted = torch.zeros(num_rows, size, dtype=torch.bool, device=experts.device)
        wanted.scatter_(1, owner, True)
        choices = flat.new_zeros(size).scatter_add_(0, flat, torch.ones_like(flat))
        received, sizes = self._exchange_sizes(torch.stack((wanted.sum(0), choices), 1))
        # Which of the rows that go to its owner is a choice's.
        place = (wanted.cumsum(0).gather(1, owner) - 1).reshape(-1)
        in_order = flat.argsort(stable=True)
        numbers = torch.stack((place, experts.reshape(-1) % self.num_local), 1)[in_order].int()
        (sent_rows, sent_choices), (received_rows, received_choices) = sizes()
        plan = RoutePlan(self.group, sent_rows, received_rows, sent_choices, received_choices)
        row = _rows_in_order(wanted, sum(sent_rows))
        came, weight, numbers = _Dispatch.apply(  # type: ignore[no-untyped-call]
            rows[row], weights.reshape(-1)[in_order], numbers, plan
        )
        place, local = numbers.long().unbind(1)
        first = received[:, 0].cumsum(0) - received[:, 0]
        place = place + first.repeat_interleave(received[:, 1], output_size=sum(received_choices))
        results = compute(came[place], local, weight)
        if not came.shape[0]:
            results = with_unused(results, (came, weight))
        sums = results.new_zeros((came.shape[0], *results.shape[1:])).index_add(0, place, results)
        back: Tensor = _Return.apply(sums, plan)  # type: ignore[no-untyped-call]
        return back.new_zeros((num_rows, *back.shape[1:])).index_add(0, row, back)

    def run_in_places(
        self, rows: Tensor, experts: Tensor, weights: Tensor, compute: Compute
    ) -> Tensor:
        """Return what ``run`` does, of the first ``capacity`` choices of each expert.

        All sizes are known before, so nothing waits for the device. Places that stay empty are
        sent as zeros, and what comes back of them is not looked at. Collective over the group.
        """
        assert self.capacity is not None
        self.note(f"exchanged the rows of {self.name!r}")
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
        row = rank_in_all // num_choices
        given = rows.new_zeros((places + 1, rows.shape[1])).index_copy(0, place, rows[row])
        weight = weights.new_zeros(places + 1).index_copy(0, place, weights.reshape(-1))
        plan = RoutePlan.even(self.group, self.capacity * self.num_local)
        nothing = torch.empty((places, 0), dtype=torch.int32, device=flat.device)
        came, weight, _ = _Dispatch.apply(given[:-1], weight[:-1], nothing, plan)  # type: ignore[no-untyped-call]
        local = torch.arange(self.num_local, device=flat.device)
        local = local.repeat_interleave(self.capacity).repeat(self.group.size())
        back: Tensor = _Return.apply(compute(came, local, weight), plan)  # type: ignore[no-untyped-call]
        results = torch.cat((back, back.new_zeros((1, back.shape[1]))))[place]
        return results.view(len(rows), num_choices, back.shape[1]).sum(1)

    def _exchange_sizes(self, sent: Tensor) -> tuple[Tensor, Callable[[], Any]]:
        """Exchange how many rows and choices go to each rank. Collective.

        Args:
            sent: ``[n, 2]``.

        Returns:
            What came, ``[n, 2]``, and what waits for both on the host: ``[2][2][n]``.
        """
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=self.group)
        return received, _read_later(torch.stack((sent, received)).transpose(1, 2).contiguous())


def _rows_in_order(wanted: Tensor, count: int) -> Tensor:
    """Return the rows that go to the first rank, to the second and so on.

    Args:
        wanted: ``[T, n]``, which rank a row goes to.
        count: How often that is true; asking would wait for the device.
    """
    num_rows, size = wanted.shape
    flat = wanted.T.reshape(-1)
    place = torch.where(flat, flat.cumsum(0) - 1, count)
    rows = torch.arange(num_rows, device=wanted.device).repeat(size)
    return rows.new_empty(count + 1).scatter_(0, place, rows)[:count]


def _read_later(numbers: Tensor) -> Callable[[], Any]:
    """Copy numbers to the host beside the work that follows; return what waits for them."""
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
"""By device, for copies of sizes."""


def _drop_uncounted(_: Tensor) -> None:
    """Count nothing."""


def _nothing(_: str) -> None:
    """Ignore a note."""
