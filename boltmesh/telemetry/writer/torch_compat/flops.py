"""Counts the floating point operations of a step by the operators that the rank runs."""

from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import Module
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry
from typing_extensions import override

ATEN: Final = torch.ops.aten
TENSORS: Final = {torch.Tensor, torch.nn.Parameter, torch.nn.Buffer}


class OperatorFlops(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sums the FLOPs of matrix products, convolutions and attention while it is entered.

    Formulas are those of ``torch.utils.flop_counter``, and ``FORMULAS``. Operators run as without
    it. Tensor subclasses are taken apart by their own dispatch first, so the operators of their
    parts count: those that this rank runs.

    Source: torch.utils.flop_counter.FlopCounterMode, which counts in the same way by module.

    Args:
        is_counted: Says of the moment whether an operator counts.
    """

    def __init__(self, is_counted: Callable[[], bool]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._is_counted = is_counted
        self.total = 0
        """FLOPs of all operators that count."""
        self.recomputed = 0
        """Those of ``total`` that ran in a backward pass to make activations again."""

    @override
    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if any(issubclass(kind, FakeTensor) for kind in types):
            return func(*args, **(kwargs or {}))  # DTensor looks for shapes: nothing is computed
        if any(kind not in TENSORS for kind in types):
            return NotImplemented
        made = func(*args, **(kwargs or {}))
        packet = getattr(func, "overloadpacket", None)
        formula = FORMULAS.get(packet) or flop_registry.get(packet)
        if formula is not None and self._is_counted():
            found = int(formula(*args, **(kwargs or {}), out_val=made))
            self.total += found
            if _is_recomputing():
                self.recomputed += found
        return made


def can_count(module: Module) -> bool:
    """Whether a module's operators can be seen: those of compiled parts cannot."""
    return all(
        part._compiled_call_impl is None and not hasattr(part, "_orig_mod")
        for part in module.modules()
    )


def _is_recomputing() -> bool:
    """Whether autograd runs a forward pass: gradients are on inside of a backward pass."""
    return torch.is_grad_enabled() and torch._C._current_graph_task_id() != -1


def attention_flops(
    query: Sequence[int],
    key: Sequence[int],
    value: Sequence[int],
    dropout: float = 0.0,
    is_causal: bool = False,
    **kwargs: Any,
) -> int:
    """Return the FLOPs of the CPU's attention kernel; a causal one does half of the products.

    Args:
        query: Shape (B, heads, T, d).
        key: Shape (B, key heads, S, d).
        value: Shape (B, key heads, S, d of the values).
        dropout: Ignored.
        is_causal: Whether a token sees those before it alone.
        **kwargs: Ignored.
    """
    batch, heads, rows, width = query
    products = 2 * batch * heads * rows * key[-2] * (width + value[-1])
    return products // 2 if is_causal else products


def _attention(query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> int:
    return attention_flops(query.shape, key.shape, value.shape, *args, **kwargs)


def _attention_backward(
    grad: Any, query: Any, key: Any, value: Any, out: Any, logsumexp: Any, *args: Any, **kwargs: Any
) -> int:
    """Five products where the forward pass has two: the scores are computed again."""
    return _attention(query, key, value, *args, **kwargs) * 5 // 2


def _grouped_mm(a: Any, b: Any, *args: Any, out_val: Any, **kwargs: Any) -> int:
    """Return the FLOPs of products of groups of rows; each row is in one group.

    Args:
        a: Shape (M, K), (K, M) of all groups side by side, or (G, M, K).
        b: Shape (G, K, N), or (K, N).
        *args: Ignored, the groups' ends among them.
        out_val: Shape (M, N), or (G, M, N).
        **kwargs: Ignored.
    """
    if a.ndim == b.ndim == 2:  # the groups are along K
        return int(2 * a.shape[0] * a.shape[1] * b.shape[1])
    return int(2 * out_val.numel() * a.shape[-1])


FORMULAS: Final[dict[Any, Callable[..., int]]] = {
    ATEN._scaled_dot_product_flash_attention_for_cpu: _attention,
    ATEN._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
    ATEN._grouped_mm: _grouped_mm,
}
"""FLOPs of operators for which torch has no formula."""
