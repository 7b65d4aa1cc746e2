"""Parts of autograd: linear functions, gradient hooks, the running backward pass, the compiler."""

import inspect
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.graph import Node, get_gradient_edge, saved_tensors_hooks
from torch.nn import Parameter
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils import checkpoint
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.hooks import RemovableHandle
from typing_extensions import override


def is_checkpointed() -> bool:
    """Whether a backward pass will run this code again, by ``torch.utils.checkpoint``.

    False within its reentrant form.
    """
    hooks: Any = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return hooks is not None and hooks[0].__module__ == checkpoint.__name__


def has_gradient_hooks(tensor: Tensor) -> bool:
    """Whether a leaf has hooks on its gradient."""
    return bool(tensor._backward_hooks) or has_accumulation_hooks(tensor)


def has_accumulation_hooks(tensor: Tensor) -> bool:
    """Whether a leaf has hooks that run after its ``.grad`` is accumulated."""
    return bool(getattr(tensor, "_post_accumulate_grad_hooks", None))


def move_gradient_hooks(before: Tensor, after: Tensor) -> None:
    """Move hooks on the gradient of one leaf, and their handles, to another."""
    if before._backward_hooks:
        after._backward_hooks = before._backward_hooks
        before._backward_hooks = None


def share_gradient_hooks(of: Tensor, to: Tensor) -> None:
    """Run hooks on the gradient of one leaf also on another's; their handles remove both.

    Hooks of the other leaf itself stay, and belong to the first one from then on.
    """
    ours, theirs = of._backward_hooks, to._backward_hooks
    if ours is theirs:
        return
    if ours is None:
        of._backward_hooks = theirs
        return
    if theirs:
        ours.update(theirs)
    to._backward_hooks = ours


_GRAD: Any = Tensor.grad  # torch declares its descriptor as a plain attribute


def own_gradient(tensor: Tensor) -> Tensor | None:
    """Return the gradient accumulated by backward passes, bypassing a subclass's ``grad``."""
    gradient: Tensor | None = _GRAD.__get__(tensor)
    return gradient


def set_own_gradient(tensor: Tensor, value: Tensor | None) -> None:
    """Set the gradient that backward passes accumulate, bypassing a subclass's ``grad``."""
    _GRAD.__set__(tensor, value)


def after_gradient(parameter: Parameter, hook: Callable[[Parameter], None]) -> RemovableHandle:
    """Call ``hook`` when the gradient of a parameter is complete; adds types to torch's method."""
    handle: RemovableHandle = parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
    return handle


def after_backward(loss: Tensor, call: Callable[[], None]) -> None:
    """Call once after the backward pass that begins at a tensor, before ``backward`` returns."""
    engine: Any = torch.autograd.Variable._execution_engine

    def queue(_: Tensor) -> None:
        engine.queue_callback(call)

    if loss.requires_grad:
        loss.register_hook(queue)  # type: ignore[no-untyped-call]


def backward_number() -> int | None:
    """Return the unique number of this thread's running backward pass; None outside of one."""
    task: int = torch._C._current_graph_task_id()
    return None if task == -1 else task


def numel_of_output(node: Node) -> int:
    """Return the number of elements of the first output of a graph's node."""
    return math.prod(node._input_metadata[0].shape)


def is_in_backward() -> bool:
    """Whether this thread is within a backward pass, as recomputed layers are."""
    return backward_number() is not None


def is_given_gradient(leaf: Tensor) -> bool:
    """Whether this thread's running backward pass accumulates into a leaf's ``.grad``."""
    try:
        return torch._C._will_engine_execute_node(get_gradient_edge(leaf).node)
    except RuntimeError:  # an input of torch.autograd.grad, whose gradient is returned
        return False


def is_wanted(node: Node) -> bool:
    """Whether this thread's running backward pass needs the gradients of a node."""
    try:
        return torch._C._will_engine_execute_node(node)
    except RuntimeError:  # an input of torch.autograd.grad
        return True


