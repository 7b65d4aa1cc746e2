"""Runs a unit's large Linear and Embedding layers in tiles.

The class of a layer, its parameters' names and its hooks do not change. Its weight becomes a
DTensor that ``fully_shard`` ignores, and its forward gathers tile by tile.

A tile's output columns, or rows of a lookup, do not depend on other tiles, so forward passes sum
nothing: results equal those of the whole layer. Only the gradient of a Linear's input is a sum over
tiles; it is accumulated at least in fp32.

``TiledWeight`` is a weight that is never gathered at once: its shard, and its tiles one after the
other.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from math import prod
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.nn import Parameter
from typing_extensions import override

from boltmesh.errors import ConfigError
from boltmesh.strategies.offload.shard_tensor import GatheredSource, OffloadedShard
from boltmesh.strategies.tiling.plan import TilePlan
from boltmesh.strategies.torch_compat.autograd import has_gradient_hooks, not_compiled
from boltmesh.strategies.torch_compat.communication import all_gather_single, reduce_scatter_single
from boltmesh.strategies.torch_compat.tensors import is_composite, local_tensor


@dataclass(eq=False)
class TiledWeight:
    """A parameter ``(rows, ...)``, sharded by rows as ``fully_shard`` does it, gathered in tiles.

    Shapes below use R, the ranks of the shard group, and the numbers of ``plan``: a gathered tile
    is ``(R * length, ...)``, with ``length`` rows of each shard in the order of ranks; rows that
    pad a shard are zeros.
    """

    name: str
    parameter: Parameter
    """A DTensor under the original name, for optimizers and checkpoints."""
    plan: TilePlan
    mesh: DeviceMesh
    """One dimension, or ``(replicate, shard)``."""
    layers: list[nn.Module] = field(default_factory=list)
    """Layers that compute with it: several if it is tied."""
    note: Callable[[str], None] = field(default=lambda _: None)
    """Called with a description of each collective before it starts."""

    @classmethod
    def shard(cls, name: str, whole: Parameter, max_bytes: int, mesh: DeviceMesh) -> "TiledWeight":
        """Keep this rank's rows of a parameter that every rank holds in full. Local.

        Args:
            name: Dotted name of the parameter.
            whole: ``(rows, ...)``, equal on all ranks.
            max_bytes: Largest gathered tile, in bytes of the parameter's dtype.
            mesh: One dim, or ``(replicate, shard)``.
        """
        dimension = mesh.ndim - 1
        ranks, rank = mesh.size(dimension), mesh.get_local_rank(dimension)
        plan = TilePlan.of(whole.shape[0], whole[0].nbytes, ranks, max_bytes)
        first = min(rank * plan.shard_rows, plan.rows)
        local = whole.detach()[first : first + plan.shard_rows].clone()
        value = _distribute(local, mesh, whole)
        parameter = Parameter(value, requires_grad=whole.requires_grad)
        vars(parameter).update(vars(whole))
        return cls(name, parameter, plan, mesh)

    @property
    def shard_group(self) -> ProcessGroup:
        """The ranks that together hold one copy."""
        return self.mesh.get_group(self.mesh.ndim - 1)

    @property
    def num_copies(self) -> int:
        """Number of groups that hold the same shards."""
        return self.mesh.size(0) if self.mesh.ndim > 1 else 1

    @property
    def shard_numel(self) -> int:
        """Elements of the largest shard."""
        return self.plan.shard_rows * prod(self.parameter.shape[1:])

    @property
    def reduced_dtype(self) -> torch.dtype:
        """Dtype in which gradients are reduced."""
        return torch.promote_types(self.parameter.dtype, torch.float32)

    def gathered_dtype(self, layer: nn.Module, autocast_dtype: torch.dtype | None) -> torch.dtype:
        """Dtype of a layer's gathered tiles; autocast casts for matrix products, not lookups."""
        dtype = self.parameter.dtype
        if autocast_dtype is None or isinstance(layer, nn.Embedding) or dtype == torch.float64:
            return dtype
        return autocast_dtype

    def kept_dtype(self, autocast_dtype: torch.dtype | None) -> torch.dtype:
        """Dtype of a copy of the shard from which every layer can gather."""
        dtypes = {self.gathered_dtype(each, autocast_dtype) for each in self.layers}
        return dtypes.pop() if len(dtypes) == 1 else self.parameter.dtype

    def attend(self, dtype: torch.dtype) -> None:
        """Gather all tiles for the other ranks, without using them here. Collective."""
        for _ in self.tiles(dtype):
            pass

    def tiles(self, dtype: torch.dtype) -> Iterator[tuple[int, Tensor]]:
        """Yield each tile's number and its rows, ``(R * length, ...)`` in ``dtype``.

        Collective over the shard group. The next tile is gathered while one is used, so two exist
        at a time. A tile is valid until the next iteration.
        """
        if self.plan.ranks == 1:
            for tile in range(self.plan.count):
                yield tile, self._piece(tile, dtype)
            return
        self.note(f"called all_gather of '{self.name}' in tiles")
        size = (self.plan.ranks * self.plan.tile_rows, *self.parameter.shape[1:])
        device = self.parameter.device
        buffers = [torch.empty(size, dtype=dtype, device=device) for _ in range(2)]
        coming = self._gather(0, buffers[0])
        for tile in range(self.plan.count):
            gathered, _, work = coming
            if tile + 1 < self.plan.count:
                coming = self._gather(tile + 1, buffers[(tile + 1) % 2])
            work.wait()
            yield tile, gathered

    def _gather(self, tile: int, buffer: Tensor) -> tuple[Tensor, Tensor, dist.Work]:
        """Start an all-gather; the caller keeps its input, the second value, until it ends."""
        piece = self._piece(tile, buffer.dtype)
        gathered = buffer[: self.plan.ranks * piece.shape[0]]
        work = all_gather_single(gathered, piece, self.shard_group, async_op=True)
        assert work is not None
        return gathered, piece, work

    def _piece(self, tile: int, dtype: torch.dtype) -> Tensor:
        """Return this rank's rows of a tile, ``(length, ...)`` on the device, zeros for padding."""
        start, length = self.plan.piece(tile)
        local = local_tensor(self.parameter.detach())
        if isinstance(local, OffloadedShard):
            assert isinstance(local.source, GatheredSource)
            columns = prod(self.parameter.shape[1:])
            flat = local.source.fetch_part(start * columns, (start + length) * columns)
            return flat.view(length, *self.parameter.shape[1:]).to(dtype)
        piece = local[start : start + length].to(dtype)
        if piece.shape[0] == length:
            return piece
        padded = piece.new_zeros(length, *piece.shape[1:])
        padded[: piece.shape[0]] = piece
        return padded

    def gradient(self) -> "TiledGradient":
        """Return an empty gradient of this rank's shard, to which tiles are added."""
        if self.plan.ranks > 1:
            self.note(f"reduced the gradients of '{self.name}' in tiles")
        return TiledGradient(self)


