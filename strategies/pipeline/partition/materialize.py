"""Builds a model that is larger than one rank's memory: looked at whole, made as far as held.

What ``deferred_init`` deferred, and what stands on plain ``meta``, gets stand-ins with shape and
device and no memory, by which the model is cut. Then each rank makes the parameters of its own
stages, and no others.
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
"""Where models are constructed, and looked at with a batch from the loader."""


class DeferredModel:
    """What of a model does not exist yet. One that exists has none of it, and stays as it is."""

    @torch.no_grad()
    def __init__(self, root: Module) -> None:
        """Put stand-ins in the place of what does not exist.

        Parameters become other objects here and stay these. What code between units may look at is
        made at once: what no unit holds, and tensors that are neither parameters nor buffers.

        Args:
            root: The whole model.

        Raises:
            ConfigError: When a module on ``meta`` has no ``reset_parameters``.
        """
        self._units = find_stage_units(root)
        self._stand_ins: dict[Tensor, tuple[Tensor, str]] = {}
        """By tensor that was put in: the deferred one and its name."""
        self._replaced: dict[int, tuple[Tensor, Tensor]] = {}
        self._stood_in: set[Tensor] = set()
        """All that were put in, those among them that have been made."""
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
        """Whether a rank of an earlier run has its values, and not this one."""
        return is_absent(parameter) and parameter not in self._stood_in

    @contextmanager
    def made_for_now(self, unit: Module) -> Iterator[None]:
        """Within it, a unit exists on the CPU; parameters made for that are gone afterwards."""
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
        """Make what this rank holds, one tensor after the other; of the rest nothing is made.

        Modules on plain ``meta`` are reset on every rank and dropped again where they are not held:
        else ranks that begin with the same random numbers would give their layers the same values.

        Args:
            held: The parameters of this rank's stages.
            device: Where they are made. Their modules' buffers come there too.
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
            # The old one is kept too: its id must not become another tensor's.
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
        """Let modules set their own parameters and buffers; tell whether any had to."""
        to_reset = [each for each in modules if each in self._to_reset]
        for tensor in self._tensors(to_reset):
            tensor.data = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
        # Children first: a parent may set what its children have just reset.
        for module in reversed(to_reset):
            module.reset_parameters()  # type: ignore[operator]
            self._to_reset.remove(module)
        return bool(to_reset)

    def _tensors(self, modules: Iterable[Module]) -> Iterator[Tensor]:
        for module in modules:
            for _, tensor in own_tensors(module):
                yield tensor
