"""Builds a model larger than one rank's memory: analysed as a whole, made in parts.

Tensors that ``deferred_init`` deferred, and tensors on plain ``meta``, are replaced by stand-ins
with shape and device and without memory, with which the model is cut. Then each rank makes the
parameters of its own stages only.
"""

from collections.abc import Container, Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.nn import Module, Parameter

from boltmesh.strategies.deferred_initialization.deferred import is_deferred
from boltmesh.strategies.deferred_initialization.materialize import (
    is_to_reset,
    make_attributes,
    make_values,
    own_modules,
    own_tensors,
)
from boltmesh.strategies.offload.host_memory import give_back_free_memory
from boltmesh.strategies.pipeline.stage.units import (
    find_stage_units,
    is_absent,
    make_absent,
    one_element,
)

_CPU = torch.device("cpu")
"""Device on which models are constructed, and analysed with a batch from the loader."""


class DeferredModel:
    """The parts of a model that are not materialized yet; a materialized model does not change."""

    @torch.no_grad()
    def __init__(self, root: Module) -> None:
        """Replace tensors that are not materialized by stand-ins.

        This replaces parameters by other objects, which are final. Tensors that code between units
        may read are made immediately: those of no unit, and those that are neither parameters nor
        buffers.

        Args:
            root: The whole model.

        Raises:
            ConfigError: A module on ``meta`` has no ``reset_parameters``.
        """
        self._units = find_stage_units(root)
        self._stand_ins: dict[Tensor, tuple[Tensor, str]] = {}
        """The deferred tensor and its name, by stand-in."""
        self._replaced: dict[int, tuple[Tensor, Tensor]] = {}
        self._stood_in: set[Tensor] = set()
        """All stand-ins, including those that were made since."""
        modules = own_modules([root], "")
        self._to_reset = {each for each, path in modules.items() if is_to_reset(each, path)}
        for module, path in modules.items():
            for key, tensor in own_tensors(module):
                if tensor.is_meta:
                    setattr(module, key, self._stand_in(tensor, f"{path}.{key}".lstrip(".")))
            make_attributes(module, self._attribute)
        inside = {part for unit in self._units.values() for part in unit.modules()}
        loose = [each for each in modules if each not in inside]
        held = {parameter for unit in self._units.values() for parameter in unit.parameters()}
        self._make_deferred(
            each for module in loose for _, each in own_tensors(module) if each not in held
        )
        self._reset(loose)

    def is_lost(self, parameter: Tensor) -> bool:
        """Whether another rank of an earlier run has the values of a parameter, and not this one.

        Args:
            parameter: A parameter of any shape.
        """
        return is_absent(parameter) and parameter not in self._stood_in

    @contextmanager
    def made_for_now(self, unit: Module) -> Iterator[None]:
        """Return a context in which a unit is on the CPU; parameters made for it are then freed."""
        to_reset = [each for each in own_modules([unit], "") if each in self._to_reset]
        waiting = [*self._tensors(to_reset)]
        waiting += [each for each in unit.parameters() if each in self._stand_ins]
        with torch.no_grad():
            for each in waiting:
                if each in self._stand_ins:
                    each.data = make_values(*self._stand_ins[each], _CPU)
            self._reset(to_reset)
        self._to_reset.update(to_reset)
        try:
            yield
        finally:
            make_absent(each for each in waiting if isinstance(each, Parameter))
            give_back_free_memory()

    @torch.no_grad()
    def make(self, held: Container[Parameter], device: torch.device) -> None:
        """Make the tensors that this rank holds, one after the other, and no others.

        Modules on plain ``meta`` are reset on every rank and freed again unless held: otherwise
        ranks with the same random state would give their layers the same values.

        Args:
            held: The parameters of this rank's stages.
            device: Device of the parameters and of their modules' buffers.
        """
        self._make_deferred((each for each in list(self._stand_ins) if each in held), device)
        self._stand_ins.clear()
        for unit in reversed(self._units.values()):
            modules = own_modules([unit], "")
            if self._reset(modules, device):
                make_absent(each for each in unit.parameters() if each not in held)
                give_back_free_memory()
        self._replaced.clear()

    def _stand_in(self, tensor: Tensor, name: str) -> Tensor:
        if id(tensor) not in self._replaced:
            made = one_element(tensor.shape, tensor.dtype, _CPU)
            if isinstance(tensor, Parameter):
                made = Parameter(made, requires_grad=tensor.requires_grad)
                vars(made).update(vars(tensor))  # authors mark parameters with attributes
            if is_deferred(tensor):
                self._stand_ins[made] = tensor, name
            # Keeps the old one too, whose id must not become that of another tensor.
            self._replaced[id(tensor)] = tensor, made
            self._stood_in.add(made)
        return self._replaced[id(tensor)][1]

    def _attribute(self, tensor: Tensor) -> Tensor:
        known = self._replaced.get(id(tensor))
        return make_values(tensor, "", _CPU) if known is None else known[1]

    def _make_deferred(self, stand_ins: Iterable[Tensor], device: torch.device = _CPU) -> None:
        for each in stand_ins:
            if each in self._stand_ins:
                each.data = make_values(*self._stand_ins.pop(each), device)

    def _reset(self, modules: Iterable[Module], device: torch.device = _CPU) -> bool:
        """Reset the parameters and buffers of modules on ``meta``; return whether any was reset."""
        to_reset = [each for each in modules if each in self._to_reset]
        for tensor in self._tensors(to_reset):
            tensor.data = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
        # Children first: a parent may set parameters that its children have just reset.
        for module in reversed(to_reset):
            module.reset_parameters()  # type: ignore[operator]
            self._to_reset.remove(module)
        return bool(to_reset)

    def _tensors(self, modules: Iterable[Module]) -> Iterator[Tensor]:
        for module in modules:
            for _, tensor in own_tensors(module):
                yield tensor
