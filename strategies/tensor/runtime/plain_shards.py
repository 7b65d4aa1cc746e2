"""Runs modules on plain shards: those around matrix products, and ``nn.MultiheadAttention``.

A *column* module's outputs are divided, a *row* module's inputs; code in between works on this
rank's part alone and sees its sizes. A module that contains both, such as stacked experts, is
entered and left as one.

``Heads`` is for ``nn.MultiheadAttention``. Torch's own function takes the fused projection as one
argument and checks its shape against the input's, so it cannot run on a part. This class computes
the same from the same parameters under the same names: the projections are this rank's heads,
``out_proj`` is called as a row module, and arguments have torch's meaning.

Source: Megatron-LM, Shoeybi et al. 2019, section 3, https://arxiv.org/abs/1909.08053
"""

import math
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import Module, MultiheadAttention, TransformerEncoder
from torch.nn import functional as F

from boltmesh.errors import LayoutError
from boltmesh.strategies.patch import Around, Changes, patched
from boltmesh.strategies.tensor.runtime.boundaries import BlockBoundary
from boltmesh.strategies.tensor.runtime.collectives import (
    TensorGroup,
    gather_parts,
    reduce_sum,
    take_part,
)
from boltmesh.strategies.tensor.runtime.dropout import Draws
from boltmesh.strategies.tensor.runtime.param_swap import map_floats, own_parameters
from boltmesh.strategies.torch_compat.modules import refuse_fused_attention

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


class Column:
    """Wrapper of a module whose input is whole and whose output is divided."""

    def __init__(self, boundary: BlockBoundary) -> None:
        self._boundary = boundary

    def __call__(self, forward: Around, *args: Any, **kwargs: Any) -> Any:
        """Run the module."""
        if getattr(forward, "__func__", None) is nn.Linear.forward and not kwargs:
            module = cast("nn.Linear", forward.__self__)  # type: ignore[attr-defined]
            (value,) = args
            product = self._boundary.enter_linear(value, module.weight, module.bias)
            if product is not None:
                return product
        args, kwargs = map_floats(self.enter, (args, kwargs))
        return forward(*args, **kwargs)

    def enter(self, value: Tensor) -> Tensor:
        """Return an input of the module's own code."""
        return self._boundary.enter(value)


class Row:
    """Wrapper of a module whose input is divided and whose output is whole.

    Its bias is added once, to the sum.

    Args:
        module: Its own parameters are those of the product.
        sharded: Names of the divided ones.
        boundary: Boundary of the output.

    Raises:
        LayoutError: If several whole parameters could be the bias.
    """

    def __init__(self, module: Module, sharded: frozenset[str], boundary: BlockBoundary) -> None:
        self._module = module
        self._boundary = boundary
        whole = {name: each for name, each in own_parameters(module).items() if name not in sharded}
        if len(whole) > 1 or any(each.dim() != 1 for each in whole.values()):
            raise LayoutError(
                f"{type(module).__name__} divides {sorted(sharded)} along what its product sums "
                f"over, and keeps {[*whole]} whole: one bias can be added to the sum, no more."
            )
        self._bias = next(iter(whole), None)

    def __call__(self, forward: Around, *args: Any, **kwargs: Any) -> Any:
        """Run the module."""
        args, kwargs = map_floats(self.enter, (args, kwargs))
        if self._bias is None:
            return map_floats(self._boundary.leave, forward(*args, **kwargs))
        bias = own_parameters(self._module)[self._bias]
        with patched(self._module, **{self._bias: self._nothing(bias)}):
            parts = forward(*args, **kwargs)
        return map_floats(lambda part: self._with_bias(self._boundary.leave(part), bias), parts)

    def enter(self, value: Tensor) -> Tensor:
        """Return an input of the module's own code."""
        return value

    def _nothing(self, bias: Tensor) -> Tensor | None:
        """Return the replacement for the bias while the product runs."""
        if type(self._module).forward in {nn.Linear.forward, *(c.forward for c in _CONVOLUTIONS)}:
            return None
        return torch.zeros_like(bias, requires_grad=False)

    def _with_bias(self, total: Tensor, bias: Tensor) -> Tensor:
        # Autocast chose the product's dtype; a bias in the parameter's own would widen it.
        bias = self._boundary.after(bias).to(total.dtype)
        if isinstance(self._module, _CONVOLUTIONS):
            bias = bias.view(-1, *(1 for _ in self._module.kernel_size))
        return total + bias


class ColumnRow:
    """Wrapper of a module that contains both a column and a row product."""

    def __init__(self, boundary: BlockBoundary) -> None:
        self._boundary = boundary

    def __call__(self, forward: Around, *args: Any, **kwargs: Any) -> Any:
        """Run the module."""
        args, kwargs = map_floats(self._boundary.enter, (args, kwargs))
        return map_floats(self._boundary.leave, forward(*args, **kwargs))


@dataclass(frozen=True)
class _AttentionCall:
    """The arguments of one call, with dims ``(B, S, E)``."""

    query: Tensor
    key: Tensor
    value: Tensor
    key_padding_mask: Tensor | None
    attn_mask: Tensor | None
    is_causal: bool
    need_weights: bool
    average_attn_weights: bool


