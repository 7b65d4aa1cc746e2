"""Steps of optimizers that need whole matrices, such as Muon, where ranks hold shards.

[Note: Whole parameters at one owner]
Each parameter has one owner among the ranks that share it. For a step, every rank sends its shards
of gradients and parameters to their owners in one all-to-all; the owner runs the author's optimizer
on the whole parameters that it owns, and a second all-to-all brings the shards back. State stays
whole, at the owner. The owners are chosen once, the most expensive parameter first, each for the
rank with the least to do: no matrix is stepped twice.

A rank sends two times its shards and receives its shards back; beside them it holds gradient and
value of what it owns during the step.

Source: Liu et al. 2025, Muon is Scalable for LLM Training, https://arxiv.org/abs/2502.16982,
section 2.3
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor
from torch.nn import Parameter
from torch.optim import Optimizer

from boltmesh.strategies.checkpoint.chunks import DimDivision
from boltmesh.strategies.torch_compat.optimizers import patch_optimizer, step_without_hooks
from boltmesh.strategies.torch_compat.tensors import local_tensor
from boltmesh.telemetry.traffic import ExpectedTraffic

STAND_IN_SIZE = 2

_Type = tuple[torch.dtype, torch.device]


class JoinedPart(Protocol):
    """Joins a parameter of which each rank of a group holds a part in a plain tensor."""

    @property
    def division(self) -> DimDivision:
        """This rank's part of the full tensor."""

    def join(self, part: Tensor) -> Tensor:
        """Return the full tensor. Collective."""

    def cut(self, whole: Tensor) -> Tensor:
        """Return this rank's part."""


