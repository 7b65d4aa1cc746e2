"""Maps the parameters that an author made to those that sharding made of them.

Before a strategy shards the model, its author may give parameters attributes, gradient hooks and
places in lists, dictionaries and optimizers. Sharding makes new objects, a shard and an unsharded
parameter; both take these over.
"""

from collections.abc import Iterable, Iterator, MutableMapping
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn import Module, Parameter
from torch.optim import Optimizer
from torch.utils.weak import WeakTensorKeyDictionary

from boltmesh.errors import ConfigError
from boltmesh.strategies.deferred_initialization.recording import map_leaves, tensors_of
from boltmesh.strategies.torch_compat.autograd import move_gradient_hooks
from boltmesh.strategies.torch_compat.fsdp import unsharded_parameter
from boltmesh.strategies.torch_compat.fsdp_hooks import InstrumentedParamGroup, instrument
from boltmesh.strategies.torch_compat.modules import holders_of


class ParamRemap:
    """Maps the parameters that an author made to those that sharding made of them."""

    def __init__(self) -> None:
        # Weak: the author's parameters are unsharded, and are freed where nothing else holds them.
        self._of: MutableMapping[Tensor, Parameter] = WeakTensorKeyDictionary()
        self._places: list[tuple[Module, str]] = []
        """Modules and attributes that hold parameters in plain containers."""

    @contextmanager
    def of_parameters(self, unit: Module) -> Iterator[None]:
        """Context for code that shards parameters below a module."""
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
        """Replace parameters in plain containers of modules, beside the registered ones."""
        self._places = holders_of(root, self._of)
        for module, key in self._places:
            vars(module)[key] = map_leaves(self._successor, vars(module)[key])

    def follow_gathers(self, units: Iterable[FSDPModule]) -> None:
        """Put gathered parameters into plain containers while modules have them (ncps does so)."""
        for group in (group for unit in units for group in instrument(unit)):
            shards = {id(param.sharded_param) for param in group.fsdp_params}
            places = [
                (module, key)
                for module, key in self._places
                if any(id(each) in shards for each in tensors_of(vars(module)[key]))
            ]
            if places:
                group.phases.after_gather.append(partial(_exchange, group, places))
                group.phases.after_reshard.append(partial(_exchange, group, places))

    def take_over(self, optimizers: Iterable[Optimizer], module: Module) -> None:
        """Replace parameters in optimizers that were made before sharding.

        Raises:
            ConfigError: For parameters that the module neither has nor had: no collective would
                reduce their gradients.
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


def _exchange(group: InstrumentedParamGroup, places: Iterable[tuple[Module, str]]) -> None:
    """Put a unit's parameters in their current form into containers of modules."""
    current: dict[int, Tensor | None] = {}
    for param in group.fsdp_params:
        whole = unsharded_parameter(param)
        now = whole if group.is_unsharded else param.sharded_param
        current.update(dict.fromkeys((id(param.sharded_param), id(whole)), now))
    for module, key in places:
        if key not in vars(module):
            continue
        vars(module)[key] = map_leaves(lambda each: current.get(id(each), each), vars(module)[key])


def _refuse_state(optimizer: Optimizer, parameter: Tensor) -> None:
    if optimizer.state.get(parameter):
        raise ConfigError(
            f"{type(optimizer).__name__} was made before the model was sharded, and has state of "
            f"an unsharded parameter of the shape {tuple(parameter.shape)}. Make it in "
            f"configure_optimizers."
        )