class TiledGradient:
    """The gradient of one shard, each tile reduced in fp32 while the next one is computed."""

    def __init__(self, weight: TiledWeight) -> None:
        self.weight = weight
        # Padded like shards: copies of the model that average it send equal sizes on all ranks.
        self._value = torch.zeros(
            weight.plan.shard_rows,
            *weight.parameter.shape[1:],
            dtype=weight.reduced_dtype,
            device=weight.parameter.device,
        )
        self._pending: tuple[int, Tensor, Tensor, dist.Work | None] | None = None

    def add(self, tile: int, rows: Tensor) -> None:
        """Add this rank's gradient of a gathered tile. Collective over the shard group.

        Args:
            tile: Number of the tile; each is added once.
            rows: ``(R * length, ...)``, zeros in rows of padding.
        """
        self._settle()
        rows = rows.to(self._value.dtype)
        if self.weight.plan.ranks == 1:
            self._pending = tile, rows, rows, None
            return
        _, length = self.weight.plan.piece(tile)
        reduced = rows.new_empty(length, *rows.shape[1:])
        work = reduce_scatter_single(reduced, rows, group=self.weight.shard_group, async_op=True)
        self._pending = tile, rows, reduced, work

    def finish(self) -> Tensor:
        """Return the gradient of the shard, averaged over the mesh. Collective over it.

        Returns:
            A DTensor of the parameter's shape, dtype and placements.
        """
        self._settle()
        weight = self.weight
        if weight.num_copies > 1:
            dist.all_reduce(self._value, group=weight.mesh.get_group(0))
        self._value /= weight.plan.ranks * weight.num_copies
        local = self._value[: local_tensor(weight.parameter.detach()).shape[0]]
        return _distribute(local.to(weight.parameter.dtype), weight.mesh, weight.parameter)

    def _settle(self) -> None:
        if self._pending is None:
            return
        tile, _, reduced, work = self._pending
        if work is not None:
            work.wait()
        start, length = self.weight.plan.piece(tile)
        self._value[start : start + length] = reduced
        self._pending = None


def _distribute(local: Tensor, mesh: DeviceMesh, whole: Tensor) -> DTensor:
    placements = [*([Replicate()] if mesh.ndim > 1 else []), Shard(0)]
    return DTensor.from_local(
        local, mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride()
    )


