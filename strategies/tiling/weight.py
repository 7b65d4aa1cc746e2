"""A weight that is never gathered at once: its shard, and its tiles one after the other."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.nn import Parameter

from boltmesh.strategies.offload.shard_tensor import GatheredSource, OffloadedShard
from boltmesh.strategies.tiling.plan import TilePlan
from boltmesh.strategies.torch_compat.communication import all_gather_single, reduce_scatter_single
from boltmesh.strategies.torch_compat.tensors import local_tensor


@dataclass(eq=False)
class TiledWeight:
    """A parameter sharded by rows, as ``fully_shard`` does it, and gathered in tiles."""

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
        """Keep this rank's rows of a parameter that every rank holds in full."""
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
        """Take part in one pass over the tiles without using them. Collective."""
        for _ in self.tiles(dtype):
            pass

    def tiles(self, dtype: torch.dtype) -> Iterator[tuple[int, Tensor]]:
        """Yield each tile's number and its rows from every shard, gathered in ``dtype``.

        Collective. The next tile is gathered while one is used, so two exist at a time. A tile is
        valid until the next iteration.
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
        """Start an all-gather; its input has to live until it ends."""
        piece = self._piece(tile, buffer.dtype)
        gathered = buffer[: self.plan.ranks * piece.shape[0]]
        work = all_gather_single(gathered, piece, self.shard_group, async_op=True)
        assert work is not None
        return gathered, piece, work

    def _piece(self, tile: int, dtype: torch.dtype) -> Tensor:
        """This rank's rows of a tile on the compute device, padded to equal size on all ranks."""
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
        """Start the gradient of this rank's shard."""
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
        """Add this rank's gradient of a gathered tile, with zeros for padding. Collective."""
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
        """The gradient of the shard, averaged over all ranks, as a DTensor. Collective."""
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
