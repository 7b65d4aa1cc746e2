"""Puts ``fully_shard`` on a LightningModule.

``shard_model`` makes units of the repeated blocks, from the inside out, and one of the root, which
gathers parameters outside of the blocks. Training runs through ``root`` of the ``ShardedModel``.

- ``RootModule`` holds the LightningModule, so that the root's gather spans a ``training_step``.
- Parameters that autocast reads in fp32 are gathered by the root (``units``).
- With parameters on a disk the shards of a unit leave memory before the next unit is made
  (``open_staging``).
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from torch import Tensor
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import Module, ModuleList, Parameter
from typing_extensions import override

from boltmesh.strategies.data_parallel.all_to_all_params import AllToAllParams, all_to_all_params
from boltmesh.strategies.data_parallel.cpu_collectives import CpuCollectives
from boltmesh.strategies.data_parallel.options import ZeroOptions
from boltmesh.strategies.data_parallel.param_remap import ParamRemap
from boltmesh.strategies.data_parallel.param_state import (
    BufferSync,
    OwnedParams,
    PlainInStep,
    ScalarParams,
    has_no_rows,
    scalars_of,
)
from boltmesh.strategies.data_parallel.shard_mesh import ShardMesh
from boltmesh.strategies.data_parallel.uneven_inputs import JoinedGathers, UnitGather
from boltmesh.strategies.data_parallel.units import (
    find_units,
    full_precision_modules,
    is_any_cast,
    precision_policy,
)
from boltmesh.strategies.data_parallel.unsupported import (
    refuse_lost_write,
    refuse_mixed_types,
    refuse_parameters,
    refuse_write_to_copy,
)
from boltmesh.strategies.deferred_initialization.materialize import prepare_unit
from boltmesh.strategies.dry_run.no_side_effects import writes_to_first
from boltmesh.strategies.engine.data_axis import AxisContext
from boltmesh.strategies.object_collectives import noop
from boltmesh.strategies.offload.bucket_layout import held_alone, held_unit
from boltmesh.strategies.offload.state import Staging
from boltmesh.strategies.parameter_access import register_units
from boltmesh.strategies.patch import Around, Changes, patched
from boltmesh.strategies.tiling.apply import TiledWeight, apply_tiling
from boltmesh.strategies.torch_compat.fsdp import StepUnits, is_gathered, prepare_class
from boltmesh.strategies.torch_compat.fsdp_hooks import (
    end_every_backward,
    instrument,
    keep_for_derivatives,
)
from boltmesh.strategies.torch_compat.gathered_writes import GatheredWrites
from boltmesh.strategies.torch_compat.modules import has_foreign_hooks, is_compiled
from boltmesh.strategies.torch_compat.tensors import (
    check_writes_to_copies,
    is_composite,
    write_through_data,
)


class RootModule(Module):
    """Holds the LightningModule as ``DistributedDataParallel`` does.

    The hooks that gather and free parameters outside of other units are on this module and not on
    the LightningModule: so they run once around a ``training_step``, however often it calls
    ``self(...)``, if at all. The names of the LightningModule's parameters do not change.

    Args:
        module: The full model.
        adopted: Modules below units whose parameters the root gathers.
    """

    def __init__(self, module: LightningModule, adopted: Iterable[Module] = ()) -> None:
        super().__init__()
        self.module = module
        self.adopted = ModuleList(adopted)
        self.is_running = False
        """Whether a step of the LightningModule is running; under manual optimisation that includes
        backward passes and optimizer steps."""
        self._instead: Callable[[], Any] | None = None

    @override
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with patched(self, is_running=True):
            return self.module(*args, **kwargs) if self._instead is None else self._instead()

    def run(self, function: Callable[[], Any]) -> Any:
        """Run a function in the place of a step, with the root's parameters gathered."""
        with patched(self, _instead=function):
            return self()


class OwnParameters(Module):
    """Holds the unsharded parameters of a module without those of its children.

    Args:
        owner: The module, which may be a unit itself or have units' parameters below it.
    """

    def __init__(self, owner: Module) -> None:
        super().__init__()
        for name, parameter in owner.named_parameters(recurse=False):
            if not (has_no_rows(parameter) or isinstance(parameter, DTensor)):
                self.register_parameter(name, parameter)


