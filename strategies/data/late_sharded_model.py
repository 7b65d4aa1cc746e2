"""Puts ``fully_shard`` on what a rank of a pipeline holds, without its hooks.

FSDP2 gathers and reduces as forward and backward passes run through its units. A pipeline runs
microbatches of several stages in turns, in orders that FSDP2 does not know, splits backward passes,
and knows only at the end of a batch what its gradients are divided by. So the units are holders
around the blocks, which nobody calls: FSDP2 keeps the shards, and gathers and reduces when told.
"""

from lightning.pytorch import LightningModule
from torch.distributed.fsdp import fully_shard
from torch.nn import Module, Parameter

from boltmesh.strategies.access import know_units
from boltmesh.strategies.building.materialize import lay_in_rows
from boltmesh.strategies.data.axis import AxisContext
from boltmesh.strategies.data.buffers import BufferSync
from boltmesh.strategies.data.evaluation import Attendance
from boltmesh.strategies.data.host_collectives import HostCollectives
from boltmesh.strategies.data.late_replicas import share_state
from boltmesh.strategies.data.late_scalars import LateScalars
from boltmesh.strategies.data.refusals import refuse_mixed_types, refuse_parameters
from boltmesh.strategies.data.root import Root
from boltmesh.strategies.data.shard_mesh import ShardMesh
from boltmesh.strategies.data.shard_options import ShardOptions
from boltmesh.strategies.data.sharded_model import (
    ShardedModel,
    as_units,
    build_mesh,
    precision_policy,
)
from boltmesh.strategies.data.successors import Successors
from boltmesh.strategies.data.units import find_units
from boltmesh.strategies.torch_compat import StepUnits


class _Holder(Module):
    """A block under another module, whose forward pass nobody runs."""

    def __init__(self, block: Module) -> None:
        super().__init__()
        self.block = block


def shard_late(
    module: LightningModule, options: ShardOptions, context: AxisContext
) -> ShardedModel:
    """Shard in place what a rank holds of a module.

    Collective over the data axis: every rank gets its share of the first rank's parameters.
    """
    refuse_parameters(module, has_offload=options.has_offload)
    lay_in_rows(module.modules())
    held = set(module.parameters() if context.held is None else context.held)
    buffers = BufferSync(module, context.group, holds=context.holds_buffer)
    share_state([each for each in module.parameters() if each in held], buffers, context.group)
    mesh = build_mesh(options, context)
    absent = frozenset(each for each in module.parameters() if each not in held)
    # What the holders outside of one are not to shard.
    taken: set[Parameter] = {*absent, *(each for each in held if each.dim() == 0)}
    found: dict[str, Module] = {}
    successors = Successors()
    for name, unit in reversed(find_units(module, options.blocks).items()):  # from the inside out
        if all(each in taken for each in unit.parameters()):
            continue
        refuse_mixed_types(name, unit)
        with successors.of_parameters(unit):
            found[name] = _shard(_Holder(unit), mesh, taken)
        taken |= set(unit.parameters())
    refuse_mixed_types("", module)
    root = Root(module, found.values())
    with successors.of_parameters(module):
        found[""] = _shard(root, mesh, taken)
        scalars = LateScalars(module, mesh.mesh, context.group, absent=absent)
    successors.take_places(module)
    # What the optimizer steps first is gathered first; offload steps in the order of the model.
    units = as_units(reversed(found.items()))
    know_units(units.values())
    return ShardedModel(
        module,
        root,
        units,
        set(),
        mesh,
        Attendance({}, context.group, context.device),
        buffers,
        [],
        scalars,
        StepUnits(units.values()),
        None,
        successors,
        HostCollectives.where_needed(
            units.values(), context.device, takes_gradients_away=options.has_offload
        ),
        absent,
    )


def _shard(unit: Module, mesh: ShardMesh, ignored: set[Parameter]) -> Module:
    fully_shard(
        unit,
        mesh=mesh.mesh,
        reshard_after_forward=False,
        # Gradients of microbatches are added up in the type of what is gathered: that of the
        # parameters, also under autocast.
        mp_policy=precision_policy(None, is_cast=False),
        ignored_params=ignored,
    )
    return unit
