"""Lets what an author did to a parameter hold for what sharding puts in its place.

Authors mark parameters with attributes by which they are put into groups of an optimizer, hang
hooks on their gradients, collect them in lists, and give them to optimizers, all before a strategy
sees the model. Sharding makes other objects: a shard, and a whole parameter within a step.
"""

from collections.abc import Iterable, Iterator, MutableMapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import Module, Parameter
from torch.optim import Optimizer
from torch.utils.weak import WeakTensorKeyDictionary

from boltmesh.errors import ConfigError
from boltmesh.strategies.building.recording import map_leaves, tensors_of
from boltmesh.strategies.torch_compat import move_gradient_hooks


class Successors:
    """Which parameters stand for those that an author has made."""

    def __init__(self) -> None:
        # Weak: what nobody else holds is whole, and in nobody's way.
        self._of: MutableMapping[Tensor, Parameter] = WeakTensorKeyDictionary()

    @contextmanager
    def of_parameters(self, unit: Module) -> Iterator[None]:
        """Around what shards parameters below a module."""
        before = [
            (owner, key, parameter)
            for owner in unit.modules()
            for key, parameter in owner.named_parameters(recurse=False, remove_duplicate=False)
            if not isinstance(parameter, DTensor)
        ]
        marks = {parameter: dict(vars(parameter)) for _, _, parameter in before}
        yield
        for owner, key, parameter in before:
            successor = getattr(owner, key)
            if successor is parameter or parameter in self._of:
                continue
            vars(successor).update(marks[parameter])
            move_gradient_hooks(parameter, successor)
            self._of[parameter] = successor

    def take_places(self, root: Module) -> None:
        """Put them where modules hold parameters beside their own: in plain containers."""
        for module in root.modules():
            for key, value in list(vars(module).items()):
                is_registered = key in {"_parameters", "_buffers", "_modules"}
                if is_registered or type(value) not in {list, tuple, dict}:
                    continue
                if any(each in self._of for each in tensors_of(value)):
                    vars(module)[key] = map_leaves(self._successor, value)

    def take_over(self, optimizers: Iterable[Optimizer], module: Module) -> None:
        """Put them into optimizers that were made before.

        Raises:
            ConfigError: For parameters that are neither the module's nor have been, which
                nobody would reduce the gradients of.
        """
        known = set(module.parameters())
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                for number, parameter in enumerate(group["params"]):
                    successor = self._successor(parameter)
                    if successor is not parameter:
                        _refuse_state(optimizer, parameter)
                        group["params"][number] = successor
                    elif parameter.requires_grad and parameter not in known:
                        raise ConfigError(
                            f"{type(optimizer).__name__} updates a parameter of the shape "
                            f"{tuple(parameter.shape)} that is none of "
                            f"{type(module).__name__}'s, so no gradients of it would be averaged. "
                            f"Make the optimizer in configure_optimizers, of self.parameters()."
                        )

    def _successor(self, value: Any) -> Any:
        return self._of.get(value, value) if isinstance(value, Tensor) else value


def _refuse_state(optimizer: Optimizer, parameter: Tensor) -> None:
    if optimizer.state.get(parameter):
        raise ConfigError(
            f"{type(optimizer).__name__} was made before the model was sharded, and has state of "
            f"a whole parameter of the shape {tuple(parameter.shape)}. Make it in "
            f"configure_optimizers."
        )
