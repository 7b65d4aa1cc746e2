"""Runs a block's own code on DTensors between its column and its row modules.

Code that names sizes which the plan divides (``view(batch, length, heads, channels)``) needs those
of the whole. So a column module's output becomes a DTensor, a row module takes this rank's part
of one, and parameters are never DTensors. Other operands in between, such as a mask or a norm's
weight, are replicated, and become replicated DTensors when they meet one. That happens before
autograd, which so has no mixed operators in either direction, in any thread.

Attention over divided heads does not communicate: each rank attends with its own heads. DTensor has
rules for some of the kernels that attention dispatches to, depending on device and torch version,
and none for batched matrix products in inference mode. Heads are independent in all of them.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from typing_extensions import override

from boltmesh.errors import LayoutError
from boltmesh.strategies.patch import Around, patched
from boltmesh.strategies.tensor.plan import Section, ShardedParameter
from boltmesh.strategies.tensor.runtime.boundaries import BlockBoundary
from boltmesh.strategies.tensor.runtime.collectives import TensorGroup, shared_gradient
from boltmesh.strategies.tensor.runtime.dropout import Draws
from boltmesh.strategies.tensor.runtime.fused_output import as_whole
from boltmesh.strategies.tensor.runtime.param_swap import map_floats, own_parameters
from boltmesh.strategies.tensor.runtime.plain_shards import Column, Row
from boltmesh.strategies.torch_compat.tensors import tree_map_only


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
    """Run scaled dot product attention on this rank's heads, or batch rows.

    Arguments are those of torch, with whole sizes: ``(..., H, S, D)``. The caller chooses the
    generator state for dropout.

    Returns:
        The output, divided like ``query``, or along the channels of ``value``; None if neither is
        divided.

    Raises:
        LayoutError: If tokens, or channels of queries or keys, are divided. DTensor decomposes
            such attention, which may take minutes.
    """
    if not isinstance(query, DTensor):
        return None
    settings: dict[str, Any] = {"enable_gqa": True} if enable_gqa else {}
    (placement,) = query.placements
    inside = [each for each in (query, key, value) if _is_divided_inside(each)]
    if any(each is not value or _shard_dim(each) != each.dim() - 1 for each in inside):
        raise LayoutError("attention is divided otherwise than by heads or channels of values")
    if inside:
        out = _attend_to_channels(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, **settings
        )
        return DTensor.from_local(out, query.device_mesh, [Shard(out.dim() - 1)])
    if not isinstance(placement, Shard):
        return None
    own_key, own_value = (_like(query, each, placement) for each in (key, value))
    if own_key is None or own_value is None:
        return None
    mask = None if attn_mask is None else _mask(query, attn_mask, placement)
    out = F.scaled_dot_product_attention(
        query.to_local(), own_key, own_value, mask, dropout_p, is_causal, scale=scale, **settings
    )
    return DTensor.from_local(out, query.device_mesh, [placement])


def _attend_to_channels(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *args: Any, **settings: Any
) -> Tensor:
    """Run attention on this rank's channels of all values, with replicated weights."""
    whole = [query, key] if mask is None else [query, key, mask]
    own = [
        each.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])
        if isinstance(each, DTensor)
        else each
        for each in whole
    ]
    part = value.to_local() if isinstance(value, DTensor) else value
    return F.scaled_dot_product_attention(
        own[0], own[1], part, None if mask is None else own[2], *args, **settings
    )


def _shard_dim(value: Tensor) -> int | None:
    """Return the divided dim, if there is one."""
    placement = value.placements[0] if isinstance(value, DTensor) else None
    return placement.dim if isinstance(placement, Shard) else None


def _is_divided_inside(value: Tensor) -> bool:
    """Whether tokens or channels of a tensor of heads are divided."""
    dim = _shard_dim(value)
    return dim is not None and dim >= value.dim() - 2