class LinearFunction(Function):
    """``inputs @ weight.T + bias``, ``(..., in)`` to ``(..., out)``, with a tiled weight."""

    @staticmethod
    @override
    def forward(
        ctx: Any, inputs: Tensor, shard: Tensor, bias: Tensor | None, weight: TiledWeight
    ) -> Tensor:
        """Compute in the dtype of the inputs. ``shard`` is only there for autograd to track."""
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
    """``weight[indices]``, int64 ``(...)`` to ``(..., width)``, with a tiled weight."""

    @staticmethod
    @override
    def forward(
        ctx: Any, indices: Tensor, shard: Tensor, padding_idx: int | None, weight: TiledWeight
    ) -> Tensor:
        """Look each index up in the tile that contains it."""
        flat = indices.reshape(-1)
        lookup = _TileIndex(flat, weight.plan)
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
        lookup = _TileIndex(flat, weight.plan)
        gradient = weight.gradient()
        wide = torch.promote_types(grads.dtype, torch.float32)
        for tile in range(weight.plan.count):
            positions, places = lookup.of(tile)
            length = weight.plan.piece(tile)[1] * weight.plan.ranks
            rows = torch.zeros(length, *columns, dtype=wide, device=grads.device)
            gradient.add(tile, rows.index_add_(0, places, grads[positions].to(wide)))
        return None, gradient.finish(), None, None