def open_staging(options: ZeroOptions, context: AxisContext) -> Staging | None:
    """Return storage for shards until the offload engine exists; None keeps them on the device."""
    is_on_disk = options.offload_parameters == "nvme"
    if not is_on_disk and not (options.has_offload and waits_on_host(context.device)):
        return None
    return Staging(
        options.offload_path if is_on_disk else None,
        device=context.device,
        rank=dist.get_rank(),
        recorder=context.recorder,
    )


def waits_on_host(device: torch.device) -> bool:
    """Whether fp32 shards meant for the host would first accumulate on a GPU."""
    return device.type != "cpu"


@dataclass
class ShardedModel:
    """A LightningModule whose parameters are shards."""

    module: LightningModule
    root: RootModule
    """Module that batches go through; a unit itself."""
    units: dict[str, FSDPModule]
    """Units by name within the LightningModule; the root's name is empty."""
    cast: set[str]
    """Names of the units that are gathered in autocast's dtype."""
    mesh: ShardMesh
    joined_gathers: JoinedGathers
    buffers: BufferSync
    tiled: list[TiledWeight]
    """Weights that their layers gather, tile by tile; in no unit."""
    scalars: ScalarParams
    """Parameters that cannot be sharded."""
    step_units: StepUnits
    """All units, for operations of every step."""
    writes: GatheredWrites
    """Tracks writes to parameters while they are gathered."""
    successors: ParamRemap
    """Maps the parameters that the module's author made to their shards."""
    on_host: CpuCollectives | None
    """Gathers and reductions on the CPU; None for other devices."""
    absent: frozenset[Parameter] = frozenset()
    """Parameters that the ranks of the data axis have no values of: other stages hold them."""
    owned: Sequence[PlainInStep] = ()
    """Parameters of which each rank has its own part."""

    @property
    def root_unit(self) -> FSDPModule:
        """The unit of the root."""
        return self.units[""]

    @property
    def plain(self) -> list[PlainInStep]:
        """Parameters that no unit gathers, and that are plain tensors within a step."""
        return [self.scalars, *self.owned]

    def begin_forward(self) -> None:
        """Reshard units whose shards were written to since they were gathered."""
        for unit in dict.fromkeys(self.writes.stale().values()):
            unit.reshard()
        self.writes.begin_forward()

    def refuse_stale(self) -> None:
        """Refuse a loss of gathered parameters whose shards have been written to since.

        Raises:
            ConfigError: Naming a parameter.
        """
        for name in self.writes.stale():
            refuse_lost_write(name)

    def reshard(self) -> None:
        """Free every gathered copy, so that the next use gathers the present shards."""
        self.step_units.reshard()
        self.use_dtensors()

    def run_outside_of_steps(self, function: Callable[[], Any]) -> Any:
        """Run a function that computes with the module's layers, outside of steps. Collective."""
        try:
            return self.root.run(function)
        finally:
            self.reshard()

    def run_gathered(self, function: Callable[[], Any]) -> Any:
        """Run a function within a step with all units gathered, then free them. Collective."""
        blocks = [unit for name, unit in self.units.items() if name]
        for unit in blocks:
            assert isinstance(unit, Module)
            self.joined_gathers.announce(unit)
            unit.unshard()
            unit.set_reshard_after_forward(False, recurse=False)
        try:
            return function()
        finally:
            for unit in blocks:
                unit.set_reshard_after_forward(True, recurse=False)
                unit.reshard()

    def use_plain(self) -> None:
        """Replace the parameters that no unit gathers by plain tensors, for a forward pass."""
        for each in self.plain:
            each.use_plain()

    def use_dtensors(self) -> None:
        """Undo ``use_plain``."""
        for each in self.plain:
            each.use_dtensors()

    def end_forward(self) -> None:
        """Undo ``use_plain`` after a forward pass, except what stays for a whole evaluation."""
        for each in self.plain:
            if torch.is_grad_enabled() or not each.stays_in_evaluation:
                each.use_dtensors()