def multiply(left: Tensor, right: Tensor) -> DTensor | None:
    """Multiply matrices ``(..., rows, width)`` of this rank's heads, or batch rows.

    Returns:
        The products; None unless both are batches of matrices divided along the same dim.
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
    """Return this rank's keys or values; None if their heads do not match its queries'."""
    whole = _as_dtensor(query, other)
    if whole.placements == (placement,):
        return whole.to_local()
    if whole.placements != (Replicate(),):
        return None
    heads, all_heads = whole.size(placement.dim), query.size(placement.dim)
    # Gradients are summed later: a head that several ranks use is expanded before.
    local = whole.to_local(grad_placements=[Partial()])
    if heads == all_heads:
        own = query.to_local().size(placement.dim)
        return local.narrow(placement.dim, query.device_mesh.get_local_rank() * own, own)
    return local if heads == 1 else None


def _mask(query: DTensor, mask: Tensor, placement: Shard) -> Tensor:
    """Return the part of a mask, which broadcasts against scores, for this rank's heads."""
    whole = _as_dtensor(query, mask)
    dim = placement.dim - query.dim() + mask.dim()
    if dim >= 0 and mask.size(dim) != 1:
        return whole.redistribute(placements=[Shard(dim)]).to_local()
    return whole.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])


def _as_dtensor(query: DTensor, value: Tensor) -> DTensor:
    if isinstance(value, DTensor):
        return value
    return DTensor.from_local(value, query.device_mesh, [Replicate()])


class RegionColumn(Column):
    """Wrapper of a module whose input is whole, and whose output becomes a DTensor.

    Args:
        boundary: Boundary of the input.
        sections: Sections of the output's divided dim, whole.
        dim: That dim.
        group: Ranks that hold the parts.
    """

    def __init__(
        self, boundary: BlockBoundary, sections: Sequence[Section], dim: int, group: TensorGroup
    ) -> None:
        super().__init__(boundary)
        self._sections = tuple(sections)
        self._dim = dim
        self._group = group

    @override
    def __call__(self, forward: Around, *args: Any, **kwargs: Any) -> Any:
        """Run the module."""
        out = super().__call__(forward, *args, **kwargs)
        return map_floats(lambda part: as_whole(part, self._sections, self._group, self._dim), out)

    @override
    def enter(self, value: Tensor) -> Tensor:
        if not isinstance(value, DTensor):
            return super().enter(value)
        return value.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])


class Table:
    """Wrapper of an embedding of which each rank has some columns."""

    def __init__(self, sections: Sequence[Section], group: TensorGroup) -> None:
        self._sections = tuple(sections)
        self._group = group

    def __call__(self, forward: Around, *args: Any, **kwargs: Any) -> Any:
        """Run the module; its output becomes a DTensor."""
        out = forward(*args, **kwargs)
        return map_floats(lambda part: as_whole(part, self._sections, self._group), out)


class RegionRow(Row):
    """Wrapper of a module that takes this rank's part of a DTensor, and whose output is whole."""

    @override
    def enter(self, value: Tensor) -> Tensor:
        if not isinstance(value, DTensor):
            return value
        return value.redistribute(placements=[Shard(value.dim() - 1)]).to_local()


class AlongParameters:
    """Wrapper of a module that uses parts of parameters together with divided activations."""

    def __init__(
        self, module: Any, entries: Sequence[ShardedParameter], group: TensorGroup
    ) -> None:
        self._module = module
        self._entries = {entry.name.rpartition(".")[2]: entry for entry in entries}
        self._group = group
        for entry in entries:
            if len(entry.sections) != 1 or entry.sections[0].outer != 1:
                raise LayoutError(
                    f"'{entry.name}' is used with divided activations, and its part is no single "
                    f"stretch of it, so it cannot be shown as a DTensor."
                )

    def __call__(self, forward: Around, *args: Any, **kwargs: Any) -> Any:
        """Run the module, with DTensors under the names of these parameters."""
        own = own_parameters(self._module)
        views = {
            name: DTensor.from_local(own[name], self._group.mesh, [Shard(entry.dim)])
            for name, entry in self._entries.items()
        }
        with patched(self._module, **views):
            return forward(*args, **kwargs)


class Region:
    """Wrapper of the module whose code runs between column and row modules of an axis."""

    def __init__(self, group: TensorGroup, draws: Draws, *, shares_gradients: bool = False) -> None:
        self._group = group
        self._draws = draws
        self._shares_gradients = shares_gradients

    def __call__(self, forward: Around, *args: Any, **kwargs: Any) -> Any:
        """Run the module; its output is made whole."""
        # In inference mode operators reach DTensor undecomposed, and composite ones have no rule.
        # Without gradients they are decomposed.
        is_inference = torch.is_inference_mode_enabled()
        with (
            torch.inference_mode(mode=False) if is_inference else nullcontext(),
            torch.no_grad() if is_inference else nullcontext(),
            RegionMode(self._group, self._draws, shares_gradients=self._shares_gradients),
        ):
            out = forward(*args, **kwargs)
        return tree_map_only(DTensor, _whole, out)


