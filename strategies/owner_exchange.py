"""Moves parameters between the ranks that hold shards or parts of them and their owners.

See [Note: Whole parameters at one owner].
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor
from torch.nn import Parameter

from boltmesh.strategies.checkpoint.chunks import DimDivision, OffloadedChunk
from boltmesh.strategies.object_collectives import gather_objects
from boltmesh.strategies.torch_compat.communication import start_all_to_all
from boltmesh.strategies.torch_compat.tensors import local_tensor
from boltmesh.telemetry.traffic import ExpectedTraffic

_Type = tuple[torch.dtype, torch.device]
_Pair = tuple[Tensor, Tensor]
"""Value and gradient of one parameter, of equal shape and dtype."""

_EXCHANGE_REASON = "gradients and parameters to the rank that steps them whole, and parameters back"
"""Says in the expected traffic why an exchange moves parameters."""


class Exchange(Protocol):
    """Moves parameters between the ranks that share them and their owners.

    ``owned`` lists the parameters of each owner, one entry for each of ``size`` ranks by ``rank``;
    it is the same on all ranks. Every parameter in it has a gradient.
    """

    rank: int
    size: int

    def agrees(self, answer: bool) -> bool:
        """Whether the answer is yes on all ranks. Collective over all ranks."""

    def is_shared(self, parameter: Tensor) -> bool:
        """Whether each rank has a shard or part of a parameter that can be moved."""

    def whole_shape(self, parameter: Tensor) -> torch.Size:
        """Return the shape of the whole parameter that an owner steps, the same on all ranks."""

    def gather(self, owned: Sequence[Sequence[Parameter]]) -> Callable[[], list[_Pair]]:
        """Start to gather what this rank owns. Collective over all ranks.

        Args:
            owned: The parameters that each rank owns, in the same order on all ranks.

        Returns:
            A function that waits and returns whole values and gradients, of the shapes of
            ``whole_shape`` and the dtypes of the parameters. It is collective, too.
        """

    def give_back(
        self, owned: Sequence[Sequence[Parameter]], wholes: Sequence[Tensor]
    ) -> Callable[[], None]:
        """Start to send whole values to the ranks that have shards or parts. Collective.

        Args:
            owned: As for ``gather``.
            wholes: Values of what this rank owns, of ``whole_shape``, in the order of ``owned``;
                they may change at once.

        Returns:
            A function that waits and writes each rank's shard or part. Local.
        """

    def traffic(self, owned: Sequence[Sequence[Parameter]]) -> list[ExpectedTraffic]:
        """Return what this rank sends in a step that steps all parameters."""


class JoinedPart(Protocol):
    """Joins a parameter of which each rank of a group holds a part in a plain tensor."""

    @property
    def division(self) -> DimDivision:
        """This rank's part of the full tensor."""

    def join(self, part: Tensor) -> Tensor:
        """Return the full tensor of the parameter, or of a tensor of its shape. Collective."""

    def cut(self, whole: Tensor) -> Tensor:
        """Return this rank's part of a full tensor. Local."""


