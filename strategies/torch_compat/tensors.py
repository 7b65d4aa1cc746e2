"""Tensors and DTensors beneath what their methods show."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

disabled_torch_function = torch._C._disabled_torch_function_impl
"""For a tensor subclass that wants to be asked at dispatch only, below autograd."""


def make_subclass(kind: type[Tensor], tensor: Tensor) -> Any:
    """``tensor`` under another class: a new object over the same storage.

    FSDP2 compares the addresses of storages, which wrapper subclasses do not have.
    """
    return Tensor._make_subclass(kind, tensor)


def make_wrapper(kind: type[Tensor], local: Tensor, shape: Sequence[int]) -> Any:
    """A tensor of a class and shape, of the type and on the device of another, without storage."""
    return Tensor._make_wrapper_subclass(
        kind, torch.Size(shape), dtype=local.dtype, device=local.device
    )


def subclasses_unasked() -> AbstractContextManager[None]:
    """Within it, calls on a tensor subclass go on to autograd, not to its rules for functions."""
    return torch._C.DisableTorchFunctionSubclass()


def times_written(tensor: Tensor) -> int:
    """Return how often a tensor was written in place."""
    return tensor._version


def storage_key(tensor: Tensor) -> int:
    """Return what tell storages apart that have no address, as those of fake tensors."""
    return int(tensor.untyped_storage()._cdata)


def set_local_tensor(parameter: Tensor, local: Tensor) -> None:
    """Put another local tensor of the same shape under a DTensor."""
    parameter._local_tensor = local  # type: ignore[attr-defined]


def local_tensor(tensor: Tensor) -> Tensor:
    """Return a DTensor's local tensor itself, where ``to_local`` makes a view; others as they are.

    Autograd does not see it.
    """
    local: Tensor = getattr(tensor, "_local_tensor", tensor)
    return local


def dtensor_like(local: Tensor, parameter: Tensor) -> Tensor:
    """Return a DTensor with the layout of ``parameter`` and another local tensor."""
    spec: Any = parameter._spec  # type: ignore[attr-defined]
    return DTensor(local, spec, requires_grad=False)  # type: ignore[no-untyped-call]
