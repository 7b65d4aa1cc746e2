"""torchao's float8 training. Importing it takes seconds, and needs torchao."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import Linear
from torch.overrides import wrap_torch_function
from torchao.float8 import Float8LinearConfig, convert_to_float8_training
from torchao.float8.float8_linear import Float8Linear

from boltmesh.errors import UnsupportedError
from boltmesh.telemetry.writer.torch_compat.flops import count_as_linear

MULTIPLE = 16
"""Float8 products of GPUs need multiples of this: rows of inputs, both dims of a weight."""


def forward_by(recipe: str, *, emulate: bool) -> Callable[[Linear], Callable[[Tensor], Tensor]]:
    """Return a function from a ``Linear`` layer to its forward in float8.

    The forward takes ``(..., inputs)`` and returns ``(..., outputs)``, like the layer's own.

    Args:
        recipe: Name of a torchao recipe.
        emulate: Compute products of the rounded values in fp32, for devices without float8.
    """
    config = Float8LinearConfig.from_recipe_name(recipe)
    object.__setattr__(config, "emulate", emulate)  # frozen; recipes take no arguments
    with torch.device("meta"):
        like: Any = convert_to_float8_training(Linear(16, 16), config=config)

    def of(layer: Linear) -> Callable[[Tensor], Tensor]:
        return _Products(layer, like).forward

    return of


class _Products:
    """Attributes that torchao's forward reads from its layer, with another layer's parameters."""

    def __init__(self, layer: Linear, like: Any) -> None:
        self._layer = layer
        self.config = like.config
        self.linear_mm_config = like.linear_mm_config

    @property
    def weight(self) -> Tensor:
        return self._layer.weight

    @property
    def bias(self) -> Tensor | None:
        return self._layer.bias

    def forward(self, inputs: Tensor) -> Tensor:
        made: Tensor = _linear(inputs, self.weight, self)
        return made


def _operands(inputs: Tensor, weight: Tensor, products: _Products) -> tuple[Tensor, Tensor]:
    return inputs, weight


def _multiply(inputs: Tensor, weight: Tensor, products: _Products) -> Tensor:
    if inputs.device.type == "cpu" and torch.is_autocast_enabled("cpu"):
        inputs = inputs.to(torch.get_autocast_dtype("cpu"))  # torchao reads CUDA's alone
    if not products.config.emulate:
        refuse_rows(inputs)
    made: Tensor = Float8Linear.forward(products, inputs)
    return made


# Its products are no torch functions that a mode would handle.
_linear: Any = wrap_torch_function(_operands)(_multiply)


def refuse_rows(inputs: Tensor) -> None:
    """Refuse inputs whose number of rows a GPU's float8 products do not support.

    Raises:
        UnsupportedError: With the shape of the input.
    """
    width = inputs.shape[-1]
    if inputs.numel() % (width * MULTIPLE):
        raise UnsupportedError(
            f"float8 products of a GPU take rows in multiples of {MULTIPLE}, and a layer got an "
            f"input of shape {tuple(inputs.shape)}: {inputs.numel() // width} rows. Pad sequences, "
            f"or choose a batch size that is a multiple of {MULTIPLE}."
        )


count_as_linear(_linear)
