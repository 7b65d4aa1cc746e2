"""Counts the floating point operations of a step by the functions of torch that it calls."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from math import prod
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import Module, functional
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils.checkpoint import _CachedTorchDispatchMode
from typing_extensions import override

_AUTOGRAD: Any = torch.autograd


class FunctionFlops(TorchFunctionMode):
    """Sums the FLOPs of matrix products, convolutions and attention while it is entered.

    Calls are only looked at, so that they compute what they compute without it. A forward product
    is followed by one for each operand that has a gradient; attention's backward pass makes its
    scores again, five products where the forward pass has two.

    Calls of a backward pass with gradients enabled compute activations again, unless a selective
    checkpoint has kept what they give. They are counted apart.

    Source: Dao et al. 2022, https://arxiv.org/abs/2205.14135, for attention; ``torch.utils.
    flop_counter`` counts the operators below, which a mode would change.

    Args:
        is_counted: Says of the moment whether a call counts.
    """

    def __init__(self, is_counted: Callable[[], bool]) -> None:
        super().__init__()
        self._is_counted = is_counted
        self._run_backward: Any = None
        self.total = 0
        """FLOPs of all calls that count, with those of their backward passes."""
        self.recomputed = 0
        """FLOPs of activations that are computed again."""
        self._counted: list[range] = []
        """Numbers of the autograd nodes of calls that counted their backward pass."""

    @override
    def __enter__(self) -> "FunctionFlops":
        if self._run_backward is None:
            self._run_backward = _AUTOGRAD._engine_run_backward
            _AUTOGRAD._engine_run_backward = self._see_backward
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    @override
    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        if not self._is_on():
            _AUTOGRAD._engine_run_backward = self._run_backward
            self._run_backward = None

    def _is_on(self) -> bool:
        return self in _get_current_function_mode_stack()  # type: ignore[no-untyped-call]

    def _see_backward(self, *args: Any, **kwargs: Any) -> Any:
        """Run a backward pass with this mode on: ``Tensor.backward`` has put it aside."""
        run = self._run_backward
        if self._is_on():
            return run(*args, **kwargs)
        super().__enter__()  # type: ignore[no-untyped-call]
        try:
            return run(*args, **kwargs)
        finally:
            super().__exit__(None, None, None)  # type: ignore[no-untyped-call]

    @override
    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        formula = _FORMULAS.get(func)
        first = _AUTOGRAD._get_sequence_nr()
        made = func(*args, **(kwargs or {}))
        if formula is not None and self._is_counted():
            # Not of the tensors that the formula is about: not counted.
            with suppress(AttributeError, IndexError, TypeError, ValueError):
                whole, backward = formula(made, *args, **(kwargs or {}))
                forward = int(whole * _share(made))
                if torch._C._current_graph_task_id() == -1:
                    self.total += forward + int(backward * forward)
                    if backward:
                        self._counted.append(range(first, _AUTOGRAD._get_sequence_nr()))
                elif torch.is_grad_enabled():
                    self.recomputed += 0 if _is_kept() else forward
                elif not self._is_of_counted_call():
                    self.total += forward
        return made

    def _is_of_counted_call(self) -> bool:
        """Whether a ``Function`` whose backward pass runs now was applied by a call of a formula.

        That call has counted the products of its backward pass.
        """
        node: Any = torch._C._current_autograd_node()
        return node is not None and any(node._sequence_nr() in nodes for nodes in self._counted)


def _is_kept() -> bool:
    """Whether a selective checkpoint gives what it has kept of matrix products and attention."""
    modes = _get_current_dispatch_mode_stack()
    return any(isinstance(mode, _CachedTorchDispatchMode) for mode in modes)


def can_count(module: Module) -> bool:
    """Whether a module's calls can be seen: those of compiled parts cannot."""
    return all(
        part._compiled_call_impl is None and not hasattr(part, "_orig_mod")
        for part in module.modules()
    )


def _share(made: Any) -> float:
    """Return the share of a result that this rank computes, where its sequence is divided."""
    local = getattr(made, "local", None)
    return prod(local.shape) / prod(made.shape) if isinstance(local, Tensor) else 1.0


def _shape(tensor: Any) -> tuple[int, ...]:
    """Return the shape of what this rank has of a tensor."""
    local = getattr(tensor, "_local_tensor", tensor)
    return tuple(local.shape)


def _backward(*operands: Any) -> float:
    """Return how many products the backward pass has for one of the forward pass."""
    if not torch.is_grad_enabled():
        return 0.0
    return float(sum(isinstance(each, Tensor) and each.requires_grad for each in operands))


def _product(made: Any, a: Any, b: Any, *args: Any, **kwargs: Any) -> tuple[int, float]:
    """Products of matrices, with (M, K) and (K, N) as last dimensions."""
    return 2 * prod(_shape(made)) * _shape(a)[-1], _backward(a, b)


def _reflected(made: Any, b: Any, a: Any) -> tuple[int, float]:
    return _product(made, a, b)


def _added_product(made: Any, bias: Any, a: Any, b: Any, **kwargs: Any) -> tuple[int, float]:
    return _product(made, a, b)


