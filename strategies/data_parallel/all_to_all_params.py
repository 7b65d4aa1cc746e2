"""Row-sharded parameters that an all-to-all brings to the ranks that compute with them.

Between steps each rank of the group holds a shard of rows of every parameter, as of all others of
the model, so that optimizers, norms and checkpoints need no special case. For a forward pass each
rank sends the parts of its rows that other ranks compute with, in one exchange per dtype; in the
backward pass gradients go back. So a rank gets only what it computes with: 1 / group of what a
gather would bring.

- ``OwnedModulesParams``: a rank computes with whole modules of a list of experts.
- ``OwnedColumnsParams``: it computes with columns, those of its experts.

Parameters without a gradient on any rank get none here either: the ranks agree on that, because
optimizers treat missing gradients differently from zeros.
"""

import math
from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import Module, Parameter
from typing_extensions import override

from boltmesh.strategies.data_parallel.param_state import (
    InStepParameter,
    PlainInStep,
    local_values,
)
from boltmesh.strategies.engine.data_axis import (
    FetchedParams,
    OwnedColumns,
    OwnedModules,
    OwnedRows,
)
from boltmesh.strategies.owner_exchange import shard_rows
from boltmesh.strategies.torch_compat.communication import all_to_all
from boltmesh.strategies.torch_compat.modules import set_parameter
from boltmesh.strategies.torch_compat.tensors import dtensor_like, local_tensor
from boltmesh.telemetry.traffic import ExpectedTraffic

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class AllToAllParams(PlainInStep):
    """Parameters of which each rank of a group computes with a part.

    ``place`` is the index of a parameter in ``parameters``.

    Args:
        fetched: The state of each batch.
        owned: The ranks that divide them, and those that compute with the same parts.
        num_batches: Batches of all ranks in a step, over which gradients are averaged.
        cut: Returns the shard of a parameter.
    """

    def __init__(
        self,
        fetched: FetchedParams,
        owned: OwnedRows,
        num_batches: int,
        cut: Callable[[Parameter], Parameter],
    ) -> None:
        super().__init__(owned.replicas, num_batches)
        self.fetched, self._cut = fetched, cut
        self.group: ProcessGroup = owned.group
        self._is_out = False

    @abstractmethod
    def _now(self) -> list[Parameter]:
        """Return the parameters registered in the modules now."""

    @abstractmethod
    def width(self, place: int, rank: int) -> int:
        """Return the number of elements of each row with which a rank computes."""

    @abstractmethod
    def columns(self, rows: Tensor, place: int, rank: int) -> Tensor:
        """Return the elements of ``rows`` with which a rank computes.

        Args:
            rows: Some rows of a parameter, ``(n, ...)``.
            place: The parameter.
            rank: A rank that computes with a part of it: ``n * width`` elements.
        """

    @abstractmethod
    def joined(self, columns: Sequence[Tensor], place: int) -> Tensor:
        """Return rows from the flat parts of the ranks that compute with them, ``(n * width,)``."""

    @abstractmethod
    def shape(self, place: int) -> Sequence[int]:
        """Return the shape with which this rank computes."""

    def was_called(self, place: int) -> bool:
        """Whether this rank's batch called the parameter's module, even if without rows."""
        del place
        return False

    def cut(self, module: Module) -> None:
        """Reduce the parameters below a module, so far whole, to this rank's shards."""
        self.replace(module, {param: self._cut(param) for param in self.whole_in(module)})

    def whole_in(self, module: Module) -> set[Parameter]:
        """Return the parameters below a module that are still to be cut."""
        own = set(self._now())
        return {p for p in module.parameters() if p in own and not isinstance(p, DTensor)}

    @cached_property
    def _in_order(self) -> list[Parameter]:
        return self._now()

    @override
    @property
    def parameters(self) -> list[Parameter]:
        """The shards, once all are cut."""
        return self._in_order

    def of_rank(self, places: Iterable[int], rank: int) -> list[int]:
        """Return the places of parameters that a rank computes with."""
        return [place for place in places if self.width(place, rank)]

    def mine(self, places: Iterable[int]) -> list[int]:
        """Return the places of parameters that this rank computes with."""
        return self.of_rank(places, self.group.rank())

    @override
    def _plain_of(self, parameter: Parameter) -> Tensor:
        # Other ranks' parameters must not be computed with here: these have no values.
        return torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")

    @override
    def use_plain(self) -> None:
        """Replace the parameters that this rank computes with by their values. Collective.

        In an evaluation the values stay for all batches: ranks may have different numbers of them.
        """
        if self._is_out and not torch.is_grad_enabled():
            return
        self.use_dtensors()
        self.fetched.called.clear()
        parameters = self.parameters
        anchor, *parts = _ShardsToOwners.apply(self, *parameters)  # type: ignore[no-untyped-call]
        plain = dict(zip(self.mine(range(len(parameters))), parts, strict=True))
        put = {p: plain[n] if n in plain else self._plain_of(p) for n, p in enumerate(parameters)}
        for owner, key, parameter in self.places:
            set_parameter(owner, key, InStepParameter.of(put[parameter], parameter))
        self.fetched.anchors = [anchor] if anchor.requires_grad else []
        self._is_out = True

    @override
    def use_dtensors(self) -> None:
        super().use_dtensors()
        self.fetched.anchors = ()
        self._is_out = False

    def by_type(self, places: Iterable[int]) -> list[list[int]]:
        """Return places in lists of one dtype each, in the order of their first places."""
        by_dtype: dict[torch.dtype, list[int]] = {}
        for place in places:
            by_dtype.setdefault(self.parameters[place].dtype, []).append(place)
        return list(by_dtype.values())

    def rows_of(self, place: int, rank: int) -> slice:
        """Return the rows of a parameter in a rank's shard."""
        rows = shard_rows(self.parameters[place].shape[0], rank, self.group.size())
        return slice(rows.start, rows.stop)

    def elements(self, place: int, *, of: int, to: int) -> int:
        """Return the number of elements of rank ``of``'s rows with which rank ``to`` computes."""
        rows = self.rows_of(place, of)
        number: int = rows.stop - rows.start
        return number * self.width(place, to)

    def swap(self, sent: Sequence[Sequence[Tensor]], received: list[int]) -> list[Tensor]:
        """Send tensors to each rank; return those received from each, flat. Collective.

        Args:
            sent: Tensors of one dtype and any shapes, by destination.
            received: Number of elements from each rank.
        """
        like = next(each for to in sent for each in to)
        return all_to_all(sent, received, like, self.group)

    @override
    def expected_traffic(self, *, num_batches: int) -> Iterable[ExpectedTraffic]:
        parameters = self.parameters
        trained = [place for place, each in enumerate(parameters) if each.requires_grad]
        shards = [local_tensor(each).nbytes for each in parameters]
        back = sum(
            math.prod(self.shape(place)) * parameters[place].element_size()
            for place in self.mine(trained)
        )
        calls = len(self.by_type(range(len(parameters)))) + len(self.by_type(trained))
        why = "parameters of experts to their owners, and gradients back, once per batch"
        yield ExpectedTraffic(
            "expert", "alltoall_base", num_batches * (sum(shards) + back), num_batches * calls, why
        )
        if trained:
            flags = num_batches * len(trained) * torch.int32.itemsize
            why = "which of these parameters have gradients, once per batch"
            yield ExpectedTraffic("expert", "allreduce", flags, num_batches, why)
            if self.replicas.size() > 1:
                moved = flags + num_batches * sum(shards[p] for p in trained)
                why = "gradients of experts, over the ranks with the same ones, once per batch"
                calls = num_batches * (1 + len(self.by_type(trained)))
                yield ExpectedTraffic("data", "allreduce", moved, calls, why)


