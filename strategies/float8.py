"""Matrix products of repeated blocks in float8, by torchao's float8 training.

The ``Linear`` layers of the repeated blocks run torchao's forward: modules, parameters and their
names stay. Weights, gradients and optimizer state keep their types; torchao casts what a product
reads, scaled by its largest element (``tensorwise``) or by that of each row (``rowwise``). On the
CPU torchao computes the products of rounded values in fp32.

Source: FP8 Formats for Deep Learning, Micikevicius et al. 2022, https://arxiv.org/abs/2209.05433
"""

import importlib.util
import logging
import warnings
from collections.abc import Iterable
from typing import Any, Literal, get_args

import torch
from torch.nn import Linear, Module

from boltmesh.errors import ConfigError
from boltmesh.strategies.blocks import find_blocks
from boltmesh.strategies.patch import Changes

Recipe = Literal["tensorwise", "rowwise"]

MULTIPLE = 16
"""Sizes of both dims of a weight, and rows of the inputs, are multiples of this on GPUs."""

CAPABILITY = {"tensorwise": (8, 9), "rowwise": (9, 0)}
"""Least compute capability of a CUDA device."""


class Float8Products:
    """Computes the matrix products of repeated blocks in float8 during a fit.

    Args:
        recipe: How operands are scaled; None: layers do not change.

    Raises:
        ConfigError: If the recipe is unknown.
    """

    def __init__(self, recipe: Recipe | None) -> None:
        if recipe is not None and recipe not in get_args(Recipe):
            raise ConfigError(
                f"float8={recipe!r} is no way to scale the operands of products. Use "
                f"float8='tensorwise' or float8='rowwise'."
            )
        self.recipe = recipe
        self._changes = Changes()

    def refuse(self, device: torch.device, axes: Iterable[Any]) -> None:
        """Refuse a run that cannot compute float8 products.

        Raises:
            ConfigError: Naming the axis, the device or the missing package.
        """
        if self.recipe is None:
            return
        for axis in axes:
            divider = axis.operand_divider
            if divider is not None and (axis.size > 1 or divider != axis.name):
                raise ConfigError(
                    f"float8={self.recipe!r} scales operands of products by their largest "
                    f"elements, and with {divider} a rank has parts of operands. Leave float8 or "
                    f"{divider} out."
                )
        refuse_device(self.recipe, device)
        if importlib.util.find_spec("torchao") is None:
            raise ConfigError(
                f"float8={self.recipe!r} computes products by torchao, which is not installed. "
                f"Install it (pip install torchao), or leave float8 out."
            )

    def put_on(self, root: Module, device: torch.device) -> None:
        """Make the repeated blocks use torchao's products. No effect the second time.

        Args:
            root: The model, before it is compiled or sharded.
            device: Device of the run.

        Raises:
            ConfigError: If no layer of a repeated block can be converted.
        """
        if self.recipe is None or self._changes.modules():
            return
        layers = convertible_layers(root)
        if not layers:
            raise ConfigError(
                f"float8={self.recipe!r} is for the Linear layers of repeated blocks whose sizes "
                f"are multiples of {MULTIPLE}, and {type(root).__name__} has none. Leave float8 "
                f"out."
            )
        forward_of = _torchao().forward_by(self.recipe, emulate=device.type == "cpu")
        for layer in layers:
            self._changes.set(layer, "forward", forward_of(layer))

    def take_off(self) -> None:
        """Restore the layers."""
        self._changes.undo()


def convertible_layers(root: Module) -> list[Linear]:
    """Return the ``Linear`` layers of repeated blocks that can use float8 products.

    Subclasses are left out: other modules may read their weights, as ``MultiheadAttention`` does.
    """
    return [
        each
        for block in find_blocks(root).values()
        for each in block.modules()
        if type(each) is Linear
        and "forward" not in vars(each)
        and each.in_features % MULTIPLE == each.out_features % MULTIPLE == 0
    ]


def refuse_device(recipe: Recipe, device: torch.device) -> None:
    """Refuse a device without float8 products; the CPU emulates them with rounded values.

    Raises:
        ConfigError: Naming the device.
    """
    if device.type == "cpu":
        return
    needed = CAPABILITY[recipe]
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < needed:
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
        version = ".".join(map(str, needed))
        raise ConfigError(
            f"float8={recipe!r} needs a GPU of compute capability {version} or higher (Hopper has "
            f"9.0), and {device} is {name}. Leave float8 out, and set precision='bf16-mixed'."
        )


def _torchao() -> Any:
    disabled = logging.root.manager.disable
    logging.disable(logging.WARNING)  # of kernels for other Pythons, and of what torch deprecates
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from boltmesh.strategies.torch_compat import float8
    finally:
        logging.disable(disabled)
    return float8
