"""Frees what the last step left in ``.grad`` as the next forward pass gathers parameters.

The Trainer zeroes gradients between forward and backward pass, so during the forward pass the old
ones are in memory beside all gathered parameters, where no formula of ZeRO has any. Those of a
block are dropped when its forward begins: from there on the block's attributes are the gathered
parameters, which have no gradients yet, so the module shows no difference.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

from torch.distributed.fsdp import FSDPModule
from torch.nn import Module, Parameter

from boltmesh.strategies.data_parallel.fully_shard import RootModule
from boltmesh.strategies.torch_compat.fsdp import unit_parameters
from boltmesh.strategies.torch_compat.optimizers import zeroed_by

if TYPE_CHECKING:
    from torch.optim import Optimizer


class EarlyZeroGrad:
    """The gradients of a model's units between a step and the next backward pass.

    Args:
        root: What each batch goes through; a unit itself, under the empty name.
        units: What is gathered as one, by name.
    """

    def __init__(self, root: RootModule, units: Mapping[str, FSDPModule]) -> None:
        self.optimizers: Sequence[Optimizer] = ()
        """Whose ``zero_grad`` the Trainer is going to call."""
        self._root = root
        self._root_unit = units[""]
        self._stale: set[Parameter] = set()
        for name, unit in units.items():
            if name:
                assert isinstance(unit, Module)
                unit.register_forward_pre_hook(partial(self._before_unit, unit), prepend=True)

    def begin(self) -> None:
        """Say that this forward pass is followed by ``zero_grad``, and free the root's."""
        self._stale = zeroed_by(self.optimizers)
        self._free(self._root_unit)

    def end(self) -> None:
        """Say that ``.grad`` is not to be touched any more."""
        self._stale = set()

    def _before_unit(self, unit: FSDPModule, *_: object) -> None:
        # A checkpointed block runs again in the backward pass, where gradients are new.
        if self._stale and self._root.is_running:
            self._free(unit)

    def _free(self, unit: FSDPModule) -> None:
        for shard, _ in unit_parameters(unit):
            if shard in self._stale:
                shard.grad = None
