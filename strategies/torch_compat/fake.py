"""Tensors that have a shape and a type and no data."""

from typing import Any

from torch import Tensor
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
)
from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode


def fake_tensors() -> FakeTensorMode:
    """Return a mode in which tensors have shape and type and no data."""
    return FakeTensorMode(allow_non_fake_inputs=True)


def is_fake(value: Any) -> bool:
    """Whether a value is a tensor with shape and type and no data."""
    return isinstance(value, FakeTensor)


def make_fake(tensor: Tensor, mode: FakeTensorMode) -> Tensor:
    """Return a tensor without data of the same shape, type, device and class."""
    return mode.from_tensor(tensor)


NEEDS_DATA = (DataDependentOutputException, DynamicOutputShapeException)
"""What a tensor without data raises when it is asked for some."""
