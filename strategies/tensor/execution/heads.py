"""Attention over heads that ranks divide: each rank attends with its own, nobody communicates.

DTensor has rules for some of the kernels that attention dispatches to, by device and by version of
torch; heads are independent in all of them.
"""

from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.nn import functional as F


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> DTensor | None:
    """Run scaled dot product attention on this rank's heads, or batch entries.

    Arguments are those of torch, with whole sizes. Which generator state it draws dropout from is
    the caller's to choose.

    Returns:
        The output, divided as ``query`` is; None where it is not divided by heads.
    """
    if not isinstance(query, DTensor):
        return None
    (placement,) = query.placements
    if not isinstance(placement, Shard) or placement.dim >= query.dim() - 2:
        return None
    own_key, own_value = (_like(query, each, placement) for each in (key, value))
    if own_key is None or own_value is None:
        return None
    mask = None if attn_mask is None else _mask(query, attn_mask, placement)
    settings: dict[str, Any] = {"enable_gqa": True} if enable_gqa else {}
    out = F.scaled_dot_product_attention(
        query.to_local(), own_key, own_value, mask, dropout_p, is_causal, scale=scale, **settings
    )
    return DTensor.from_local(out, query.device_mesh, [placement])


def _like(query: DTensor, other: Tensor, placement: Shard) -> Tensor | None:
    """This rank's part of keys or values; None where its heads are not those of its queries."""
    whole = _as_dtensor(query, other)
    if whole.placements == (placement,):
        return whole.to_local()
    if whole.size(placement.dim) == query.size(placement.dim):
        return whole.redistribute(placements=[placement]).to_local()
    if whole.size(placement.dim) == 1 and whole.placements == (Replicate(),):
        return whole.to_local(grad_placements=[Partial()])
    return None


def _mask(query: DTensor, mask: Tensor, placement: Shard) -> Tensor:
    """What this rank's heads see of a mask that broadcasts against scores."""
    whole = _as_dtensor(query, mask)
    dim = placement.dim - query.dim() + mask.dim()
    if dim >= 0 and mask.size(dim) != 1:
        return whole.redistribute(placements=[Shard(dim)]).to_local()
    return whole.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])


def _as_dtensor(query: DTensor, value: Tensor) -> DTensor:
    if isinstance(value, DTensor):
        return value
    return DTensor.from_local(value, query.device_mesh, [Replicate()])
