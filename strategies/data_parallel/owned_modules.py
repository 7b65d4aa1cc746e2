"""Brings the parameters of whole modules to the ranks that compute with them.

Each rank runs some modules of a list of experts. Between steps every parameter of the list is a
shard on each rank of the group, as all others of the model are, so that optimizers, norms and
checkpoints see nothing new. For a forward pass each rank sends its shards of a module to the rank
that runs it, in one exchange per list and type; in the backward pass gradients go the other way.
A rank gets whole modules this way, but only its own: 1 / group of what gathering all would bring.

Parameters that got no gradient on any rank get none here either: ranks agree on that, because
optimizers tell missing gradients from zeros.
"""

import math
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
from boltmesh.strategies.engine.data_axis import OwnedModules, OwnedRows
from boltmesh.strategies.torch_compat.modules import set_parameter
from boltmesh.strategies.torch_compat.tensors import local_tensor
from boltmesh.telemetry.traffic import ExpectedTraffic

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class OwnedModulesParams(PlainInStep):
    """The parameters of one list.

    Args:
        modules: The list.
        owned: The ranks that divide it, and those that have the same modules.
        num_batches: Batches of all ranks in a step, over which gradients are averaged.
        cut: Returns the shard of a parameter.
    """

    def __init__(
        self,
        modules: OwnedModules,
        owned: OwnedRows,
        num_batches: int,
        cut: Callable[[Parameter], Parameter],
    ) -> None:
        super().__init__(owned.replicas, num_batches)
        self._modules, self._cut = modules, cut
        self.group: ProcessGroup = owned.group
        self._num_local = len(modules.modules) // owned.group.size()
        self._is_out = False

    def cut(self, module: Module) -> None:
        """Keep this rank's shards of what is below a module, which is whole so far."""
        self._replace(module, {param: self._cut(param) for param in self.whole_in(module)})

    def whole_in(self, module: Module) -> set[Parameter]:
        """Return what is to be cut below a module."""
        own = {p for each in self._modules.modules for p in each.parameters()}
        return {p for p in module.parameters() if p in own and not isinstance(p, DTensor)}

    @property
    def called(self) -> set[int]:
        """Modules that this rank's batch has called without rows."""
        return self._modules.called

    @cached_property
    def in_order(self) -> list[tuple[Parameter, int]]:
        """All parameters, module by module, with the number of the module. Once all are cut."""
        return [(p, n) for n, each in enumerate(self._modules.modules) for p in each.parameters()]

    @override
    @property
    def parameters(self) -> list[Parameter]:
        return [each for each, _ in self.in_order]

    def owner(self, place: int) -> int:
        """Return the rank of the group that computes with a parameter."""
        return self.in_order[place][1] // self._num_local

    def mine(self, places: Iterable[int]) -> list[int]:
        """Return the places of parameters that this rank computes with."""
        return [place for place in places if self.owner(place) == self.group.rank()]

    @override
    def _plain_of(self, parameter: Parameter) -> Tensor:
        # Other ranks' modules must not be computed with here: these have no values.
        return torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")

    @override
    def take_out(self) -> None:
        """Put whole tensors in the places of this rank's modules. Collective over the group.

        In an evaluation they stay for all batches, of which ranks may have different numbers.
        """
        if self._is_out and not torch.is_grad_enabled():
            return
        self.put_back()
        self.called.clear()
        parameters = self.parameters
        anchor, *wholes = _Bring.apply(self, *parameters)  # type: ignore[no-untyped-call]
        plain = {each: self._plain_of(each) for each in parameters}
        for place, whole in zip(self.mine(range(len(parameters))), wholes, strict=True):
            plain[parameters[place]] = whole
        for owner, key, parameter in self._places:
            set_parameter(owner, key, InStepParameter.of(plain[parameter], parameter))
        self._modules.anchors = [anchor] if anchor.requires_grad else []
        self._is_out = True

    @override
    def put_back(self) -> None:
        super().put_back()
        self._modules.anchors = ()
        self._is_out = False

    def by_type(self, places: Iterable[int]) -> list[list[int]]:
        """Return places of parameters in lists of one type each, in the order of first ones."""
        found: dict[torch.dtype, list[int]] = {}
        for place in places:
            found.setdefault(self.in_order[place][0].dtype, []).append(place)
        return list(found.values())

    def rows_of(self, place: int, rank: int) -> slice:
        """Return the rows of a parameter that a rank has a shard of."""
        count = self.in_order[place][0].shape[0]
        size = -(-count // self.group.size())
        return slice(min(rank * size, count), min((rank + 1) * size, count))

    def elements(self, place: int, rank: int) -> int:
        """Return how many elements of a parameter a rank has."""
        rows, shape = self.rows_of(place, rank), self.in_order[place][0].shape
        count: int = (rows.stop - rows.start) * math.prod(shape[1:])
        return count

    def swap(self, sent: Sequence[Sequence[Tensor]], received: list[int]) -> list[Tensor]:
        """Send tensors to each rank; return what came of each, flat. Collective."""
        together = torch.cat([each.reshape(-1) for to in sent for each in to])
        came = together.new_empty(sum(received))
        sizes = [sum(each.numel() for each in to) for to in sent]
        dist.all_to_all_single(came, together, received, sizes, group=self.group)
        return list(came.split_with_sizes(received))

    @override
    def expected_traffic(self, *, num_batches: int) -> Iterable[ExpectedTraffic]:
        parameters = self.parameters
        trained = [place for place, each in enumerate(parameters) if each.requires_grad]
        shards = [local_tensor(each).nbytes for each in parameters]
        back = sum(
            parameters[p].shape.numel() * parameters[p].element_size() for p in self.mine(trained)
        )
        calls = len(self.by_type(range(len(parameters)))) + len(self.by_type(trained))
        why = "parameters of a list's experts to their owners, and gradients back, once per batch"
        yield ExpectedTraffic(
            "expert", "alltoall_base", num_batches * (sum(shards) + back), num_batches * calls, why
        )
        if trained:
            flags = num_batches * len(trained) * torch.int32.itemsize
            why = "which parameters of a list's experts have gradients, once per batch"
            yield ExpectedTraffic("expert", "allreduce", flags, num_batches, why)
            if self.replicas.size() > 1:
                moved = flags + num_batches * sum(shards[p] for p in trained)
                why = "gradients of experts, over the ranks with the same ones, once per batch"
                calls = num_batches * (1 + len(self.by_type(trained)))
                yield ExpectedTraffic("data", "allreduce", moved, calls, why)


class _Bring(torch.autograd.Function):
    """Shards of all modules to their owners; gradients of whole parameters back."""

    @staticmethod
    @override
    def forward(ctx: Any, plan: OwnedModulesParams, *parameters: Tensor) -> tuple[Tensor, ...]:
        ctx.plan = plan
        ctx.set_materialize_grads(False)
        size, rank = plan.group.size(), plan.group.rank()
        wholes: dict[int, Tensor] = {}
        for places in plan.by_type(range(len(parameters))):
            of_rank = [[p for p in places if plan.owner(p) == each] for each in range(size)]
            mine = of_rank[rank]
            came = plan.swap(
                [[local_values(parameters[p]) for p in each] for each in of_rank],
                [sum(plan.elements(p, each) for p in mine) for each in range(size)],
            )
            shards = [
                part.split_with_sizes([plan.elements(p, each) for p in mine])
                for each, part in enumerate(came)
            ]
            for number, place in enumerate(mine):
                whole = torch.cat([shards[each][number] for each in range(size)])
                wholes[place] = whole.view(parameters[place].shape)
        outputs = [wholes[place] for place in sorted(wholes)]
        frozen = [wholes[p] for p in sorted(wholes) if not parameters[p].requires_grad]
        ctx.mark_non_differentiable(*frozen)
        return torch.zeros((), device=local_tensor(parameters[0]).device), *outputs

    @staticmethod
    @override
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        plan: OwnedModulesParams = ctx.plan
        size, rank = plan.group.size(), plan.group.rank()
        parameters = plan.parameters
        trained = [place for place, each in enumerate(parameters) if each.requires_grad]
        own = dict(zip(plan.mine(range(len(parameters))), gradients[1:], strict=True))
        device = local_tensor(parameters[0]).device
        has_gradient = torch.tensor(
            [own.get(p) is not None or plan.in_order[p][1] in plan.called for p in trained],
            dtype=torch.int32,
            device=device,
        )
        for group in (plan.group, plan.replicas):
            if group.size() > 1:
                dist.all_reduce(has_gradient, dist.ReduceOp.MAX, group=group)
        made: dict[int, Tensor] = {}
        for places in plan.by_type(trained):
            mine = plan.mine(places)
            wholes = {p: _or_zeros(own[p], parameters[p], device) for p in mine}
            came = plan.swap(
                [[wholes[p][plan.rows_of(p, each)] for p in mine] for each in range(size)],
                [
                    sum(plan.elements(p, rank) for p in places if plan.owner(p) == each)
                    for each in range(size)
                ],
            )
            flat = torch.cat(came) / plan.num_batches
            if plan.replicas.size() > 1:
                dist.all_reduce(flat, group=plan.replicas)
            # In the order of their owners, which is that of the list.
            shards = flat.split_with_sizes([plan.elements(p, rank) for p in places])
            made |= dict(zip(places, shards, strict=True))
        for place, is_there in zip(trained, has_gradient.tolist(), strict=True):
            if not is_there:
                del made[place]
        found = (
            _as_shard(made[p], each) if p in made else None for p, each in enumerate(parameters)
        )
        return None, *found


def _or_zeros(gradient: Tensor | None, parameter: Tensor, device: torch.device) -> Tensor:
    if gradient is not None:
        return gradient
    return torch.zeros(parameter.shape, dtype=parameter.dtype, device=device)


def _as_shard(flat: Tensor, parameter: Tensor) -> Tensor:
    assert isinstance(parameter, DTensor)
    local = flat.view(local_tensor(parameter).shape)
    return DTensor.from_local(
        local,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )
