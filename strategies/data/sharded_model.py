"""Puts ``fully_shard`` on a LightningModule, and keeps what is known of the result."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from lightning.pytorch import LightningModule
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.nn import Module, Parameter

from boltmesh.strategies.access import know_units
from boltmesh.strategies.building.materialize import prepare_unit
from boltmesh.strategies.data.autocast import full_precision_modules, is_any_cast
from boltmesh.strategies.data.axis import AxisContext
from boltmesh.strategies.data.buffers import BufferSync
from boltmesh.strategies.data.evaluation import Attendance, Gather
from boltmesh.strategies.data.host_collectives import HostCollectives
from boltmesh.strategies.data.refusals import (
    refuse_lost_write,
    refuse_mixed_types,
    refuse_parameters,
)
from boltmesh.strategies.data.root import Root
from boltmesh.strategies.data.scalars import Scalars, scalars_of
from boltmesh.strategies.data.shard_mesh import ShardMesh
from boltmesh.strategies.data.shard_options import ShardOptions
from boltmesh.strategies.data.shard_parking import open_parking, park_unit
from boltmesh.strategies.data.successors import Successors
from boltmesh.strategies.data.units import find_units
from boltmesh.strategies.tiling.apply import apply_tiling
from boltmesh.strategies.tiling.weight import TiledWeight
from boltmesh.strategies.torch_compat import (
    StepUnits,
    Writes,
    gather_for_training,
    is_gathered,
    keep_for_derivatives,
    share_hooks,
)


@dataclass
class ShardedModel:
    """A LightningModule whose parameters are shards."""

    module: LightningModule
    root: Root
    """What the forward pass goes through; a unit itself."""
    units: dict[str, FSDPModule]
    """What is gathered as one, by name within the LightningModule; the root's is empty."""
    cast: set[str]
    """Names of the units that are gathered in what autocast computes in."""
    mesh: ShardMesh
    attendance: Attendance
    buffers: BufferSync
    tiled: list[TiledWeight]
    """Weights that no unit gathers: their layers do, tile by tile."""
    scalars: Scalars
    """Parameters that cannot be sharded."""
    step_units: StepUnits
    """All units, for what every step does with them."""
    writes: Writes | None
    """To parameters while they are gathered; None where the axis gathers by itself."""
    successors: Successors
    """Of the parameters that the module's author made."""
    on_host: HostCollectives | None
    """How units are gathered and reduced on the CPU; None on a device."""
    absent: frozenset[Parameter] = frozenset()
    """Parameters of which the ranks of the data axis have no values: other stages hold them."""

    @property
    def root_unit(self) -> FSDPModule:
        """The root as FSDP2 sees it."""
        return self.units[""]

    def reshard_stale(self) -> None:
        """Free gathered copies of units whose shards somebody has written to since."""
        stale = {} if self.writes is None else self.writes.stale()
        for unit in dict.fromkeys(stale.values()):
            unit.reshard()

    def refuse_stale(self) -> None:
        """Refuse a loss of gathered copies whose shards somebody has written to since.

        Raises:
            ConfigError: Naming a parameter.
        """
        for name in {} if self.writes is None else self.writes.stale():
            refuse_lost_write(name)

    def reshard(self) -> None:
        """Free every gathered copy, so that the next use gathers what the shards are now."""
        self.step_units.reshard()
        self.scalars.put_back()

    def give_back_memory(self) -> None:
        """Return to the system what no reduction uses now."""
        if self.on_host is not None:
            self.on_host.give_back()


