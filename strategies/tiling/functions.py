"""The computations of a Linear and an Embedding whose weight comes in tiles.

A tile's output columns, or looked-up rows, depend on no other tile, so forward passes add nothing
up: results are those of the whole layer. Only the gradient of a Linear's input is a sum over tiles;
it is kept in fp32 at least.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from typing_extensions import override

from boltmesh.strategies.tiling.plan import TilePlan
from boltmesh.strategies.tiling.weight import TiledWeight


class LinearFunction(Function):
    """``x @ weight.T + bias``."""

    @staticmethod
    @override
    def forward(
        ctx: Any, inputs: Tensor, shard: Tensor, bias: Tensor | None, weight: TiledWeight
    ) -> Tensor:
        """Compute in the inputs' type; the shard is there for autograd to know it."""
        plan = weight.plan
        flat = inputs.reshape(-1, inputs.shape[-1])
        outputs = flat.new_empty(flat.shape[0], plan.rows)
        for tile, rows in weight.tiles(flat.dtype):
            if bias is None:
                part = flat @ rows.t()
            else:
                own_bias = _take(bias.unsqueeze(0), plan, tile).squeeze(0)
                part = torch.addmm(own_bias, flat, rows.t())
            _put(outputs, part, plan, tile)
        ctx.save_for_backward(flat)
        ctx.weight, ctx.inputs_shape = weight, inputs.shape
        return outputs.view(*inputs.shape[:-1], plan.rows)

    @staticmethod
    @once_differentiable
    @override
    def backward(ctx: Any, grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        (flat,) = ctx.saved_tensors
        weight: TiledWeight = ctx.weight
        needs_inputs, needs_weight, needs_bias, _ = ctx.needs_input_grad
        grads = grad_outputs.reshape(-1, weight.plan.rows)
        grad_inputs: Tensor | None = None
        gradient = weight.gradient() if needs_weight else None
        if needs_inputs:
            wide = torch.promote_types(flat.dtype, torch.float32)
            grad_inputs = torch.zeros(flat.shape, dtype=wide, device=flat.device)
            for tile, rows in weight.tiles(flat.dtype):
                part = _take(grads, weight.plan, tile)
                if wide is flat.dtype:
                    grad_inputs.addmm_(part, rows)
                else:
                    grad_inputs += part @ rows
                if gradient is not None:
                    gradient.add(tile, part.t() @ flat)
            grad_inputs = grad_inputs.to(flat.dtype).view(ctx.inputs_shape)
        elif gradient is not None:
            for tile in range(weight.plan.count):
                gradient.add(tile, _take(grads, weight.plan, tile).t() @ flat)
        return (
            grad_inputs,
            None if gradient is None else gradient.finish(),
            grads.sum(0) if needs_bias else None,
            None,
        )


class EmbeddingFunction(Function):
    """``weight[indices]``."""

    @staticmethod
    @override
    def forward(
        ctx: Any, indices: Tensor, shard: Tensor, padding_idx: int | None, weight: TiledWeight
    ) -> Tensor:
        """Look each index up in the tile that has it."""
        flat = indices.reshape(-1)
        lookup = _Lookup(flat, weight.plan)
        outputs = torch.empty(
            flat.numel(), *shard.shape[1:], dtype=shard.dtype, device=indices.device
        )
        for tile, rows in weight.tiles(shard.dtype):
            positions, places = lookup.of(tile)
            outputs[positions] = rows[places]
        ctx.save_for_backward(flat)
        ctx.weight, ctx.padding_idx = weight, padding_idx
        return outputs.view(*indices.shape, *shard.shape[1:])

    @staticmethod
    @once_differentiable
    @override
    def backward(ctx: Any, grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        (flat,) = ctx.saved_tensors
        weight: TiledWeight = ctx.weight
        if not ctx.needs_input_grad[1]:
            return None, None, None, None
        columns = weight.parameter.shape[1:]
        grads = grad_outputs.reshape(-1, *columns)
        if ctx.padding_idx is not None:
            is_kept = flat != ctx.padding_idx
            flat, grads = flat[is_kept], grads[is_kept]
        lookup = _Lookup(flat, weight.plan)
        gradient = weight.gradient()
        wide = torch.promote_types(grads.dtype, torch.float32)
        for tile in range(weight.plan.count):
            positions, places = lookup.of(tile)
            length = weight.plan.piece(tile)[1] * weight.plan.ranks
            rows = torch.zeros(length, *columns, dtype=wide, device=grads.device)
            gradient.add(tile, rows.index_add_(0, places, grads[positions].to(wide)))
        return None, gradient.finish(), None, None


class _Lookup:
    """Which positions of a flat list of indices are answered by which tile."""

    def __init__(self, indices: Tensor, plan: TilePlan) -> None:
        self._plan = plan
        self._shard = indices // plan.shard_rows
        self._row = indices % plan.shard_rows
        is_row = (indices >= 0) & (indices < plan.rows)
        tile = torch.where(is_row, self._row // plan.tile_rows, plan.count)
        self._order = tile.argsort(stable=True)
        # The only wait for the device.
        *counts, num_outside = tile.bincount(minlength=plan.count + 1).tolist()
        if num_outside:
            raise IndexError(f"{num_outside} indices are none of the embedding's {plan.rows} rows")
        self._ends = [sum(counts[: i + 1]) for i in range(plan.count)]
        self._starts = [end - count for end, count in zip(self._ends, counts, strict=True)]

    def of(self, tile: int) -> tuple[Tensor, Tensor]:
        """Return the positions, and where in the gathered tile each finds its row."""
        positions = self._order[self._starts[tile] : self._ends[tile]]
        start, length = self._plan.piece(tile)
        return positions, self._shard[positions] * length + self._row[positions] - start


def _put(outputs: Tensor, part: Tensor, plan: TilePlan, tile: int) -> None:
    """Write a tile's columns to where the whole layer has them."""
    start, length = plan.piece(tile)
    if plan.is_even:
        whole = outputs.view(-1, plan.ranks, plan.shard_rows)
        whole[:, :, start : start + length] = part.view(-1, plan.ranks, length)
        return
    for within, first, count in plan.runs(tile):
        outputs[:, first : first + count] = part[:, within : within + count]


def _take(whole: Tensor, plan: TilePlan, tile: int) -> Tensor:
    """Return a tile's columns in the order of the gathered tile, zero where that is padding."""
    start, length = plan.piece(tile)
    if plan.is_even:
        columns = whole.view(-1, plan.ranks, plan.shard_rows)[:, :, start : start + length]
        return columns.reshape(-1, plan.ranks * length)
    part = whole.new_zeros(whole.shape[0], plan.ranks * length)
    for within, first, count in plan.runs(tile):
        part[:, within : within + count] = whole[:, first : first + count]
    return part