def shard_model(
    module: LightningModule, options: ZeroOptions, context: AxisContext
) -> ShardedModel:
    """Shard a module in place.

    Collective over the data axis: every rank gets its shard of the first rank's parameters.
    """
    refuse_parameters(module)
    mesh = ShardMesh.build(context, options.shard_size)
    units = find_units(module, options.blocks)
    sharding = _Sharding(module, options, context, mesh)
    for name, block in reversed(units.items()):  # from the inside out
        sharding.cut_block(name, block)
    root, scalars = sharding.cut_root()
    tiled, owned = sharding.tiled, sharding.owned
    sharded = as_units([*units.items(), ("", root)])
    register_units(sharded.values())
    sharding.successors.follow_gathers(sharded.values())
    if not module.automatic_optimization:
        end_every_backward(sharded[""])
    keep_for_derivatives(
        list(reversed(sharded.values())),  # the root first: nearly every loss goes through it
        lambda: [
            *(weight.parameter for weight in tiled),
            *scalars.parameters,
            *(parameter for each in owned for parameter in each.parameters),
        ],
    )
    is_freed = options.stage == 3
    gathers = _gathers_of(sharded, tiled, context.compute_dtype, is_freed=is_freed)
    for exchange in () if context.owned is None else context.owned.exchanges:
        gathers[exchange.module] = UnitGather(exchange.is_on, exchange.attend)
    joined_gathers = JoinedGathers(gathers, context.group, context.device)
    writes = GatheredWrites(sharded.values(), refuse_lost_write)
    writes.shares_gradients = True

    def gather(unit: FSDPModule) -> None:
        assert isinstance(unit, Module)
        joined_gathers.announce(unit)
        unit.unshard()

    if not is_freed:
        writes.gather_frozen(lambda: root.is_running, gather)
    return ShardedModel(
        module,
        root,
        sharded,
        sharding.cast,
        mesh,
        joined_gathers,
        BufferSync(module, context.group),
        tiled,
        scalars,
        StepUnits(sharded.values()),
        writes,
        sharding.successors,
        CpuCollectives.where_needed(
            sharded.values(), context.device, takes_gradients_away=options.has_offload
        ),
        owned=owned,
    )


class _Sharding:
    """Shards a module unit by unit, from the inside out, the root last."""

    def __init__(
        self,
        module: LightningModule,
        options: ZeroOptions,
        context: AxisContext,
        mesh: ShardMesh,
    ) -> None:
        self.cast: set[str] = set()
        self.tiled: list[TiledWeight] = []
        self.successors = ParamRemap()
        self.owned, self._follow = _owned_params(context)
        self._module, self._options, self._context, self._mesh = module, options, context, mesh
        self._adopted: list[Module] = []
        """Modules of blocks whose parameters the root gathers."""
        self._staging = open_staging(options, context)

    def cut_block(self, name: str, block: Module) -> None:
        """Make a block a unit."""
        self._prepare(name, block)
        left_out: list[Module] = []
        with self.successors.of_parameters(block):
            in_tiles = self._tile(name, block)
            if self._context.compute_dtype is not None and is_any_cast(block):
                self.cast.add(name)
                left_out = full_precision_modules(block)
                self._adopted += left_out
            prepare_class(type(block))
            not_here = {p for owner in left_out for p in owner.parameters(recurse=False)}
            self._fully_shard(
                block, block, not_here, is_freed=self._is_freed, is_cast=name in self.cast
            )
        self._stage(block, in_tiles)

    def cut_root(self) -> tuple[RootModule, ScalarParams]:
        """Make the root a unit, with all parameters outside of blocks."""
        module = self._module
        self._prepare("", module)
        with self.successors.of_parameters(module):
            in_tiles = self._tile("", module)
            root = RootModule(module, map(OwnParameters, self._adopted))
            # None: the root stays gathered after its forward, as it is needed again at once.
            is_freed = None if self._is_freed else False
            self._fully_shard(root, module, set(), is_freed=is_freed, is_cast=False)
            scalars = ScalarParams(module, self._mesh.mesh, self._context.group)
        self.successors.take_places(module)
        self._stage(root, in_tiles)
        return root, scalars

    @property
    def _is_freed(self) -> bool:
        return self._options.stage == 3

    def _prepare(self, name: str, owner: Module) -> None:
        refuse_mixed_types(name, owner)
        context = self._context
        self._follow(prepare_unit(owner, device=context.device, group=context.group, name=name))

    def _tile(self, name: str, owner: Module) -> list[TiledWeight]:
        if self._options.tile_linear_bytes is None:
            return []
        in_tiles = apply_tiling(owner, self._options.tile_linear_bytes, self._mesh.mesh, name=name)
        self.tiled += in_tiles
        return in_tiles

    def _stage(self, unit: Module, tiled: Sequence[TiledWeight]) -> None:
        """Move the new shards of a unit, and of weights below it that no unit gathers, away."""
        if self._staging is None:
            return
        assert isinstance(unit, FSDPModule)
        names = {parameter: name for name, parameter in self._module.named_parameters()}
        compute_dtype = self._context.compute_dtype
        alone = [
            held_alone(each.name, each.parameter, each.kept_dtype(compute_dtype)) for each in tiled
        ]
        self._staging.add([*held_unit(unit, names), *alone])

    def _fully_shard(
        self,
        unit: Module,
        owner: Module,
        not_here: set[Parameter],
        *,
        is_freed: bool | None,
        is_cast: bool,
    ) -> None:
        """Shard the parameters that no other unit has, and those owned by ranks."""
        fully_shard(
            unit,
            mesh=self._mesh.mesh,
            reshard_after_forward=is_freed,
            mp_policy=precision_policy(self._context.compute_dtype, is_cast=is_cast),
            ignored_params={
                *not_here,
                *(weight.parameter for weight in self.tiled),
                *scalars_of(owner),
                *filter(is_composite, owner.parameters()),
                *(p for each in self.owned for p in each.whole_in(owner)),
            },
        )
        for each in self.owned:
            each.cut(owner)


