"""Attention over heads that ranks divide: each rank attends with its own, nobody communicates.

DTensor has rules for some of the kernels that attention dispatches to, by device and by version of
torch, and none for what a product of two rows of matrices becomes in inference mode. Heads are
independent in all of them.
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


def multiply(left: Tensor, right: Tensor) -> DTensor | None:
    """Multiply matrices of this rank's heads, or batch entries.

    Returns:
        The products; None where these are not two rows of matrices that are divided alike.
    """
    if not (isinstance(left, DTensor) and isinstance(right, DTensor)):
        return None
    (placement,) = left.placements
    if left.dim() != right.dim() or right.placements != (placement,):
        return None
    if not isinstance(placement, Shard) or placement.dim >= left.dim() - 2:
        return None
    product = left.to_local() @ right.to_local()
    return DTensor.from_local(product, left.device_mesh, [placement])


def _like(query: DTensor, other: Tensor, placement: Shard) -> Tensor | None:
    """This rank's part of keys or values; None where its heads are not those of its queries."""
    whole = _as_dtensor(query, other)
    if whole.placements == (placement,):
        return whole.to_local()
    if whole.placements != (Replicate(),):
        return None
    heads, all_heads = whole.size(placement.dim), query.size(placement.dim)
    # The sum of gradients waits: one head that several see is expanded to them before.
    local = whole.to_local(grad_placements=[Partial()])
    if heads == all_heads:
        own = query.to_local().size(placement.dim)
        return local.narrow(placement.dim, query.device_mesh.get_local_rank() * own, own)
    return local if heads == 1 else None


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