class ShardExchange:
    """Moves parameters that are shards by rows, between their ranks and their owners.

    Args:
        group: Ranks that hold the shards of one copy of the model.
    """

    operator = "alltoall_base"

    def __init__(self, group: ProcessGroup) -> None:
        self.group = group
        self._rank, self._size = group.rank(), group.size()

    def is_shared(self, parameter: Tensor) -> bool:
        """Whether a parameter is in shards that can be moved."""
        return isinstance(parameter, DTensor) and parameter.placements[-1].is_shard(0)

    def gather(self, owned: Sequence[Sequence[Parameter]]) -> list[tuple[Tensor, Tensor]]:
        """Return whole values and gradients of what this rank owns. Collective over the group.

        Args:
            owned: What each rank owns, of those that are trained.
        """
        mine = owned[self._rank]
        found: dict[int, tuple[Tensor, Tensor]] = {}
        for like in _types(owned):
            own = _of_type(mine, like)
            sent = [
                [piece for each in _of_type(some, like) for piece in _local_pair(each)]
                for some in owned
            ]
            sizes = [[self._numel(each, rank) for each in own] for rank in range(self._size)]
            received = self._exchange(sent, [2 * sum(each) for each in sizes], like)
            pieces = [
                torch.split(flat, [size for size in some for _ in range(2)])
                for flat, some in zip(received, sizes, strict=True)
            ]
            for number, each in enumerate(own):
                value = torch.cat([some[2 * number] for some in pieces])
                grad = torch.cat([some[2 * number + 1] for some in pieces])
                found[id(each)] = value.view(each.shape), grad.view(each.shape)
        return [found[id(each)] for each in mine]

    def give_back(self, owned: Sequence[Sequence[Parameter]], wholes: Sequence[Tensor]) -> None:
        """Write whole values into the shards of all ranks. Collective over the group.

        Args:
            owned: As for ``gather``.
            wholes: This rank's values, in that order.
        """
        value_of = dict(zip(map(id, owned[self._rank]), wholes, strict=True))
        for like in _types(owned):
            splits = [
                torch.split(
                    value_of[id(each)].flatten(),
                    [self._numel(each, rank) for rank in range(self._size)],
                )
                for each in _of_type(owned[self._rank], like)
            ]
            sent = [[pieces[rank] for pieces in splits] for rank in range(self._size)]
            theirs = [_of_type(some, like) for some in owned]
            counts = [sum(_local(each).numel() for each in some) for some in theirs]
            for some, flat in zip(theirs, self._exchange(sent, counts, like), strict=True):
                pieces = torch.split(flat, [_local(each).numel() for each in some])
                for each, piece in zip(some, pieces, strict=True):
                    _local(each).copy_(piece.view(_local(each).shape))

    def _exchange(
        self, sent: Sequence[Sequence[Tensor]], counts: Sequence[int], like: _Type
    ) -> list[Tensor]:
        """Send to each rank its tensors; return what each rank sent, flat. Collective."""
        dtype, device = like
        flat = [each.flatten() for some in sent for each in some]
        sizes = [sum(each.numel() for each in some) for some in sent]
        packed = torch.cat(flat) if flat else torch.empty(0, dtype=dtype, device=device)
        received = torch.empty(sum(counts), dtype=dtype, device=device)
        dist.all_to_all_single(received, packed, list(counts), sizes, group=self.group)
        return list(torch.split(received, list(counts)))

    def _numel(self, parameter: Parameter, rank: int) -> int:
        """Return the elements on one rank; ranks have rows as ``torch.chunk`` cuts."""
        num_rows = parameter.shape[0]
        per_rank = -(-num_rows // self._size)
        rows = max(0, min(num_rows, (rank + 1) * per_rank) - rank * per_rank)
        return rows * (parameter.numel() // max(num_rows, 1))

    def traffic(self, owned: Sequence[Sequence[Parameter]]) -> tuple[int, int]:
        """Return the bytes that this rank sends in a step of all parameters, and the calls."""
        sent = sum(_local(each).nbytes for some in owned for each in some)
        own = sum(each.numel() * each.element_size() for each in owned[self._rank])
        return 2 * sent + own, 2 * len(_types(owned))


class PartExchange:
    """Moves parameters of which each rank of a tensor group has a part in a plain tensor.

    Args:
        group: The tensor group.
        parts: How the parameters are joined and cut.
    """

    operator = "broadcast"

    def __init__(self, group: ProcessGroup, parts: Mapping[Parameter, JoinedPart]) -> None:
        self.group = group
        self._rank = group.rank()
        self._parts = {id(each): part for each, part in parts.items()}

    def is_shared(self, parameter: Tensor) -> bool:
        """Whether ranks have parts of a parameter."""
        return id(parameter) in self._parts

    def gather(self, owned: Sequence[Sequence[Parameter]]) -> list[tuple[Tensor, Tensor]]:
        """Return whole values and gradients of what this rank owns. Collective over the group."""
        found = []
        for rank, some in enumerate(owned):
            for each in some:
                part = self._parts[id(each)]
                assert each.grad is not None
                pair = part.join(each.detach()), part.join(each.grad)
                if rank == self._rank:
                    found.append(pair)
        return found

    def give_back(self, owned: Sequence[Sequence[Parameter]], wholes: Sequence[Tensor]) -> None:
        """Write whole values into the parts of all ranks. Collective over the group."""
        own = iter(wholes)
        for rank, some in enumerate(owned):
            source = dist.get_global_rank(self.group, rank)
            for each in some:
                shape = self._parts[id(each)].division.shape
                whole = each.new_empty(shape) if rank != self._rank else next(own).contiguous()
                dist.broadcast(whole, source, group=self.group)
                each.copy_(self._parts[id(each)].cut(whole))

    def traffic(self, owned: Sequence[Sequence[Parameter]]) -> tuple[int, int]:
        """Return the bytes of a step of all parameters on this rank, and the calls."""
        every = [each for some in owned for each in some]
        total = sum(
            self._parts[id(each)].division.shape.numel() * each.element_size() for each in every
        )
        return 3 * total, len(every) * (2 * self.group.size() + 1)


class WholeSteps:
    """Runs one optimizer on whole parameters, each at its owner.

    See [Note: Whole parameters at one owner]. Made on all ranks of the exchange's group together.

    Args:
        optimizer: The author's. Its ``step`` is replaced, its groups and state stay its own.
        exchange: Moves parameters between the ranks that share them and their owners.
        record: Called before each collective step.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        exchange: ShardExchange | PartExchange,
        record: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._exchange, self._record = exchange, record
        self._size, self._rank = exchange.group.size(), exchange.group.rank()
        self._run = step_without_hooks(optimizer)
        parameters = [each for settings in optimizer.param_groups for each in settings["params"]]
        self._shared = [each for each in parameters if exchange.is_shared(each)]
        self._owner = dict(zip(map(id, self._shared), self._owners(), strict=True))
        self._wholes: dict[int, Parameter] = {}
        """Stand for owned parameters while the optimizer steps; the same object in each step."""
        self._stand_ins: dict[int, Parameter] = {}
        """By group, of which this rank owns nothing: counters of the group go on there too."""
        self._stand_in_state: dict[int, Any] = {}
        self._restore: Callable[[], None] | None = patch_optimizer(
            optimizer, step=self._step, discard=lambda *_: None, absorb=lambda _: None
        )

    def _owners(self) -> list[int]:
        """Return the owner of each parameter: the largest cost first, where least is to be done."""
        busy = [0] * self._size
        owners = [0] * len(self._shared)
        costs = [_cost(each) for each in self._shared]
        for number in sorted(range(len(costs)), key=lambda each: -costs[each]):
            owners[number] = busy.index(min(busy))
            busy[owners[number]] += costs[number]
        return owners

    def release(self) -> None:
        """Give the optimizer its own ``step`` back."""
        restore, self._restore = self._restore, None
        if restore is not None:
            restore()

    def owns(self, parameter: Tensor) -> bool | None:
        """Whether this rank holds the state of a parameter, whole; None: each rank its own."""
        owner = self._owner.get(id(parameter))
        return None if owner is None else owner == self._rank

    def traffic(self) -> tuple[str, int, int]:
        """Return the operator, bytes and calls of a step of all parameters."""
        return (self._exchange.operator, *self._exchange.traffic(self._by_owner(self._shared)))

    # A step.

    def _step(self, optimizer: Optimizer) -> None:
        """Step whole parameters. Collective over the group."""
        trained = [each for each in self._shared if each.grad is not None]
        self._record("stepped whole parameters")
        owned = self._by_owner(trained)
        mine = owned[self._rank]
        with torch.no_grad():
            for each, (value, grad) in zip(mine, self._exchange.gather(owned), strict=True):
                whole = self._whole(each)
                whole.data, whole.grad = value, grad
        try:
            with self._swapped(optimizer, mine):
                self._run(optimizer)
            with torch.no_grad():
                self._exchange.give_back(owned, [self._wholes[id(each)].detach() for each in mine])
        finally:
            for whole in self._wholes.values():
                whole.grad, whole.data = None, whole.data.new_empty(0)

    def _by_owner(self, parameters: Sequence[Parameter]) -> list[list[Parameter]]:
        return [
            [each for each in parameters if self._owner[id(each)] == rank]
            for rank in range(self._size)
        ]

    def _whole(self, parameter: Parameter) -> Parameter:
        """Return what stands for a parameter, with the attributes that the author gave it."""
        known = self._wholes.get(id(parameter))
        if known is None:
            local = _local(parameter)
            known = Parameter(local.new_empty(0), requires_grad=parameter.requires_grad)
            self._wholes[id(parameter)] = known
        vars(known).update(vars(parameter))
        return known

    @contextmanager
    def _swapped(self, optimizer: Optimizer, mine: Sequence[Parameter]) -> Iterator[None]:
        """Within, the optimizer has whole parameters in its groups, those that this rank owns."""
        by_id = {id(each): each for each in mine}
        before = [settings["params"] for settings in optimizer.param_groups]
        state = optimizer.state
        for number, settings in enumerate(optimizer.param_groups):
            settings["params"] = self._stepped(number, before[number], by_id)
        for key, each in by_id.items():
            if each in state:
                state[self._wholes[key]] = state.pop(each)
        for number, stand_in in self._stand_ins.items():
            if number in self._stand_in_state:
                state[stand_in] = self._stand_in_state[number]
        try:
            yield
        finally:
            for settings, parameters in zip(optimizer.param_groups, before, strict=True):
                settings["params"] = parameters
            for key, each in by_id.items():
                if self._wholes[key] in state:
                    state[each] = state.pop(self._wholes[key])
            for number, stand_in in self._stand_ins.items():
                self._stand_in_state[number] = state.pop(stand_in, {})

    def _stepped(
        self, number: int, parameters: Sequence[Parameter], mine: Collection[int]
    ) -> list[Parameter]:
        """Return what a group steps on this rank; a stand-in where it owns nothing of it."""
        stepped = [
            self._wholes[id(each)] if id(each) in mine else each
            for each in parameters
            if id(each) in mine or id(each) not in self._owner
        ]
        shared = [each for each in parameters if id(each) in self._owner and each.grad is not None]
        if stepped or not shared:
            return stepped
        stand_in = self._stand_ins.get(number)
        if stand_in is None:
            local = _local(shared[0])
            stand_in = Parameter(local.new_zeros([STAND_IN_SIZE] * shared[0].dim()))
            vars(stand_in).update(vars(shared[0]))
            self._stand_ins[number] = stand_in
        stand_in.grad = torch.zeros_like(stand_in)
        return [stand_in]


def add_whole_steps(
    expected: Sequence[ExpectedTraffic], steps: Sequence[WholeSteps], axis: str
) -> list[ExpectedTraffic]:
    """Add what this rank sends in an optimizer step of whole parameters."""
    why = "gradients and parameters to the rank that steps them whole, and parameters back"
    found = list(expected)
    for operator, num_bytes, calls in (each.traffic() for each in steps):
        known = next((each for each in found if each.operator == operator), None)
        if known is None:
            found.append(ExpectedTraffic(axis, operator, float(num_bytes), float(calls), why))
            continue
        found[found.index(known)] = ExpectedTraffic(
            known.axis,
            operator,
            known.payload_bytes + num_bytes,
            None if known.calls is None else known.calls + calls,
            known.why if why in known.why else f"{known.why}; {why}",
        )
    return found


def is_owned(parameter: Tensor, steps: Iterable[WholeSteps]) -> bool | None:
    """Whether this rank holds the state of a parameter, whole; None: it is stepped by none."""
    known = (each.owns(parameter) for each in steps)
    return next((owns for owns in known if owns is not None), None)


def _local(parameter: Tensor) -> Tensor:
    return local_tensor(parameter.detach())


def _local_pair(parameter: Parameter) -> tuple[Tensor, Tensor]:
    """Return this rank's rows of a parameter and of its gradient."""
    assert parameter.grad is not None
    value = _local(parameter)
    return value, _local(parameter.grad).to(value.dtype)


def _cost(parameter: Parameter) -> int:
    """Return what a step takes, relative to others: products of matrices take most."""
    return parameter.numel() * (min(parameter.shape) if parameter.dim() > 1 else 1)


def _types(owned: Sequence[Sequence[Parameter]]) -> list[_Type]:
    """Return the types that are moved, in an order that is the same on all ranks."""
    return list(dict.fromkeys((each.dtype, each.device) for some in owned for each in some))


def _of_type(parameters: Sequence[Parameter], like: _Type) -> list[Parameter]:
    return [each for each in parameters if (each.dtype, each.device) == like]
