"""Effects of an operator on its arguments, as far as recording needs them."""

from typing import Any

import torch
from torch import Tensor

from boltmesh.strategies.deferred_initialization.recording import tensors_of
from boltmesh.strategies.torch_compat.tensors import CAST, OpOverload, schema_of

VALUE_FREE = {
    "aten::bernoulli_",
    "aten::cauchy_",
    "aten::copy_",
    "aten::exponential_",
    "aten::fill_",
    "aten::geometric_",
    "aten::log_normal_",
    "aten::normal_",
    "aten::rand_like",
    "aten::randint_like",
    "aten::randn_like",
    "aten::random_",
    "aten::uniform_",
    "aten::zero_",
}
"""Operators that depend only on the shape of their first argument."""


def is_value_free(func: OpOverload) -> bool:
    """Whether an operator depends only on the shape of its first argument."""
    return schema_of(func).name in VALUE_FREE


def is_random(func: OpOverload) -> bool:
    """Whether an operator draws from a generator."""
    return torch.Tag.nondeterministic_seeded in func.tags


def written_by(func: OpOverload, args: Any, kwargs: Any) -> list[Tensor]:
    """Return the tensors whose content an operator changes."""
    written: list[Tensor] = []
    for position, argument in enumerate(schema_of(func).arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            given = args[position] if position < len(args) else kwargs.get(argument.name)
            written += tensors_of(given)
    return written


def is_factory(func: OpOverload) -> bool:
    """Whether an operator makes a tensor from scratch; its arguments give at most the shape."""
    return func is not CAST and takes_device(func)


def takes_device(func: OpOverload) -> bool:
    """Whether an operator has a device argument for its output."""
    return any(argument.name == "device" for argument in schema_of(func).arguments)


def gives_tensors(func: OpOverload) -> bool:
    """Whether everything that an operator returns is a tensor."""
    return all("Tensor" in str(each.type) for each in schema_of(func).returns)


def default_generator(device: torch.device) -> torch.Generator:
    """Return the generator that operators on a device use by default."""
    if device.type == "cpu":
        return torch.default_generator
    module = torch.get_device_module(device)
    # Typed as a number, but None if the code requested no particular device.
    index = module.current_device() if device.index is None else device.index  # type: ignore[redundant-expr]
    generator: torch.Generator = module.default_generators[index]
    return generator
