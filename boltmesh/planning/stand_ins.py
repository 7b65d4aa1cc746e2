"""Puts real tensors of almost no memory in the place of a model's fake ones."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import Module, Parameter

from boltmesh.strategies.torch_compat import is_fake


def put_stand_ins(module: Module) -> None:
    """Put real tensors in the place of fake ones: parameters of one number, all else of zeros."""
    made: dict[int, Tensor] = {}  # what has several names is one thing

    def stand_in(fake: Tensor) -> Tensor:
        if id(fake) not in made:
            made[id(fake)] = _stand_in(fake)
        return made[id(fake)]

    for part in module.modules():
        named: list[tuple[str, Tensor]] = []
        named += part.named_parameters(recurse=False, remove_duplicate=False)
        named += part.named_buffers(recurse=False, remove_duplicate=False)
        for name, value in [*named, *vars(part).items()]:
            if is_fake(value) or (isinstance(value, Parameter) and is_fake(value.data)):
                setattr(part, name, stand_in(value))


def _stand_in(fake: Tensor) -> Tensor:
    if not isinstance(fake, Parameter):
        return torch.zeros(fake.shape, dtype=fake.dtype)
    return Parameter(_one_number(fake.shape, fake.dtype), requires_grad=fake.requires_grad)


def reshape_stand_in(parameter: Parameter, shape: Sequence[int]) -> None:
    """Give a stand-in another shape in place, as that of a rank's part."""
    parameter.data = _one_number(shape, parameter.dtype)


def _one_number(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    # Of two numbers, for one alone is how a parameter of another rank looks.
    return torch.zeros(2, dtype=dtype)[0].expand(tuple(shape))
