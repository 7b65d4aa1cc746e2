"""A version of the weights: what a batch's forward passes use, whatever the optimizer does after.

[Note: Two versions]
A backward pass that comes after an optimizer step has to see the weights that its forward pass has
seen. Autograd keeps a parameter itself, not a copy, so writing it makes every graph that has it
worthless (and autograd says so). Therefore the module runs with stand-ins: parameters of the same
values in the same memory, that no optimizer knows. Where a graph outlives the step, the module's
own parameters move to new memory before the optimizer writes them, and the stand-ins keep the old.
Gradients arrive at the stand-ins, so those of two batches never mix.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.nn import Module, Parameter

from boltmesh.errors import ConfigError
from boltmesh.strategies.torch_compat import has_gradient_hooks


class ParameterSlots:
    """Where in a module the trained parameters of this rank stand, under each of their names.

    Args:
        module: The whole model.
        held: The parameters of this rank.
    """

    def __init__(self, module: Module, held: Iterable[Parameter]) -> None:
        wanted = {id(each) for each in held if each.requires_grad}
        self.slots = [
            (owner, name, each)
            for owner in module.modules()
            for name, each in owner.named_parameters(recurse=False, remove_duplicate=False)
            if id(each) in wanted
        ]
        self.parameters = list({id(each): each for _, _, each in self.slots}.values())
        self._names = {id(each): name for name, each in module.named_parameters()}

    def name_of(self, parameter: Parameter) -> str:
        """Return its first name in the module."""
        return self._names[id(parameter)]


class WeightVersion:
    """The weights as they are now; see [Note: Two versions].

    Raises:
        ConfigError: A parameter has a hook on its gradient, which would never be called.
    """

    def __init__(self, slots: ParameterSlots) -> None:
        self._slots = slots
        for each in slots.parameters:
            if has_gradient_hooks(each):
                raise ConfigError(
                    f"{slots.name_of(each)} has a hook on its gradient, and with schedule="
                    f"'pipedream_2bw' gradients arrive a step late and beside it. Change "
                    f"gradients in on_before_optimizer_step, or use schedule='1f1b'."
                )
        self._stand_ins = {id(each): _stand_in(each) for each in slots.parameters}

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Within, the module computes with this version.

        Raises:
            ConfigError: The module has kept one of its own parameters elsewhere and used that.
        """
        own = self._slots.parameters
        for each in own:
            each.grad = None  # of the step before; whoever makes gradients begins with none
        for owner, name, parameter in self._slots.slots:
            setattr(owner, name, self._stand_ins[id(parameter)])
        try:
            yield
        finally:
            for owner, name, parameter in self._slots.slots:
                setattr(owner, name, parameter)
        astray = next((each for each in own if each.grad is not None), None)
        if astray is not None:
            raise ConfigError(
                f"The model uses {self._slots.name_of(astray)} by a reference of its own beside "
                f"the module that it belongs to, and schedule='pipedream_2bw' puts a version of "
                f"the weights into that module's place. Read the parameter from its module, or "
                f"use schedule='1f1b'."
            )

    @torch.no_grad()
    def part(self) -> None:
        """Let the module's parameters go to memory of their own: the optimizer is about to come."""
        for each in self._slots.parameters:
            if each.data_ptr() == self._stand_ins[id(each)].data_ptr():
                each.data = each.data.clone()

    def gradients(self) -> dict[int, Tensor]:
        """Return what has arrived, by identity of the module's parameter."""
        return {
            number: each.grad for number, each in self._stand_ins.items() if each.grad is not None
        }

    def tensors(self) -> tuple[list[Tensor], list[Tensor]]:
        """Return what it keeps in memory beside the module: weights and gradients."""
        weights: list[Tensor] = [
            self._stand_ins[id(each)]
            for each in self._slots.parameters
            if self._stand_ins[id(each)].data_ptr() != each.data_ptr()
        ]
        return weights, list(self.gradients().values())


def _stand_in(parameter: Parameter) -> Parameter:
    made = Parameter(parameter.data)
    made.__dict__.update(parameter.__dict__)  # what users and libraries mark parameters with
    return made