def gather_direct_calls(units: Mapping[str, FSDPModule]) -> Changes:
    """Gather blocks whose ``forward`` is called by name, which runs no hooks, until it is undone.

    SqueezeBert of transformers and HoVerNet of MONAI call their layers like that. A block with
    hooks of its own is left alone: by name, it runs without them.
    """
    changes = Changes()
    for name, unit in units.items():
        assert isinstance(unit, Module)
        if name and not is_compiled(unit):  # the root's is the step
            changes.wrap(unit, partial(_gather_direct_call, unit))
    return changes


def _gather_direct_call(unit: Module, forward: Around, *args: Any, **kwargs: Any) -> Any:
    assert isinstance(unit, FSDPModule)
    if is_gathered(unit) or has_foreign_hooks(unit):
        return forward(*args, **kwargs)
    return Module.__call__(unit, *args, **kwargs)


def _owned_params(
    context: AxisContext,
) -> tuple[list[OwnedParams | AllToAllParams], Callable[[Mapping[Parameter, Parameter]], None]]:
    """Return this rank's part of divided experts, and a function to call if they are replaced."""
    if context.owned is None:
        return [], noop
    size = context.group.size()
    rows = OwnedParams(context.owned, context.device, size)
    fetched = [
        all_to_all_params(each, context.owned, size, rows.cut_one) for each in context.owned.fetched
    ]
    return [rows, *fetched], rows.follow


def as_units(modules: Iterable[tuple[str, Module]]) -> dict[str, FSDPModule]:
    """Return modules as units; ``fully_shard`` has changed their class."""
    write_through_data()
    check_writes_to_copies(filter(writes_to_first, dir(Tensor)), refuse_write_to_copy)
    units: dict[str, FSDPModule] = {}
    for name, unit in modules:
        assert isinstance(unit, FSDPModule)
        instrument(unit)
        units[name] = unit
    return units


def _gathers_of(
    units: Mapping[str, FSDPModule],
    tiled: Iterable[TiledWeight],
    compute_dtype: torch.dtype | None,
    *,
    is_freed: bool,
) -> dict[Module, UnitGather]:
    """Return all gathers, by the module in whose forward each happens.

    With ``is_freed`` units are freed after their forward; the root always stays gathered.
    """
    gathers: dict[Module, UnitGather] = {}
    for name, unit in units.items():
        assert isinstance(unit, Module)
        gathers[unit] = _gather_of(unit, is_freed=is_freed and name != "")
    for weight in tiled:
        for layer in weight.layers:
            dtype = weight.gathered_dtype(layer, compute_dtype)
            gathers[layer] = UnitGather(lambda: True, partial(weight.attend, dtype))
    return gathers


def _gather_of(unit: FSDPModule, *, is_freed: bool) -> UnitGather:
    def take_part() -> None:
        unit.unshard()
        if is_freed:
            unit.reshard()

    return UnitGather(lambda: not is_gathered(unit), take_part)
