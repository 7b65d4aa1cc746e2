"""Divides the data axis into ranks that share one copy of the model, and ranks that hold copies."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from boltmesh.axes import divisors
from boltmesh.errors import LayoutError
from boltmesh.strategies.engine.data_axis import AxisContext
from boltmesh.telemetry.writer.null_recorder import NullRecorder
from boltmesh.telemetry.writer.recorder import Recorder


@dataclass(frozen=True)
class ShardMesh:
    """The data axis as a mesh for ``fully_shard``, and its groups."""

    mesh: DeviceMesh
    """One dimension, or ``(replicate, shard)`` when several groups hold the same shards."""
    shard_group: ProcessGroup
    """The ranks that hold one copy together; the whole axis without replication."""
    replica_group: ProcessGroup | None
    """The ranks that hold the same shards, None without replication."""

    @property
    def shard_size(self) -> int:
        """Number of ranks over which a copy is sharded."""
        return self.shard_group.size()

    def name_groups(self, recorder: Recorder | NullRecorder) -> None:
        """Attribute the traffic of these groups to the data axis."""
        for group in (self.shard_group, self.replica_group):
            if group is not None:
                recorder.name_group(group, "data")

    @classmethod
    def build(cls, context: AxisContext, shard_size: int | str | None) -> "ShardMesh":
        """Divide the data axis into groups that shard, and groups that replicate across them.

        Collective over all ranks. Neighbours share a copy, so that gathers stay inside a node.

        Raises:
            LayoutError: When ``shard_size`` does not divide the axis, or a node's share of it.
        """
        group, device_type = context.group, context.device.type

        def rows(ranks: Sequence[int]) -> list[list[int]]:
            return divide_into_shards(ranks, shard_size, context.ranks_per_node)

        def columns(ranks: Sequence[int]) -> list[list[int]]:
            return [list(each) for each in zip(*rows(ranks), strict=True)]

        own_rows = rows(dist.get_process_group_ranks(group))
        if len(own_rows) == 1:
            return cls(DeviceMesh.from_group(group, device_type), group, None)
        shards = context.cut_group(rows, "data_shard")
        replicas = context.cut_group(columns, "data_replicate")
        mesh = DeviceMesh.from_group(
            [replicas, shards],
            device_type,
            mesh=torch.tensor(own_rows),
            mesh_dim_names=("replicate", "shard"),
        )
        return cls(mesh, shards, replicas)


def divide_into_shards(
    ranks: Sequence[int], asked: int | str | None, ranks_per_node: int
) -> list[list[int]]:
    """Divide the global ranks of the data axis into groups that hold a copy together.

    Raises:
        LayoutError: See ``choose_shard_size``.
    """
    size = choose_shard_size(ranks, asked, ranks_per_node)
    return [list(ranks[start : start + size]) for start in range(0, len(ranks), size)]


def choose_shard_size(ranks: Sequence[int], asked: int | str | None, ranks_per_node: int) -> int:
    """Return the number of ranks to shard over; ``ranks`` are the data axis's global ranks.

    Raises:
        LayoutError: When they cannot be cut like that.
    """
    count = len(ranks)
    if asked is None:
        return count
    if asked != "node":
        if count % int(asked):
            raise LayoutError(
                f"shard_size={asked} cuts the {count} ranks of the data axis into groups of "
                f"unequal size. Use {' or '.join(map(str, divisors(count)))}."
            )
        return int(asked)
    nodes = Counter(rank // ranks_per_node for rank in ranks)
    if len(set(nodes.values())) > 1:
        raise LayoutError(
            f"shard_size='node' needs as many ranks of the data axis on every node, and there are "
            f"{', '.join(map(str, nodes.values()))}. Use a number that divides {count}."
        )
    return nodes[ranks[0] // ranks_per_node]
