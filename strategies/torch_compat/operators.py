"""Operators as a dispatch mode sees them."""

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch._ops import OpOverload as OpOverload
from torch.utils._python_dispatch import TorchDispatchMode


def written_or_viewed(
    func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Iterator[tuple[Any, bool]]:
    """Give the arguments that an operator writes to, with True, or returns views of, with False."""
    schema = func._schema.arguments
    given = [(schema[i], value) for i, value in enumerate(args)]
    given += [(each, kwargs[each.name]) for each in schema if each.name in kwargs]
    for argument, value in given:
        if argument.alias_info is not None:
            yield value, argument.alias_info.is_write


DispatchMode = TorchDispatchMode
"""What sees every operator that runs while it is entered."""


CAST = torch.ops.aten._to_copy.default
"""The operator behind ``Tensor.to``, and so behind autocast."""


CPU_ATTENTION = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
"""The CPU's fused attention, which torch's own ``FlopCounterMode`` does not count."""


GROUPED_PRODUCT = torch.ops.aten._grouped_mm.default
"""Rows of several experts, each times the matrix of its own."""


COSTLY_OPERATORS: frozenset[Any] = frozenset(
    getattr(torch.ops.aten, name).default
    for name in (
        "mm", "addmm", "bmm", "baddbmm", "convolution", "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_cudnn_attention",
        "_scaled_dot_product_efficient_attention",
    )
    if hasattr(torch.ops.aten, name)
)  # fmt: skip
"""Operators that are worth their outputs' memory: everything else is quickly done again."""


def functions_unwatched() -> AbstractContextManager[None]:
    """Within it, no mode sees calls of torch's functions."""
    return torch._C.DisableTorchFunction()


def schema_of(operator: OpOverload) -> Any:
    """What an operator takes and gives, and what of that it changes."""
    return operator._schema
