"""Where a backward pass stands, who waits for gradients, and what is kept from the compiler."""

import math
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torch.autograd.graph import Node
from torch.nn import Parameter
from torch.utils.hooks import RemovableHandle


def has_gradient_hooks(tensor: Tensor) -> bool:
    """Whether somebody waits for the gradient of a leaf."""
    return bool(tensor._backward_hooks) or bool(
        getattr(tensor, "_post_accumulate_grad_hooks", None)
    )


def after_gradient(parameter: Parameter, hook: Callable[[Parameter], None]) -> RemovableHandle:
    """Call ``hook`` when the gradient of a parameter is complete; torch has no types for it."""
    handle: RemovableHandle = parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
    return handle


def numel_of_output(node: Node) -> int:
    """Return how many elements the result has that a node of a graph belongs to."""
    return math.prod(node._input_metadata[0].shape)


def is_in_backward() -> bool:
    """Whether this thread is within a backward pass, as layers are that are computed again."""
    task: int = torch._C._current_graph_task_id()
    return task != -1


_Function = TypeVar("_Function", bound=Callable[..., Any])


def not_compiled(function: _Function) -> _Function:
    """Keep ``torch.compile`` out of a function, without loading the compiler to say so."""
    wrapped: Any = torch._disable_dynamo(function)  # type: ignore[attr-defined]
    return cast("_Function", wrapped)