class ShardExchange:
    """Moves parameters that are sharded by rows, between their ranks and their owners."""

    def __init__(self, group: ProcessGroup) -> None:
        self._group = group
        self.rank, self.size = group.rank(), group.size()

    def agrees(self, answer: bool) -> bool:
        """Whether the answer is yes on all ranks. Collective over the group."""
        return all(gather_objects(answer, self._group))

    def is_shared(self, parameter: Tensor) -> bool:
        """Whether a parameter is sharded by rows over exactly this group."""
        return is_shard_of(parameter, self._group)

    def whole_shape(self, parameter: Tensor) -> torch.Size:
        """Return the shape of a parameter."""
        return parameter.shape

    def gather(self, owned: Sequence[Sequence[Parameter]]) -> Callable[[], list[_Pair]]:
        """Start to gather what this rank owns; see ``Exchange``. Collective over the group."""
        mine = owned[self.rank]
        started = []
        for like in _types(owned):
            own = _of_type(mine, like)
            sent = [
                [piece for parameter in _of_type(some, like) for piece in _local_pair(parameter)]
                for some in owned
            ]
            sizes = [
                [self._numel(parameter, rank) for parameter in own] for rank in range(self.size)
            ]
            finish = self._start(sent, [2 * sum(counts) for counts in sizes], like)
            started.append((own, sizes, finish))

        def wait() -> list[_Pair]:
            pairs: dict[int, _Pair] = {}
            for own, sizes, finish in started:
                pieces = [
                    torch.split(flat, [size for size in some for _ in range(2)])
                    for flat, some in zip(finish(), sizes, strict=True)
                ]
                for number, parameter in enumerate(own):
                    value = torch.cat([some[2 * number] for some in pieces])
                    grad = torch.cat([some[2 * number + 1] for some in pieces])
                    pairs[id(parameter)] = value.view(parameter.shape), grad.view(parameter.shape)
            return [pairs[id(parameter)] for parameter in mine]

        return wait

    def give_back(
        self, owned: Sequence[Sequence[Parameter]], wholes: Sequence[Tensor]
    ) -> Callable[[], None]:
        """Start to send whole values to all ranks; see ``Exchange``. Collective over the group."""
        value_of = dict(zip(map(id, owned[self.rank]), wholes, strict=True))
        started = []
        for like in _types(owned):
            splits = [
                torch.split(
                    value_of[id(parameter)].flatten(),
                    [self._numel(parameter, rank) for rank in range(self.size)],
                )
                for parameter in _of_type(owned[self.rank], like)
            ]
            sent = [[pieces[rank] for pieces in splits] for rank in range(self.size)]
            theirs = [_of_type(some, like) for some in owned]
            counts = [sum(_local(parameter).numel() for parameter in some) for some in theirs]
            started.append((theirs, self._start(sent, counts, like)))

        def write() -> None:
            for theirs, finish in started:
                for some, flat in zip(theirs, finish(), strict=True):
                    pieces = torch.split(flat, [_local(parameter).numel() for parameter in some])
                    for parameter, piece in zip(some, pieces, strict=True):
                        local = _local(parameter)
                        local.copy_(piece.view(local.shape))  # offloaded ones write it

        return write

    def _start(
        self, sent: Sequence[Sequence[Tensor]], counts: Sequence[int], like: _Type
    ) -> Callable[[], list[Tensor]]:
        """Start to send each rank its tensors; see ``start_all_to_all``. Collective."""
        dtype, device = like
        return start_all_to_all(
            sent, counts, torch.empty(0, dtype=dtype, device=device), self._group
        )

    def _numel(self, parameter: Parameter, rank: int) -> int:
        """Return how many elements of a parameter are on one rank."""
        num_rows = parameter.shape[0]
        rows = shard_rows(num_rows, rank, self.size)
        return len(rows) * (parameter.numel() // max(num_rows, 1))

    def traffic(self, owned: Sequence[Sequence[Parameter]]) -> list[ExpectedTraffic]:
        """Return what this rank sends in a step that steps all parameters."""
        sent = sum(_local(parameter).nbytes for some in owned for parameter in some)
        own = sum(parameter.numel() * parameter.element_size() for parameter in owned[self.rank])
        moved, calls = float(2 * sent + own), float(2 * len(_types(owned)))
        return [ExpectedTraffic("data", "alltoall_base", moved, calls, _EXCHANGE_REASON)]


class PartExchange:
    """Moves parameters of which each rank of a tensor group has a part in a plain tensor."""

    def __init__(self, group: ProcessGroup, parts: Mapping[Parameter, JoinedPart]) -> None:
        self._group = group
        self.rank, self.size = group.rank(), group.size()
        self._parts = {id(parameter): part for parameter, part in parts.items()}

    def agrees(self, answer: bool) -> bool:
        """Whether the answer is yes on all ranks. Collective over the group."""
        return all(gather_objects(answer, self._group))

    def is_shared(self, parameter: Tensor) -> bool:
        """Whether ranks have parts of a parameter."""
        return id(parameter) in self._parts

    def whole_shape(self, parameter: Tensor) -> torch.Size:
        """Return the shape of a parameter, or of the full one if it is a part."""
        part = self._parts.get(id(parameter))
        return parameter.shape if part is None else part.division.shape

    def gather(self, owned: Sequence[Sequence[Parameter]]) -> Callable[[], list[_Pair]]:
        """Gather what this rank owns; see ``Exchange``. Collective over the group."""
        return lambda: self.join(owned, {id(e): _local_pair(e) for some in owned for e in some})

    def give_back(
        self, owned: Sequence[Sequence[Parameter]], wholes: Sequence[Tensor]
    ) -> Callable[[], None]:
        """Write whole values into the parts of all ranks at once. Collective over the group."""
        for parameter, part in self.send(owned, wholes):
            parameter.copy_(part)
        return lambda: None

    def join(self, owned: Sequence[Sequence[Parameter]], pairs: Mapping[int, _Pair]) -> list[_Pair]:
        """Return whole values and gradients of what this rank owns. Collective over the group.

        Args:
            owned: What each rank owns.
            pairs: This rank's value and gradient of each parameter, by ``id``: its part, or the
                whole if the parameter is not divided.
        """
        joined = []
        for rank, some in enumerate(owned):
            for parameter in some:
                value, grad = pairs[id(parameter)]
                if id(parameter) in self._parts:
                    part = self._parts[id(parameter)]
                    value, grad = part.join(value), part.join(grad)
                if rank == self.rank:
                    joined.append((value, grad))
        return joined

    def send(
        self, owned: Sequence[Sequence[Parameter]], wholes: Sequence[Tensor]
    ) -> Iterator[tuple[Parameter, Tensor]]:
        """Yield each parameter and its new values on this rank. Collective over the group."""
        own = iter(wholes)
        for rank, some in enumerate(owned):
            source = dist.get_global_rank(self._group, rank)
            for parameter in some:
                if rank == self.rank:
                    whole = next(own).contiguous()
                else:
                    shape = self.whole_shape(parameter)
                    whole = torch.empty(shape, dtype=parameter.dtype, device=parameter.device)
                dist.broadcast(whole, source, group=self._group)
                part = self._parts.get(id(parameter))
                yield parameter, whole if part is None else part.cut(whole)

    def traffic(self, owned: Sequence[Sequence[Parameter]]) -> list[ExpectedTraffic]:
        """Return what this rank moves in a step that steps all parameters."""
        num_bytes = num_calls = 0.0
        for parameter in (parameter for some in owned for parameter in some):
            is_part = id(parameter) in self._parts
            size = self.whole_shape(parameter).numel() * parameter.element_size()
            num_bytes += 3 * size if is_part else size
            num_calls += 2 * self.size + 1 if is_part else 1
        return [ExpectedTraffic("tensor", "broadcast", num_bytes, num_calls, _EXCHANGE_REASON)]


class ShardedPartExchange:
    """Moves parameters that are shards of the data axis, some of them of a tensor rank's part.

    Ranks are numbered by data rank, then by tensor rank. Parameters that no tensor axis divides
    have one owner too.
    """

    def __init__(self, shards: ShardExchange, parts: PartExchange) -> None:
        self._shards, self._parts = shards, parts
        self.rank = shards.rank * parts.size + parts.rank
        self.size = shards.size * parts.size

    def agrees(self, answer: bool) -> bool:
        """Whether the answer is yes on all ranks. Collective over both groups."""
        return self._parts.agrees(self._shards.agrees(answer))

    def is_shared(self, parameter: Tensor) -> bool:
        """Whether a parameter is sharded by rows over exactly this group."""
        return self._shards.is_shared(parameter)

    def whole_shape(self, parameter: Tensor) -> torch.Size:
        """Return the shape of a parameter, or of the full one if it is a part."""
        return self._parts.whole_shape(parameter)

    def gather(self, owned: Sequence[Sequence[Parameter]]) -> Callable[[], list[_Pair]]:
        """Start to gather shards; parts are joined at the end. Collective over both groups."""
        by_data = self._by_data(owned)
        wait = self._shards.gather(by_data)

        def join() -> list[_Pair]:
            pairs = dict(zip(map(id, by_data[self._shards.rank]), wait(), strict=True))
            return self._parts.join(self._here(owned), pairs)

        return join

    def give_back(
        self, owned: Sequence[Sequence[Parameter]], wholes: Sequence[Tensor]
    ) -> Callable[[], None]:
        """Send parts, and start to send their shards. Collective over both groups."""
        parts = [part for _, part in self._parts.send(self._here(owned), wholes)]
        return self._shards.give_back(self._by_data(owned), parts)

    def traffic(self, owned: Sequence[Sequence[Parameter]]) -> list[ExpectedTraffic]:
        """Return what this rank sends in a step that steps all parameters."""
        shards = self._shards.traffic(self._by_data(owned))
        return shards + self._parts.traffic(self._here(owned))

    def _by_data(self, owned: Sequence[Sequence[Parameter]]) -> list[list[Parameter]]:
        """Return, for each data rank, the parameters that its tensor ranks own together."""
        return [
            [parameter for some in self._of_data(owned, rank) for parameter in some]
            for rank in range(self._shards.size)
        ]

    def _here(self, owned: Sequence[Sequence[Parameter]]) -> Sequence[Sequence[Parameter]]:
        """Return, for each tensor rank of this data rank, the parameters that it owns."""
        return self._of_data(owned, self._shards.rank)

    def _of_data(
        self, owned: Sequence[Sequence[Parameter]], rank: int
    ) -> Sequence[Sequence[Parameter]]:
        return owned[rank * self._parts.size : (rank + 1) * self._parts.size]


def is_shard_of(parameter: Tensor, group: ProcessGroup) -> bool:
    """Whether a parameter is sharded by rows over exactly the ranks of a group."""
    if not isinstance(parameter, DTensor) or not parameter.placements[-1].is_shard(0):
        return False
    mesh = parameter.device_mesh
    ranks = dist.get_process_group_ranks(mesh.get_group(mesh.ndim - 1))
    return ranks == dist.get_process_group_ranks(group)


def shard_rows(num_rows: int, rank: int, num_shards: int) -> range:
    """Return the rows of one rank's shard, as ``torch.chunk`` cuts; the last may have none."""
    per_rank = -(-num_rows // num_shards)
    return range(num_rows)[rank * per_rank : (rank + 1) * per_rank]


def _local(parameter: Tensor) -> Tensor:
    return local_tensor(parameter.detach())


def _local_pair(parameter: Parameter) -> _Pair:
    """Return this rank's shard or part of a parameter and of its gradient, in equal dtypes."""
    assert parameter.grad is not None
    value = _local(parameter)
    if isinstance(value, OffloadedChunk):
        value = value.read().to(parameter.device)
    return value, _local(parameter.grad).to(value.dtype)


def _types(owned: Sequence[Sequence[Parameter]]) -> list[_Type]:
    """Return the dtypes and devices of the parameters, in the same order on all ranks."""
    return list(
        dict.fromkeys((parameter.dtype, parameter.device) for some in owned for parameter in some)
    )


def _of_type(parameters: Sequence[Parameter], like: _Type) -> list[Parameter]:
    return [parameter for parameter in parameters if (parameter.dtype, parameter.device) == like]