def _whole(value: DTensor) -> Tensor:
    return value.redistribute(placements=[Replicate()]).to_local()


class RegionMode(TorchFunctionMode):
    """Makes operands of DTensors DTensors, and runs on parts what needs no other rank.

    Args:
        group: Ranks that hold the parts.
        draws: The generator's two states.
        shares_gradients: Whether gradients of operands are summed once more, as those of a gathered
            sequence are: each rank then passes an equal part of them on.
    """

    def __init__(self, group: TensorGroup, draws: Draws, *, shares_gradients: bool = False) -> None:
        super().__init__()
        self._group = group
        self._draws = draws
        self._shares_gradients = shares_gradients

    @override
    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        given = [*args, *kwargs.values()]
        if not any(map(_has_dtensor, given)):
            return func(*args, **kwargs)
        if func is F.scaled_dot_product_attention:
            args, kwargs = tree_map_only(Tensor, self._as_dtensor, (args, kwargs))
            query = args[0] if args else kwargs["query"]
            # For channels of values, all ranks use the same probabilities.
            is_own = _shard_dim(query) is not None
            with self._draws.own() if is_own else self._draws.alike():
                attended = attend(*args, **kwargs)
            if attended is not None:
                return attended
        if func in _PRODUCTS and not kwargs:
            product = multiply(*args)
            if product is not None:
                return product
        if func in _RANDOM and isinstance(args[0], DTensor):
            return self._drawn(func, args[0], args[1:], kwargs)
        if func is torch.cat:
            args, kwargs = _without_empty(args, kwargs)
        if any(map(_has_plain, given)):
            args, kwargs = tree_map_only(Tensor, self._as_dtensor, (args, kwargs))
        return func(*args, **kwargs)

    def _as_dtensor(self, value: Tensor) -> Tensor:
        if isinstance(value, DTensor):
            return value
        # DTensor's backward sums gradients, if uses of it differ by rank.
        if self._shares_gradients and value.requires_grad:
            value = shared_gradient(value, self._group)
        return DTensor.from_local(value, self._group.mesh, [Replicate()])

    def _drawn(
        self, func: Callable[..., Any], value: DTensor, args: tuple[Any, ...], kwargs: Any
    ) -> DTensor:
        """Run a random elementwise function on this rank's elements only."""
        (placement,) = value.placements
        if not isinstance(placement, Shard):
            value = value.redistribute(placements=[Replicate()])
            drawn = func(value.to_local(), *args, **kwargs)
            return DTensor.from_local(drawn, self._group.mesh, [Replicate()])
        with self._draws.own():
            drawn = func(value.to_local(), *args, **kwargs)
        return DTensor.from_local(drawn, self._group.mesh, [placement])


_PRODUCTS = {torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.bmm, Tensor.bmm}

_RANDOM = {
    F.dropout,
    F.alpha_dropout,
    F.rrelu,
    torch.dropout,
    torch.dropout_,
    torch.alpha_dropout,
    torch.bernoulli,
    torch.rand_like,
    torch.randn_like,
    Tensor.bernoulli_,
    Tensor.exponential_,
    Tensor.normal_,
    Tensor.uniform_,
}


def _has_dtensor(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return any(map(_has_dtensor, value))
    return isinstance(value, DTensor)


def _has_plain(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return any(map(_has_plain, value))
    return isinstance(value, Tensor) and not isinstance(value, DTensor)


def _without_empty(args: tuple[Any, ...], kwargs: Any) -> tuple[tuple[Any, ...], Any]:
    """Drop 1-dim tensors without elements, with which a cache begins.

    ``torch.cat`` accepts them beside any others; DTensor's does not.
    """
    if not args or not isinstance(args[0], (list, tuple)):
        return args, kwargs
    kept = [each for each in args[0] if not (each.dim() == 1 and each.numel() == 0)]
    return (kept, *args[1:]), kwargs