def _linear(
    made: Any,
    inputs: Any,
    weight: Any,
    *args: Any,
    **kwargs: Any,
) -> tuple[int, float]:
    return _product(made, inputs, weight)


def _einsum(made: Any, equation: Any, *operands: Any) -> tuple[int, float]:
    """A product over all indices, as if it were one; shapes as the equation names them."""
    if len(operands) == 1 and isinstance(operands[0], Sequence):
        operands = tuple(operands[0])
    if len(operands) != 2 or "." in equation:
        return 0, 0.0
    names = equation.replace(" ", "").partition("->")[0].split(",")
    sizes = {
        name: size
        for term, each in zip(names, operands, strict=True)
        for name, size in zip(term, _shape(each), strict=True)
    }
    return 2 * prod(sizes.values()), _backward(*operands)


def _convolution(
    made: Any,
    inputs: Any,
    weight: Any,
    *args: Any,
    **kwargs: Any,
) -> tuple[int, float]:
    """Every element of the output is a product over a window of the input's channels."""
    return 2 * prod(_shape(made)) * prod(_shape(weight)[1:]), _backward(inputs, weight)


def _transposed_convolution(
    made: Any,
    inputs: Any,
    weight: Any,
    *args: Any,
    **kwargs: Any,
) -> tuple[int, float]:
    return 2 * prod(_shape(inputs)) * prod(_shape(weight)[1:]), _backward(inputs, weight)


def _attention(
    made: Any,
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **kwargs: Any,
) -> tuple[int, float]:
    """Scores and their product with values; half of them where a token sees those before it.

    ``query`` has shape (..., heads, T, d), ``key`` (..., heads, S, d), ``value`` (..., S, v).
    """
    *outer, tokens, width = _shape(query)
    products = 2 * prod(outer) * tokens * _shape(key)[-2] * (width + _shape(value)[-1])
    backward = 2.5 if _backward(query, key, value) else 0.0
    return products // 2 if is_causal else products, backward


def _multi_head_attention(
    made: Any, query: Any, key: Any, value: Any, width: int, *args: Any, **kwargs: Any
) -> tuple[int, float]:
    """Three projections, attention and a projection of (T, B, E) or (T, E)."""
    tokens, others = _shape(query)[0], _shape(key)[0]
    rows = prod(_shape(query)[1:-1])
    projections = 2 * rows * width * width * (2 * tokens + 2 * others)
    scores = 4 * rows * tokens * others * width
    return projections + scores, 2.0 if torch.is_grad_enabled() else 0.0


def _recurrent(made: Any, data: Any, second: Any, third: Any, fourth: Any, *args: Any) -> Any:
    """Each weight once for each row: of (T, B, E), or of packed rows (N, E)."""
    weights = fourth if isinstance(fourth, (list, tuple)) else third
    rows = prod(_shape(data)[:-1])
    return 2 * rows * sum(prod(_shape(each)) for each in weights if each.ndim == 2), _backward(
        data, weights[0]
    )


def _grouped_mm(made: Any, a: Any, b: Any, *args: Any, **kwargs: Any) -> tuple[int, float]:
    """Products of groups of rows: (M, K) with (G, K, N), each row in one group."""
    if len(_shape(a)) == len(_shape(b)) == 2:  # the groups are along K
        (rows, inner), columns = _shape(a), _shape(b)[1]
        return 2 * rows * inner * columns, _backward(a, b)
    return _product(made, a, b)


_FORMULAS: Final[dict[Any, Callable[..., tuple[int, float]]]] = {
    functional.linear: _linear,
    functional.scaled_dot_product_attention: _attention,
    functional.multi_head_attention_forward: _multi_head_attention,
    functional.conv_transpose1d: _transposed_convolution,
    functional.conv_transpose2d: _transposed_convolution,
    functional.conv_transpose3d: _transposed_convolution,
    torch.einsum: _einsum,
    **dict.fromkeys(
        (
            torch.matmul, torch.mm, torch.bmm, torch.mv, Tensor.matmul, Tensor.mm, Tensor.bmm,
            Tensor.__matmul__,
        ),
        _product,
    ),
    Tensor.__rmatmul__: _reflected,
    **dict.fromkeys(
        (torch.addmm, torch.baddbmm, torch.addbmm, Tensor.addmm, Tensor.baddbmm), _added_product
    ),
    **dict.fromkeys(
        (torch.conv1d, torch.conv2d, torch.conv3d, functional.conv1d, functional.conv2d,
         functional.conv3d),
        _convolution,
    ),
    **dict.fromkeys((torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu), _recurrent),
    **{
        each: _grouped_mm
        for each in (getattr(functional, "grouped_mm", None), getattr(torch, "_grouped_mm", None))
        if each is not None
    },
}  # fmt: skip
"""Return the FLOPs of a call, and those of its backward pass as a multiple of them."""


def count_as_linear(function: Callable[..., Any]) -> None:
    """Count calls of a function that torch does not have by its inputs and weight."""
    _FORMULAS[function] = _linear
