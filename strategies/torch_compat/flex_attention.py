"""Intercepts the operator of torch's ``flex_attention``; masks for some of its queries and keys."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from boltmesh.strategies.patch import patched
from boltmesh.strategies.torch_compat.tensors import is_fake

_MODULE = "torch.nn.attention.flex_attention"

Operator = Callable[..., Any]
"""Called with query, key, value, a score function, a mask as a tuple, a scale and options.

Queries are ``(B, H, queries, D)``, keys and values ``(B, key heads, keys, D)``.
"""


@contextmanager
def flex_attention_by(run: Callable[..., Any]) -> Iterator[None]:
    """Context in which ``run(operator, *arguments)`` is called in place of the operator.

    Compiled code runs uncompiled within it, since its tensors could not be intercepted otherwise;
    the operator that ``run`` gets is compiled on devices that have kernels for it. No effect if
    the module of ``flex_attention`` was not imported.
    """
    module: Any = sys.modules.get(_MODULE)
    if module is None:
        yield
        return
    operator, check = module.flex_attention_hop, module._validate_device

    def whole(*args: Any) -> Any:
        return operator(*args)

    def compiled(*args: Any) -> Any:
        backend = "inductor" if args[0].is_cuda else "eager"
        with torch.compiler.set_stance("default"):
            return torch.compile(whole, backend=backend, fullgraph=True)(*args)

    def checked(query: Tensor, key: Tensor, value: Tensor) -> None:
        if not is_fake(query):
            check(query, key, value)

    def seen(*args: Any) -> Any:
        return run(compiled, *args)

    replaced = patched(
        module,
        flex_attention_hop=seen,
        _validate_device=checked,
        _FLEX_ATTENTION_DISABLE_COMPILE_DEBUG=True,
    )
    with replaced, torch.compiler.set_stance("force_eager"):
        yield


def blocks_shown(mask: tuple[Any, ...]) -> tuple[Tensor, int, int]:
    """Return the blocks of keys to which each block of queries may attend.

    Args:
        mask: A ``BlockMask`` as a tuple.

    Returns:
        bool ``(blocks of queries, blocks of keys)``, true if any row and head may; and the
        numbers of queries and of keys in a block.
    """
    _, _, counts, indices, full_counts, full_indices = mask[:6]
    shown = torch.zeros(indices.shape[-2:], dtype=torch.bool, device=indices.device)
    for count, index in ((counts, indices), (full_counts, full_indices)):
        if count is None:
            continue
        valid = torch.arange(index.shape[-1], device=index.device) < count[..., None]
        queries = torch.arange(index.shape[-2], device=index.device)[:, None].expand_as(index)
        shown[queries[valid], index[valid].long()] = True
    return shown, int(mask[-3]), int(mask[-2])


def mask_of_parts(mask: tuple[Any, ...], queries: Tensor, keys: Tensor) -> tuple[Any, ...]:
    """Return the mask, as a tuple, for some queries and keys.

    Args:
        mask: The mask of the whole sequence, as a tuple.
        queries: Their positions in the whole sequence, int64 ``(queries,)``.
        keys: Their positions, int64 ``(keys,)``.
    """
    from torch.nn.attention.flex_attention import create_block_mask

    rule, counts = mask[-1], mask[2]

    def shows(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Any:
        return rule(batch, head, queries[query], keys[key])

    rows, heads = counts.shape[:2]
    made = create_block_mask(shows, rows, heads, len(queries), len(keys), device=queries.device)
    parts: tuple[Any, ...] = made.as_tuple()
    return parts


def scores_of_parts(rule: Callable[..., Tensor], queries: Tensor, keys: Tensor) -> Any:
    """Return the score function for some queries and keys, with arguments as ``mask_of_parts``."""

    def score(value: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return rule(value, batch, head, queries[query], keys[key])

    return score