class Heads:
    """Wrapper of a ``MultiheadAttention`` whose projections are divided by heads."""

    def __init__(
        self, module: MultiheadAttention, boundary: BlockBoundary, group: TensorGroup, draws: Draws
    ) -> None:
        self._module = module
        self._boundary = boundary
        self._group = group
        self._draws = draws

    def put_on(self, root: Module, changes: Changes) -> None:
        """Replace the module's forward, and keep torch from using fused kernels instead.

        In evaluation, its encoder would make nested tensors for those.
        """
        for each in root.modules():
            if isinstance(each, TransformerEncoder) and self._module in set(each.modules()):
                changes.set(each, "use_nested_tensor", value=False)
        refuse_fused_attention(self._module, changes.set)
        changes.wrap(self._module, self)

    def __call__(
        self,
        forward: Around,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Run the module; arguments and results have the shapes of ``nn.MultiheadAttention``."""
        module = self._module
        if is_causal and attn_mask is None:
            raise RuntimeError("Need attn_mask if specifying the is_causal hint.")
        is_batched = query.dim() == 3
        query, key, value = (self._boundary.enter(each) for each in (query, key, value))
        if not is_batched:
            query, key, value = (each.unsqueeze(0) for each in (query, key, value))
            key_padding_mask = None if key_padding_mask is None else key_padding_mask.unsqueeze(0)
        elif not module.batch_first:
            query, key, value = (each.transpose(0, 1) for each in (query, key, value))
        out, weights = self._attend(
            _AttentionCall(
                query,
                key,
                value,
                key_padding_mask,
                attn_mask,
                is_causal,
                need_weights,
                average_attn_weights,
            )
        )
        if not is_batched:
            return out.squeeze(0), None if weights is None else weights.squeeze(0)
        return out if module.batch_first else out.transpose(0, 1), weights

    def _attend(self, call: _AttentionCall) -> tuple[Tensor, Tensor | None]:
        query, key, value = self._projected(call)
        mask = self._mask(call, query)
        added = 0
        for bias, name in ((self._module.bias_k, "key"), (self._module.bias_v, "value")):
            if bias is not None:
                row = self._heads(bias.expand(call.query.shape[0], 1, -1).to(query.dtype))
                if name == "key":
                    key, added = torch.cat([key, row], 2), added + 1
                else:
                    value = torch.cat([value, row], 2)
        if self._module.add_zero_attn:
            key, value = (F.pad(each, (0, 0, 0, 1)) for each in (key, value))
            added += 1
        if mask is not None and added:
            mask = F.pad(mask, (0, added))
        dropout = self._module.dropout if self._module.training else 0.0
        with self._draws.own():
            if call.need_weights:
                attended, weights = _with_weights(query, key, value, mask, dropout)
            else:
                is_causal = call.is_causal and mask is None
                attended, weights = (
                    F.scaled_dot_product_attention(query, key, value, mask, dropout, is_causal),
                    None,
                )
        out = self._module.out_proj(attended.transpose(1, 2).flatten(2))
        return out, self._shown(weights, call)

    def _projected(self, call: _AttentionCall) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values of this rank's heads, ``(B, heads, S, D)``."""
        module = self._module
        fused = cast("Tensor | None", module.in_proj_weight)
        bias = cast("Tensor | None", module.in_proj_bias)
        if fused is not None and call.query is call.key is call.value:
            query, key, value = F.linear(call.query, fused, bias).chunk(3, -1)
            return self._heads(query), self._heads(key), self._heads(value)
        if fused is not None:
            weights = fused.chunk(3)
        else:
            weights = (module.q_proj_weight, module.k_proj_weight, module.v_proj_weight)
        biases = (None, None, None) if bias is None else bias.chunk(3)
        query, key, value = (
            F.linear(each, weight, own)
            for each, weight, own in zip(
                (call.query, call.key, call.value), weights, biases, strict=True
            )
        )
        return self._heads(query), self._heads(key), self._heads(value)

    def _heads(self, projected: Tensor) -> Tensor:
        heads = projected.view(*projected.shape[:-1], -1, self._module.head_dim)
        return heads.transpose(1, 2)

    def _mask(self, call: _AttentionCall, query: Tensor) -> Tensor | None:
        """Return the summand for the scores of this rank's heads, broadcast to them; or None."""
        mask = call.attn_mask
        # Torch replaces a mask that is the only one by ``is_causal``.
        is_only = call.key_padding_mask is None and not call.need_weights
        if mask is not None and call.is_causal and is_only:
            return None
        added = None if mask is None else _additive(mask, query.dtype)
        if added is not None and added.dim() == 3:
            added = added.view(call.query.shape[0], self._module.num_heads, *added.shape[1:])
            if added.requires_grad:
                added = take_part(added, self._group, 1)
            else:
                added = added.chunk(self._group.size, 1)[self._group.rank]
        elif added is not None:
            added = self._boundary.enter(added)
        if call.key_padding_mask is not None:
            padding = _additive(call.key_padding_mask, query.dtype)[:, None, None, :]
            added = padding if added is None else added + padding
        return added

    def _shown(self, weights: Tensor | None, call: _AttentionCall) -> Tensor | None:
        """Return the weights of all heads, or their mean. Collective if they are requested."""
        if weights is None:
            return None
        if call.average_attn_weights:
            return reduce_sum(weights.mean(1) / self._group.size, self._group)
        return gather_parts(weights, self._group, 1)


def _with_weights(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropout: float
) -> tuple[Tensor, Tensor]:
    scores = query * math.sqrt(1.0 / query.shape[-1]) @ key.transpose(-2, -1)
    weights = F.softmax(scores if mask is None else scores + mask, dim=-1)
    if dropout > 0.0:
        weights = F.dropout(weights, dropout)
    return weights @ value, weights


def _additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    if mask.dtype is torch.bool:
        return torch.zeros_like(mask, dtype=dtype).masked_fill_(mask, -math.inf)
    return mask
