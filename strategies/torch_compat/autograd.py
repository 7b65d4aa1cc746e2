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
from torch.overrides import TorchFunctionMode
from torch.utils import checkpoint
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.hooks import RemovableHandle
from typing_extensions import override


def has_gradient_hooks(tensor: Tensor) -> bool:
    """Whether a leaf has hooks on its gradient."""
    return bool(tensor._backward_hooks) or has_accumulation_hooks(tensor)


def has_accumulation_hooks(tensor: Tensor) -> bool:
    """Whether a leaf has hooks that run after its ``.grad`` was added to."""
    return bool(getattr(tensor, "_post_accumulate_grad_hooks", None))


def move_gradient_hooks(before: Tensor, after: Tensor) -> None:
    """Let hooks on the gradient of one leaf, and their handles, be those of another."""
    if before._backward_hooks:
        after._backward_hooks = before._backward_hooks
        before._backward_hooks = None


def share_gradient_hooks(of: Tensor, to: Tensor) -> None:
    """Let hooks on the gradient of one leaf run on that of another, and end with their handles.

    Those that the other one was given by itself stay, and are the first one's from then on.
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
    """Return the gradient that backward passes have added up in a tensor, whatever its class."""
    gradient: Tensor | None = _GRAD.__get__(tensor)
    return gradient


def set_own_gradient(tensor: Tensor, value: Tensor | None) -> None:
    """Set the gradient that backward passes add to, whatever the class of the tensor."""
    _GRAD.__set__(tensor, value)


def after_gradient(parameter: Parameter, hook: Callable[[Parameter], None]) -> RemovableHandle:
    """Call ``hook`` when the gradient of a parameter is complete; torch has no types for it."""
    handle: RemovableHandle = parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
    return handle


def after_backward(loss: Tensor, call: Callable[[], None]) -> None:
    """Call once the backward pass is over that begins at a tensor, and before what follows it."""
    engine: Any = torch.autograd.Variable._execution_engine

    def queue(_: Tensor) -> None:
        engine.queue_callback(call)

    if loss.requires_grad:
        loss.register_hook(queue)  # type: ignore[no-untyped-call]


def backward_number() -> int | None:
    """The number of the backward pass that this thread is within, its own; None outside."""
    task: int = torch._C._current_graph_task_id()
    return None if task == -1 else task


def numel_of_output(node: Node) -> int:
    """Return how many elements the result has that a node of a graph belongs to."""
    return math.prod(node._input_metadata[0].shape)


def is_in_backward() -> bool:
    """Whether this thread is within a backward pass, as layers are that are computed again."""
    return backward_number() is not None


def is_given_gradient(leaf: Tensor) -> bool:
    """Whether the backward pass that this thread is within adds to the ``.grad`` of a leaf."""
    try:
        return torch._C._will_engine_execute_node(get_gradient_edge(leaf).node)
    except RuntimeError:  # torch.autograd.grad names it, and takes its gradient away
        return False


def is_wanted(node: Node) -> bool:
    """Whether the backward pass that this thread is within wants the gradients of a node."""
    try:
        return torch._C._will_engine_execute_node(node)
    except RuntimeError:  # it is named
        return True


def goes_to_the_end() -> bool:
    """Whether the backward pass that this thread is within goes from its node to a graph's end.

    As ``backward`` does, also one of a reentrant checkpoint. ``torch.autograd.grad`` ends where
    what it names is made.
    """
    node: Any = torch._C._current_autograd_node()
    if node is None:
        return False
    while (after := next((edge[0] for edge in node.next_functions if edge[0]), None)) is not None:
        node = after
    try:
        return torch._C._will_engine_execute_node(node)
    except RuntimeError:  # it is named
        return False


class LinearMap(Function):
    """A linear function of a tensor, and its adjoint as the backward pass."""

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
    """Return what ``run`` makes of a tensor; ``adjoint`` makes its gradient of that of the result.

    Gradients of gradients need an ``adjoint`` that is differentiable.
    """
    return cast("Tensor", LinearMap.apply(value, run, adjoint))  # type: ignore[no-untyped-call]


@contextmanager
def unrecorded() -> Iterator[None]:
    """Context whose operators are not seen by activation checkpointing or other dispatch modes."""
    with _disable_current_modes(), saved_tensors_hooks(_same, _same):
        yield


def _same(value: Any) -> Any:
    return value


CHECKPOINT_INPUTS: Any = getattr(checkpoint, "_NoopSaveInputs", None)
"""The function by which torch 2.11 saves the inputs of what it is to run again. None in later
releases, which save them without one."""

CHECKPOINT_OPTIONS: dict[str, Any] = {"use_reentrant": False}
"""Arguments of torch's checkpoint. From torch 2.14 on it warns unless they say whether hooks of
others see what selective checkpointing keeps; before they did not."""
if "respect_saved_tensors_hooks" in inspect.signature(checkpoint.checkpoint).parameters:
    CHECKPOINT_OPTIONS["respect_saved_tensors_hooks"] = False

_Function = TypeVar("_Function", bound=Callable[..., Any])


def not_compiled(function: _Function) -> _Function:
    """Keep ``torch.compile`` out of a function, without an import of the compiler."""
    wrapped: Any = torch._disable_dynamo(function)  # type: ignore[attr-defined]
    return cast("_Function", wrapped)


_FUNCTION: Any = torch.autograd.function._SingleLevelFunction


class OwnFunctionMode(TorchFunctionMode):
    """A mode that handles calls of a user's ``torch.autograd.Function`` too.

    The functions of torch in its ``forward`` are seen as others are, without a graph: what is made
    there gets its history when the call ends, and only then is what the step goes on with.
    """

    @override
    def __enter__(self) -> Any:
        self._outer = vars(_FUNCTION).get("apply")

        def apply(kind: Any, *args: Any, **kwargs: Any) -> Any:
            call = partial(super(_FUNCTION, kind).apply, *args, **kwargs)  # type: ignore[misc]
            is_ours = kind.__module__.partition(".")[0] in {"boltmesh", "torch"}
            if is_ours and kind is not checkpoint.CheckpointFunction:
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
        """Call a user's function; return what the step goes on with."""
        raise NotImplementedError