def goes_to_the_end() -> bool:
    """Whether this thread's running backward pass runs from its node to an end of the graph.

    ``backward`` does so, also for a reentrant checkpoint. ``torch.autograd.grad`` ends where its
    inputs were made.
    """
    node: Any = torch._C._current_autograd_node()
    if node is None:
        return False
    while (after := next((edge[0] for edge in node.next_functions if edge[0]), None)) is not None:
        node = after
    try:
        return torch._C._will_engine_execute_node(node)
    except RuntimeError:  # an input of torch.autograd.grad
        return False


class LinearMap(Function):
    """A linear function of a tensor, with its adjoint as the backward pass."""

    @staticmethod
    @override
    def forward(
        ctx: Any,
        value: Tensor,
        run: Callable[[Tensor], Tensor],
        adjoint: Callable[[Tensor], Tensor],
    ) -> Tensor:
        ctx.adjoint = adjoint
        return run(value)

    @staticmethod
    @override
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return ctx.adjoint(gradient), None, None


def linear_map(
    value: Tensor, run: Callable[[Tensor], Tensor], adjoint: Callable[[Tensor], Tensor]
) -> Tensor:
    """Return ``run(value)``; ``adjoint`` maps the result's gradient to that of ``value``.

    Higher derivatives need an ``adjoint`` that is differentiable.
    """
    return cast("Tensor", LinearMap.apply(value, run, adjoint))  # type: ignore[no-untyped-call]


@contextmanager
def unrecorded() -> Iterator[None]:
    """Context whose operators activation checkpointing and other dispatch modes do not see."""
    with _disable_current_modes(), saved_tensors_hooks(_same, _same):
        yield


def _same(value: Any) -> Any:
    return value


CHECKPOINT_INPUTS: Any = getattr(checkpoint, "_NoopSaveInputs", None)
"""The function by which torch 2.11 saves the inputs of a checkpoint. None in later releases, which
save them without one."""

CHECKPOINT_OPTIONS: dict[str, Any] = {"use_reentrant": False}
"""Arguments of torch's checkpoint. From torch 2.14 on it warns unless they state whether hooks of
other code see tensors kept by selective checkpointing; before, they did not."""
if "respect_saved_tensors_hooks" in inspect.signature(checkpoint.checkpoint).parameters:
    CHECKPOINT_OPTIONS["respect_saved_tensors_hooks"] = False

_Function = TypeVar("_Function", bound=Callable[..., Any])


def not_compiled(function: _Function) -> _Function:
    """Exclude a function from ``torch.compile``, without importing the compiler."""
    wrapped: Any = torch._disable_dynamo(function)  # type: ignore[attr-defined]
    return cast("_Function", wrapped)


_FUNCTION: Any = torch.autograd.function._SingleLevelFunction


class OwnFunctionMode(TorchFunctionMode):
    """A mode that also handles calls of a user's ``torch.autograd.Function``.

    Functions of torch in its ``forward`` are handled as others are, without a graph: their results
    get their history when the call ends, and only then does the step continue with them. A call
    within an operator, such as one of ``torch.library`` (neurons of spikingjelly), is part of that.
    """

    @override
    def __enter__(self) -> Any:
        self._outer = vars(_FUNCTION).get("apply")

        def apply(kind: Any, *args: Any, **kwargs: Any) -> Any:
            call = partial(super(_FUNCTION, kind).apply, *args, **kwargs)  # type: ignore[misc]
            is_ours = kind.__module__.partition(".")[0] in {"boltmesh", "torch"}
            if is_ours and kind is not checkpoint.CheckpointFunction:
                return call()
            active: list[Any] = _get_current_function_mode_stack()  # type: ignore[no-untyped-call]
            if not any(mode is self for mode in active):
                return call()
            return self.call_function(f"{kind.__name__}.apply", call, (args, kwargs))

        _FUNCTION.apply = classmethod(apply)
        return super().__enter__()  # type: ignore[no-untyped-call]

    @override
    def __exit__(self, *error: Any) -> None:
        if self._outer is None:
            del _FUNCTION.apply
        else:
            _FUNCTION.apply = self._outer
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    def call_function(self, name: str, call: Callable[[], Any], arguments: Any) -> Any:
        """Call a user's function; return the result with which the step continues."""
        raise NotImplementedError
