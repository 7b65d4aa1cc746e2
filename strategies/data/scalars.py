"""Parameters without rows: there is nothing to shard, so every rank keeps them whole.

A learned temperature is one number. Between steps a replicated DTensor stands in its place, so that
optimizers and checkpoints see one kind of parameter; within a step it is a plain tensor, since the
forward pass computes with plain tensors. Both are the same memory.
"""

from collections.abc import Iterable, Set
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.nn import Module, Parameter
from typing_extensions import override

from boltmesh.strategies.torch_compat import local_tensor, set_parameter
from boltmesh.telemetry.traffic import ExpectedTraffic


def scalars_of(module: Module) -> set[Parameter]:
    """Return the parameters below a module that have no rows."""
    return {each for each in module.parameters() if each.dim() == 0}


class Scalars:
    """The scalars of a model.

    Args:
        module: Holds them as plain parameters, alike on all ranks.
        mesh: Of the shards beside them.
        group: The data axis, over which their gradients are averaged.
        absent: Parameters that these ranks have no values of, and that are left as they are.
    """

    def __init__(
        self,
        module: Module,
        mesh: DeviceMesh,
        group: ProcessGroup,
        *,
        absent: Set[Parameter] = frozenset(),
    ) -> None:
        self._group = group
        self._places: list[tuple[Module, str, Parameter]] = []
        replicated = {each: _replicate(each, mesh) for each in scalars_of(module) - absent}
        for owner in module.modules():
            own = list(owner.named_parameters(recurse=False, remove_duplicate=False))
            for name, parameter in own:
                if parameter in replicated:
                    self._places.append((owner, name, replicated[parameter]))
        for owner in {place[0] for place in self._places}:
            owner.register_state_dict_pre_hook(self._put_back_hook)  # type: ignore[no-untyped-call]
            owner.register_load_state_dict_pre_hook(self._put_back_hook)  # type: ignore[no-untyped-call]
        self.put_back()

    @property
    def parameters(self) -> list[Parameter]:
        """The replicated ones, what optimizers hold."""
        return list(dict.fromkeys(parameter for _, _, parameter in self._places))

    def take_out(self) -> None:
        """Put plain tensors in place, for a forward pass."""
        plain: dict[Parameter, Tensor] = {}
        for each in self.parameters:
            plain[each] = _Plain.apply(each, self._group)  # type: ignore[no-untyped-call]
        for owner, name, parameter in self._places:
            set_parameter(owner, name, plain[parameter])

    def put_back(self) -> None:
        """Put the parameters in place."""
        for owner, name, parameter in self._places:
            set_parameter(owner, name, parameter)

    def _put_back_hook(self, *_: object) -> None:
        self.put_back()

    def expected_traffic(self, *, num_batches: int) -> Iterable[ExpectedTraffic]:
        """Give what one optimizer step moves."""
        trained = [each for each in self.parameters if each.requires_grad]
        if trained and self._group.size() > 1:
            moved = num_batches * sum(each.element_size() for each in trained)
            calls = num_batches * len(trained)
            why = "gradients of parameters without rows, once per batch"
            yield ExpectedTraffic("data", "allreduce", moved, calls, why)


class _Plain(torch.autograd.Function):
    """The number itself; the gradient is averaged over the data axis."""

    @staticmethod
    @override
    def forward(ctx: Any, parameter: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group, ctx.like = group, parameter
        plain = local_tensor(parameter)
        return plain.view_as(plain)

    @staticmethod
    @override
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        gradient = gradients[0] / ctx.group.size()
        dist.all_reduce(gradient, group=ctx.group)
        mesh, placements = ctx.like.device_mesh, ctx.like.placements
        return DTensor.from_local(gradient, mesh, placements, run_check=False), None


def _replicate(parameter: Parameter, mesh: DeviceMesh) -> Parameter:
    placements = [Replicate()] * mesh.ndim
    value = DTensor.from_local(parameter.detach(), mesh, placements, run_check=False)
    return Parameter(value, requires_grad=parameter.requires_grad)
