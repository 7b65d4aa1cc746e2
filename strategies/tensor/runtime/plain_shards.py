"""Runs the modules around matrix products on plain shards, as Megatron-LM does.

A *column* module's outputs are divided, a *row* module's inputs; what lies between works on this
rank's part alone and sees its sizes. A module that holds both, such as stacked experts, is entered
and left as one.

Source: Megatron-LM, Shoeybi et al. 2019, section 3, https://arxiv.org/abs/1909.08053
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Module

from boltmesh.errors import LayoutError
from boltmesh.strategies.tensor.runtime.boundaries import BlockBoundary
from boltmesh.strategies.tensor.runtime.param_swap import (
    Around,
    in_place_of,
    map_floats,
    own_parameters,
)

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


class Column:
    """Around a module whose input is whole and whose output is divided."""

    def __init__(self, border: BlockBoundary) -> None:
        self._border = border

    def __call__(self, forward: Around, *args: Any, **kwargs: Any) -> Any:
        """Run the module."""
        args, kwargs = map_floats(self.enter, (args, kwargs))
        return forward(*args, **kwargs)

    def enter(self, value: Tensor) -> Tensor:
        """Return what the module's own code takes."""
        return self._border.enter(value)


class Row:
    """Around a module whose input is divided and whose output is whole.

    Its bias is added to the sum, once.

    Args:
        module: Whose own parameters stand for the rank's part of a product.
        sharded: Their names, as far as they are divided.
        border: That the output passes.

    Raises:
        LayoutError: When it is not clear which whole parameter is its bias.
    """

    def __init__(self, module: Module, sharded: frozenset[str], border: BlockBoundary) -> None:
        self._module = module
        self._border = border
        whole = [
            name
            for name, parameter in own_parameters(module).items()
            if name not in sharded and parameter is not None
        ]
        if len(whole) > 1 or any(own_parameters(module)[name].dim() != 1 for name in whole):
            raise LayoutError(
                f"{type(module).__name__} divides {sorted(sharded)} along what its product sums "
                f"over, and keeps {whole} whole: one bias can be added to the sum, no more."
            )
        self._bias = whole[0] if whole else None

    def __call__(self, forward: Around, *args: Any, **kwargs: Any) -> Any:
        """Run the module."""
        args, kwargs = map_floats(self.enter, (args, kwargs))
        if self._bias is None:
            return map_floats(self._border.leave, forward(*args, **kwargs))
        bias = own_parameters(self._module)[self._bias]
        with in_place_of(self._module, {self._bias: self._nothing(bias)}):
            parts = forward(*args, **kwargs)
        return map_floats(lambda part: self._with_bias(self._border.leave(part), bias), parts)

    def enter(self, value: Tensor) -> Tensor:
        """Return what the module's own code takes."""
        return value

    def _nothing(self, bias: Tensor) -> Tensor | None:
        """What a module that asks for its bias gets meanwhile."""
        if type(self._module).forward in {nn.Linear.forward, *(c.forward for c in _CONVOLUTIONS)}:
            return None
        return torch.zeros_like(bias, requires_grad=False)

    def _with_bias(self, total: Tensor, bias: Tensor) -> Tensor:
        # Autocast gave the product its type; a bias of the parameter's own would widen it.
        bias = self._border.after(bias).to(total.dtype)
        if isinstance(self._module, _CONVOLUTIONS):
            bias = bias.view(-1, *(1 for _ in self._module.kernel_size))
        return total + bias


class ColumnRow:
    """Around a module that divides its input's use and its output's sum within itself."""

    def __init__(self, border: BlockBoundary) -> None:
        self._border = border

    def __call__(self, forward: Around, *args: Any, **kwargs: Any) -> Any:
        """Run the module."""
        args, kwargs = map_floats(self._border.enter, (args, kwargs))
        return map_floats(self._border.leave, forward(*args, **kwargs))
