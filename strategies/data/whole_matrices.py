"""Finds optimizers that need whole matrices, by looking at what they do to a small one.

Shampoo, SOAP and whatever makes updates orthogonal multiply a gradient with itself or factor it. On
shards torch would do that too, gathering as it goes, in another order and precision for each number
of ranks: the numbers would not be those of one process.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer
from typing_extensions import override

from boltmesh.strategies.optimizer_trial import can_be_tried, trial_step
from boltmesh.strategies.torch_compat import DispatchMode

_SHAPE = (4, 6)
_PRODUCTS = {"mm", "addmm", "bmm", "baddbmm", "cholesky", "inverse", "matrix_exp"}
_FACTORS = ("linalg_", "_linalg_")
_NORMS = {"linalg_vector_norm"}


def multiplies_matrices(optimizer: Optimizer) -> bool:
    """Whether a step takes matrix products or factors.

    False where it cannot be tried: torch's own optimizers, which are known, one that steps another
    one within, and one that does not work on a small matrix.
    """
    if not can_be_tried(optimizer):
        return False
    return any(_is_product_in(optimizer, group) for group in optimizer.param_groups)


def _is_product_in(optimizer: Optimizer, group: Mapping[str, Any]) -> bool:
    if not any(each.dim() > 1 for each in group["params"]):
        return False
    leaf = Parameter(torch.ones(_SHAPE))
    leaf.grad = torch.eye(*_SHAPE)
    step = trial_step(optimizer, group, [leaf])
    seen = _Products()
    try:
        with torch.random.fork_rng(devices=[]), seen:
            step()
    except Exception:  # noqa: BLE001 - it wants other parameters, which a real step will show
        return seen.is_any
    return seen.is_any


class _Products(DispatchMode):  # type: ignore[no-untyped-call]
    """Notes whether a matrix was multiplied or factored."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.is_any = False

    @override
    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        name: str = func.overloadpacket.__name__
        if name in _PRODUCTS or (name.startswith(_FACTORS) and name not in _NORMS):
            self.is_any = True
        result: Tensor = func(*args, **(kwargs or {}))
        return result