def shard_model(
    module: LightningModule, options: ShardOptions, context: AxisContext
) -> ShardedModel:
    """Shard a module in place.

    Collective over the data axis: every rank gets its share of the first rank's parameters.
    """
    refuse_parameters(module, has_offload=options.has_offload)
    mesh = build_mesh(options, context)
    is_freed = options.stage == 3
    units = find_units(module, options.blocks)
    cast: set[str] = set()
    adopted: list[Module] = []
    tiled: list[TiledWeight] = []
    parking = open_parking(options, context)
    successors = Successors()
    for name, unit in reversed(units.items()):  # from the inside out
        refuse_mixed_types(name, unit)
        prepare_unit(unit, device=context.device, group=context.group, name=name)
        left_out: list[Module] = []
        with successors.of_parameters(unit):
            in_tiles = _tile(unit, name, options, mesh)
            tiled += in_tiles
            if context.compute_dtype is not None and is_any_cast(unit):
                cast.add(name)
                left_out = full_precision_modules(unit)
                adopted += left_out
            fully_shard(
                unit,
                mesh=mesh.mesh,
                reshard_after_forward=is_freed,
                mp_policy=precision_policy(context.compute_dtype, is_cast=name in cast),
                ignored_params={
                    *(p for each in left_out for p in each.parameters(recurse=False)),
                    *(each.parameter for each in tiled),
                    *scalars_of(unit),
                },
            )
        park_unit(parking, module, unit, in_tiles, context)
    refuse_mixed_types("", module)
    prepare_unit(module, device=context.device, group=context.group)
    with successors.of_parameters(module):
        in_tiles = _tile(module, "", options, mesh)
        tiled += in_tiles
        root = Root(module, adopted)
        fully_shard(
            root,
            mesh=mesh.mesh,
            # None: the root stays gathered from its forward on, as it is needed again at once.
            reshard_after_forward=None if is_freed else False,
            mp_policy=precision_policy(context.compute_dtype, is_cast=False),
            ignored_params={*(each.parameter for each in tiled), *scalars_of(module)},
        )
        scalars = Scalars(module, mesh.mesh, context.group)
    successors.take_places(module)
    park_unit(parking, module, root, in_tiles, context)
    sharded = as_units([*units.items(), ("", root)])
    know_units(sharded.values())
    keep_for_derivatives(
        list(reversed(sharded.values())),  # the root, which nearly every loss goes through, first
        lambda: [*(each.parameter for each in tiled), *scalars.parameters],
    )
    gathers = _gathers_of(sharded, tiled, context.compute_dtype, is_freed=is_freed)
    return ShardedModel(
        module,
        root,
        sharded,
        cast,
        mesh,
        Attendance(gathers, context.group, context.device),
        BufferSync(module, context.group),
        tiled,
        scalars,
        StepUnits(sharded.values()),
        Writes(sharded.values(), refuse_lost_write),
        successors,
        HostCollectives.where_needed(
            sharded.values(), context.device, takes_gradients_away=options.has_offload
        ),
    )


def build_mesh(options: ShardOptions, context: AxisContext) -> ShardMesh:
    """Cut the data axis into groups that shard. Collective over it."""
    return ShardMesh.build(
        context.group,
        context.device,
        shard_size=options.shard_size,
        ranks_per_node=context.ranks_per_node,
        timeout=context.timeout,
    )


def as_units(modules: Iterable[tuple[str, Module]]) -> dict[str, FSDPModule]:
    """Return modules of ``fully_shard``, which changes their class, as what they are now."""
    units: dict[str, FSDPModule] = {}
    for name, each in modules:
        assert isinstance(each, FSDPModule)
        gather_for_training(each)
        share_hooks(each)
        units[name] = each
    return units


def _tile(unit: Module, name: str, options: ShardOptions, mesh: ShardMesh) -> list[TiledWeight]:
    if options.tile_linear_bytes is None:
        return []
    return apply_tiling(unit, options.tile_linear_bytes, mesh.mesh, name=name)


def precision_policy(compute_dtype: torch.dtype | None, *, is_cast: bool) -> MixedPrecisionPolicy:
    """Return in which types a unit is gathered and reduced; ``compute_dtype`` is autocast's.

    Blocks are gathered in that type, for half the traffic and memory, the root as it is. Gradients
    are reduced in fp32. Inputs stay as they are: autocast decides about those.
    """
    if compute_dtype is None:
        return MixedPrecisionPolicy(cast_forward_inputs=False)
    return MixedPrecisionPolicy(
        param_dtype=compute_dtype if is_cast else None,
        reduce_dtype=torch.float32,
        cast_forward_inputs=False,
    )


def _gathers_of(
    units: Mapping[str, FSDPModule],
    tiled: Iterable[TiledWeight],
    compute_dtype: torch.dtype | None,
    *,
    is_freed: bool,
) -> dict[Module, Gather]:
    """Return what is gathered, by the module in whose forward that happens.

    Args:
        units: By name; the root, whose name is empty, stays gathered.
        tiled: What no unit gathers.
        compute_dtype: What autocast computes in.
        is_freed: Whether units are freed behind their forward.
    """
    gathers: dict[Module, Gather] = {}
    for name, unit in units.items():
        assert isinstance(unit, Module)
        gathers[unit] = _gather_of(unit, is_freed=is_freed and name != "")
    for weight in tiled:
        for layer in weight.layers:
            dtype = weight.gathered_dtype(layer, compute_dtype)
            gathers[layer] = Gather(lambda: True, partial(weight.attend, dtype))
    return gathers


def _gather_of(unit: FSDPModule, *, is_freed: bool) -> Gather:
    def take_part() -> None:
        unit.unshard()
        if is_freed:
            unit.reshard()

    return Gather(lambda: not is_gathered(unit), take_part)
