"""Parameters without rows where gradients come all at once: whole on every rank, averaged once."""

from collections.abc import Set

import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import Module, Parameter
from typing_extensions import override

from boltmesh.strategies.data.scalars import Scalars
from boltmesh.strategies.torch_compat import (
    dtensor_like,
    local_tensor,
    set_parameter,
    share_gradient_hooks,
)


class LateScalars(Scalars):
    """Replicated between steps, and within them plain parameters over the same memory."""

    def __init__(
        self,
        module: Module,
        mesh: DeviceMesh,
        group: ProcessGroup,
        *,
        absent: Set[Parameter] = frozenset(),
    ) -> None:
        self._whole: dict[Parameter, Parameter] = {}
        """By the replicated one, what stands in its place in the batches of a step."""
        super().__init__(module, mesh, group, absent=absent)

    @override
    def take_out(self) -> None:
        for owner, name, parameter in self._places:
            if parameter not in self._whole:
                value = local_tensor(parameter.detach())
                whole = Parameter(value, requires_grad=parameter.requires_grad)
                share_gradient_hooks(parameter, whole)
                self._whole[parameter] = whole
            set_parameter(owner, name, self._whole[parameter])

    def average(self) -> None:
        """Hand averages of the gradients over to the replicated ones, and put these in place.

        Collective over the axis; all ranks have gradients of the same ones.
        """
        for parameter, whole in self._whole.items():
            if whole.grad is None:
                continue
            gradient = whole.grad / self._group.size()
            dist.all_reduce(gradient, group=self._group)
            made = dtensor_like(gradient, parameter)
            parameter.grad = made if parameter.grad is None else parameter.grad + made
        self.forget()

    def forget(self) -> None:
        """Put the replicated ones in place, and let go of gradients."""
        self._whole = {}
        self.put_back()