class OwnedModulesParams(AllToAllParams):
    """The parameters of one list of experts: a rank computes with those of its modules."""

    fetched: OwnedModules

    @override
    def _now(self) -> list[Parameter]:
        return [p for each in self.fetched.modules for p in each.parameters()]

    @cached_property
    def _numbers(self) -> list[int]:
        """The number of its module for each parameter."""
        return [n for n, each in enumerate(self.fetched.modules) for _ in each.parameters()]

    @override
    def width(self, place: int, rank: int) -> int:
        num_local = len(self.fetched.modules) // self.group.size()
        if self._numbers[place] // num_local != rank:
            return 0
        return math.prod(self.parameters[place].shape[1:])

    @override
    def columns(self, rows: Tensor, place: int, rank: int) -> Tensor:
        return rows

    @override
    def joined(self, columns: Sequence[Tensor], place: int) -> Tensor:
        return columns[0]

    @override
    def shape(self, place: int) -> Sequence[int]:
        return self.parameters[place].shape

    @override
    def was_called(self, place: int) -> bool:
        return self._numbers[place] in self.fetched.called


class OwnedColumnsParams(AllToAllParams):
    """Parameters whose columns alternate between experts: a rank computes with its experts'."""

    fetched: OwnedColumns

    @override
    def _now(self) -> list[Parameter]:
        return [getattr(owner, name) for owner, name in self.fetched.places]

    @override
    def width(self, place: int, rank: int) -> int:
        return self.parameters[place].shape[1] // self.group.size()

    @override
    def columns(self, rows: Tensor, place: int, rank: int) -> Tensor:
        return self.fetched.part(rows, rank, self.group.size())

    @override
    def joined(self, columns: Sequence[Tensor], place: int) -> Tensor:
        num_local = self.fetched.num_experts // self.group.size()
        width = self.width(place, 0)
        parts = [each.view(-1, width // num_local, num_local) for each in columns]
        return torch.cat(parts, -1)

    @override
    def shape(self, place: int) -> Sequence[int]:
        return self.parameters[place].shape[0], self.width(place, 0)


def all_to_all_params(
    fetched: FetchedParams,
    owned: OwnedRows,
    num_batches: int,
    cut: Callable[[Parameter], Parameter],
) -> AllToAllParams:
    """Build the ``AllToAllParams`` of either kind."""
    kind = OwnedColumnsParams if isinstance(fetched, OwnedColumns) else OwnedModulesParams
    return kind(fetched, owned, num_batches, cut)


class _ShardsToOwners(torch.autograd.Function):
    """Forward: shards to the ranks that compute with them. Backward: gradients to the shards."""

    @staticmethod
    @override
    def forward(ctx: Any, plan: AllToAllParams, *parameters: Tensor) -> tuple[Tensor, ...]:
        ctx.plan = plan
        ctx.set_materialize_grads(False)
        ranks, rank = range(plan.group.size()), plan.group.rank()
        parts: dict[int, Tensor] = {}
        for places in plan.by_type(range(len(parameters))):
            mine = plan.mine(places)
            local = {place: local_values(parameters[place]) for place in places}
            came = plan.swap(
                [
                    [plan.columns(local[p], p, each) for p in plan.of_rank(places, each)]
                    for each in ranks
                ],
                [sum(plan.elements(p, of=each, to=rank) for p in mine) for each in ranks],
            )
            shards = [
                part.split_with_sizes([plan.elements(p, of=each, to=rank) for p in mine])
                for each, part in enumerate(came)
            ]
            for number, place in enumerate(mine):
                part = torch.cat([shards[each][number] for each in ranks])
                parts[place] = part.view(plan.shape(place))
        outputs = [parts[place] for place in sorted(parts)]
        frozen = [parts[p] for p in sorted(parts) if not parameters[p].requires_grad]
        ctx.mark_non_differentiable(*frozen)
        return torch.zeros((), device=local_tensor(parameters[0]).device), *outputs

    @staticmethod
    @override
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        plan: AllToAllParams = ctx.plan
        ranks, rank = range(plan.group.size()), plan.group.rank()
        parameters = plan.parameters
        trained = [place for place, each in enumerate(parameters) if each.requires_grad]
        own = dict(zip(plan.mine(range(len(parameters))), gradients[1:], strict=True))
        device = local_tensor(parameters[0]).device
        has_gradient = torch.tensor(
            [own.get(p) is not None or plan.was_called(p) for p in trained],
            dtype=torch.int32,
            device=device,
        )
        for group in (plan.group, plan.replicas):
            if group.size() > 1:
                dist.all_reduce(has_gradient, dist.ReduceOp.MAX, group=group)
        made: dict[int, Tensor] = {}
        for places in plan.by_type(trained):
            mine = plan.mine(places)
            parts = {
                p: torch.zeros(plan.shape(p), dtype=parameters[p].dtype, device=device)
                if (gradient := own[p]) is None
                else gradient
                for p in mine
            }
            of_owners = [(each, p) for each in ranks for p in plan.of_rank(places, each)]
            came = plan.swap(
                [[parts[p][plan.rows_of(p, each)] for p in mine] for each in ranks],
                [
                    sum(plan.elements(p, of=rank, to=each) for p in plan.of_rank(places, each))
                    for each in ranks
                ],
            )
            flat = torch.cat(came) / plan.num_batches
            if plan.replicas.size() > 1:
                dist.all_reduce(flat, group=plan.replicas)
            sizes = [plan.elements(p, of=rank, to=each) for each, p in of_owners]
            columns: dict[int, list[Tensor]] = {}
            for (_, place), part in zip(of_owners, flat.split_with_sizes(sizes), strict=True):
                columns.setdefault(place, []).append(part)
            made |= {place: plan.joined(each, place) for place, each in columns.items()}
        for place, is_there in zip(trained, has_gradient.tolist(), strict=True):
            if not is_there:
                del made[place]
        reduced = (
            dtensor_like(made[p].reshape(local_tensor(each).shape), each) if p in made else None
            for p, each in enumerate(parameters)
        )
        return None, *reduced