class _TileIndex:
    """The positions of a flat list of indices that each tile contains."""

    def __init__(self, indices: Tensor, plan: TilePlan) -> None:
        self._plan = plan
        self._shard = indices // plan.shard_rows
        self._row = indices % plan.shard_rows
        is_row = (indices >= 0) & (indices < plan.rows)
        tile = torch.where(is_row, self._row // plan.tile_rows, plan.count)
        self._order = tile.argsort(stable=True)
        # The only synchronization with the device.
        *counts, num_outside = tile.bincount(minlength=plan.count + 1).tolist()
        if num_outside:
            raise IndexError(f"{num_outside} indices are none of the embedding's {plan.rows} rows")
        self._ends = [sum(counts[: i + 1]) for i in range(plan.count)]
        self._starts = [end - count for end, count in zip(self._ends, counts, strict=True)]

    def of(self, tile: int) -> tuple[Tensor, Tensor]:
        """Return a tile's positions in the list, and the row of each in the gathered tile."""
        positions = self._order[self._starts[tile] : self._ends[tile]]
        start, length = self._plan.piece(tile)
        return positions, self._shard[positions] * length + self._row[positions] - start


def _put(outputs: Tensor, part: Tensor, plan: TilePlan, tile: int) -> None:
    """Write a tile's columns to their places in ``outputs``, ``(positions, rows)``."""
    start, length = plan.piece(tile)
    if plan.is_even:
        whole = outputs.view(-1, plan.ranks, plan.shard_rows)
        whole[:, :, start : start + length] = part.view(-1, plan.ranks, length)
        return
    for within, first, count in plan.runs(tile):
        outputs[:, first : first + count] = part[:, within : within + count]


def _take(whole: Tensor, plan: TilePlan, tile: int) -> Tensor:
    """Return a tile's columns of ``(positions, rows)``: ``(positions, R * length)``."""
    start, length = plan.piece(tile)
    if plan.is_even:
        columns = whole.view(-1, plan.ranks, plan.shard_rows)[:, :, start : start + length]
        return columns.reshape(-1, plan.ranks * length)
    part = whole.new_zeros(whole.shape[0], plan.ranks * length)
    for within, first, count in plan.runs(tile):
        part[:, within : within + count] = whole[:, first : first + count]
    return part


_READ_BY_PARENTS = (nn.MultiheadAttention,)
"""Modules that use their children's weights and never call the children."""


def apply_tiling(
    unit: nn.Module, max_bytes: int, mesh: DeviceMesh, *, name: str = ""
) -> list[TiledWeight]:
    """Make the large layers of a unit run in tiles.

    Each ``nn.Linear`` and ``nn.Embedding`` with a weight of more than ``max_bytes`` is sharded
    here; pass the parameters to ``fully_shard`` as ``ignored_params``. Layers that share such a
    weight are all tiled. Call it when the unit's parameters are real and equal on every rank, and
    before the unit is sharded; modules that are sharded already are not touched.

    Gradients are averaged over the mesh in every backward pass, as in stage 3, so that ``.grad`` is
    that of the shard.

    Args:
        unit: A module.
        max_bytes: Largest gathered tile, in the dtype in which the weight is kept. Two exist at a
            time.
        mesh: As for ``fully_shard``.
        name: The unit's dotted name.

    Raises:
        ConfigError: If a layer does something that is not possible in tiles.
    """
    tiled: dict[Parameter, TiledWeight] = {}
    users: dict[Parameter, list[tuple[str, nn.Module]]] = {}
    for path, module in _own_modules(unit, name, set()):
        for key, parameter in module.named_parameters(recurse=False):
            users.setdefault(parameter, []).append((f"{path}.{key}".lstrip("."), module))
        whole = _tileable_weight(module)
        if whole is not None and whole.nbytes > max_bytes and whole not in tiled:
            _check(module, path)
            tiled[whole] = TiledWeight.shard(f"{path}.weight".lstrip("."), whole, max_bytes, mesh)
    for whole, weight in tiled.items():
        for path, module in users[whole]:
            if _tileable_weight(module) is not whole:
                raise ConfigError(
                    f"{weight.name!r} is run in tiles and is also {path!r}, which its "
                    f"{type(module).__name__} would need whole. Set tile_linear_bytes to "
                    f"{whole.nbytes} or more, or use the weight in a Linear or an Embedding there."
                )
            _check(module, path.rpartition(".")[0])
            module.weight = weight.parameter
            weight.layers.append(module)
            module.forward = partial(_run_in_tiles, module, weight)
    if tiled:
        _disable_fused_layers(unit)
    return list(tiled.values())


def _disable_fused_layers(unit: nn.Module) -> None:
    """Keep torch's transformer layers from reading the weights of their Linears in evaluation."""
    for module in unit.modules():
        if isinstance(module, nn.TransformerEncoderLayer):
            parts = (module.linear1, module.linear2)
            if any(isinstance(each.weight, DTensor) for each in parts):
                # There is no other switch; it applies to the whole process.
                torch.backends.mha.set_fastpath_enabled(False)


def _tileable_weight(module: nn.Module) -> Parameter | None:
    """Return the weight of a plain Linear or Embedding that is not sharded yet."""
    is_plain = (isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward) or (
        isinstance(module, nn.Embedding) and type(module).forward is nn.Embedding.forward
    )
    if not is_plain or "forward" in vars(module):
        return None
    weight = dict(module.named_parameters(recurse=False)).get("weight")
    if weight is None or isinstance(weight, DTensor) or is_composite(weight):
        return None
    return weight


def _own_modules(
    module: nn.Module, path: str, seen: set[nn.Module]
) -> Iterator[tuple[str, nn.Module]]:
    if module in seen:
        return
    seen.add(module)
    yield path, module
    for key, child in module.named_children():
        if not isinstance(child, FSDPModule) and not isinstance(module, _READ_BY_PARENTS):
            yield from _own_modules(child, f"{path}.{key}".lstrip("."), seen)


def _check(module: nn.Module, path: str) -> None:
    weight = module.weight
    assert isinstance(weight, Tensor)
    if has_gradient_hooks(weight):
        raise ConfigError(
            f"The weight of {path!r} is larger than tile_linear_bytes and has a hook on its "
            f"gradient, which no rank ever has whole. Set tile_linear_bytes to {weight.nbytes} or "
            f"more, or change the shard's gradient in on_after_backward."
        )
    if not isinstance(module, nn.Embedding):
        return
    for option in ("max_norm", "scale_grad_by_freq", "sparse"):
        if getattr(module, option):
            raise ConfigError(
                f"{path!r} is larger than tile_linear_bytes and has {option}="
                f"{getattr(module, option)}, which needs its weight whole. Leave {option} out, or "
                f"set tile_linear_bytes to {module.weight.nbytes} or more."
            )


@not_compiled
def _run_in_tiles(layer: nn.Module, weight: TiledWeight, inputs: Tensor) -> Tensor:
    """Run a layer that has a tiled weight."""
    if isinstance(layer, nn.Embedding):
        looked_up: Tensor = EmbeddingFunction.apply(  # type: ignore[no-untyped-call]
            inputs, weight.parameter, layer.padding_idx, weight
        )
        return looked_up
    assert isinstance(layer, nn.Linear)
    kind, bias = inputs.device.type, cast("Tensor | None", layer.bias)
    if torch.is_autocast_enabled(kind):
        dtype = weight.gathered_dtype(layer, torch.get_autocast_dtype(kind))
        inputs = inputs.to(dtype)
        bias = None if bias is None else bias.to(dtype)
    with torch.autocast(kind, enabled=False):
        outputs: Tensor = LinearFunction.apply(  # type: ignore[no-untyped-call]
            inputs, weight.parameter, bias, weight
        )
    return outputs
