"""Groups parameters into buckets: those of one unit that one optimizer updates."""

import math
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.nn import Module, Parameter
from torch.optim import Optimizer

from boltmesh.errors import ConfigError
from boltmesh.strategies.grad_norm import NormShare
from boltmesh.strategies.offload.buckets import Bucket, Slot
from boltmesh.strategies.offload.shard_tensor import OffloadedShard
from boltmesh.strategies.torch_compat.fsdp import UnitShard, unit_shards
from boltmesh.strategies.torch_compat.tensors import local_tensor, set_local_tensor


@dataclass(eq=False)
class ShardedParam:
    """A sharded parameter before the engine takes it over."""

    name: str
    parameter: Parameter
    compute_dtype: torch.dtype
    padded_shape: tuple[int, ...]
    shard: UnitShard | None
    """None for a parameter outside of FSDP2 units."""

    def replace(self, local: Tensor, flat: Tensor) -> None:
        """Replace the local tensor of the parameter; see ``UnitShard.replace``."""
        if self.shard is not None:
            self.shard.replace(local, flat)
        else:
            set_local_tensor(self.parameter, local)

    @property
    def padded_numel(self) -> int:
        """Elements of the largest rank's shard."""
        return math.prod(self.padded_shape)

    def value(self) -> Tensor:
        """Return this rank's shard, ``(numel,)``, read from the disk if it is there.

        Its dtype is the parameter's.
        """
        local = local_tensor(self.parameter)
        return (local.read() if isinstance(local, OffloadedShard) else local.detach()).reshape(-1)


def collect_sharded_params(
    module: Module,
    units: Mapping[str, FSDPModule],
    compute_dtypes: Mapping[Parameter, torch.dtype],
) -> dict[str, list[ShardedParam]]:
    """Return the sharded parameters by unit, those of no unit by themselves.

    Args:
        module: The user's module: its parameters' names are the names in messages.
        units: FSDP2's modules by name, in the order of the forward pass.
        compute_dtypes: Dtypes in which parameters outside of units are gathered; others are
            gathered in their own.
    """
    names = {parameter: name for name, parameter in module.named_parameters()}
    by_unit: dict[str, list[ShardedParam]] = {}
    seen: set[Parameter] = set()
    for unit_name, unit in units.items():
        by_unit[unit_name] = held_unit(unit, names)
        seen.update(each.parameter for each in by_unit[unit_name])
    for parameter, name in names.items():
        if parameter not in seen and isinstance(parameter, DTensor):
            by_unit[name] = [held_alone(name, parameter, compute_dtypes.get(parameter))]
    return by_unit


def held_unit(unit: FSDPModule, names: Mapping[Parameter, str]) -> list[ShardedParam]:
    """Return the sharded parameters of one unit."""
    return [
        ShardedParam(names[s.parameter], s.parameter, s.compute_dtype, s.padded_shape, s)
        for s in unit_shards(unit)
    ]


def held_alone(name: str, parameter: Parameter, compute_dtype: torch.dtype | None) -> ShardedParam:
    """Return a sharded parameter of no unit, gathered in ``compute_dtype`` or else in its own."""
    dtype = compute_dtype or parameter.dtype
    return ShardedParam(name, parameter, dtype, _padded_shape(parameter), None)


def _padded_shape(parameter: Parameter) -> tuple[int, ...]:
    assert isinstance(parameter, DTensor)
    if parameter.dim() == 0:
        return ()
    rows = parameter.shape[0]
    for dim, placement in enumerate(parameter.placements):
        if isinstance(placement, Shard):
            rows = -(-rows // parameter.device_mesh.size(dim))
    return (rows, *parameter.shape[1:])


def build_buckets(
    units: Mapping[str, Sequence[ShardedParam]],
    optimizers: Sequence[Optimizer],
    *,
    first_index: int = 0,
    takes_frozen: bool,
    shares: Sequence[NormShare] = (),
) -> list[tuple[Bucket, Optimizer | None, list[ShardedParam]]]:
    """Build one bucket for each unit and each optimizer that updates a parameter of it.

    With ``takes_frozen`` also those of parameters that no optimizer updates. ``first_index`` is the
    index of the first slot.

    Raises:
        ConfigError: When the state of a parameter cannot be stored in fp32.
    """
    owners = {p: o for o in optimizers for p in _parameters(o) if p.requires_grad}
    made: list[tuple[Bucket, Optimizer | None, list[ShardedParam]]] = []
    for unit_name, held in units.items():
        for owner in (*optimizers, None):
            if owner is None and not takes_frozen:
                continue
            own = [each for each in held if owners.get(each.parameter) is owner]
            own = [each for each in own if math.prod(each.padded_shape)]
            if not own:
                continue
            slots = []
            for each in own:
                _check_dtype(each, is_trained=owner is not None)
                slots.append(
                    Slot(
                        first_index,
                        each.name,
                        each.parameter,
                        tuple(local_tensor(each.parameter).shape),
                        each.padded_shape,
                        each.compute_dtype,
                        is_counted=all(share.counts(each.parameter) for share in shares),
                        has_copies=has_copies(each.parameter)
                        or any(share.has_copies(each.parameter) for share in shares),
                    )
                )
                first_index += 1
            made.append((Bucket(unit_name, slots), owner, own))
    return made


def refuse_unknown(
    units: Mapping[str, Sequence[ShardedParam]],
    optimizer: Optimizer,
    *,
    absent: Set[Parameter] = frozenset(),
) -> None:
    """Raise for parameters of an optimizer that neither a unit nor another rank (``absent``) holds.

    Only the engine steps, so a parameter that it does not hold would never change.

    Raises:
        ConfigError: When there is one.
    """
    known = {each.parameter: each.name for held in units.values() for each in held}
    trained = [each for each in _parameters(optimizer) if each.requires_grad]
    unknown = [each for each in trained if each not in known and each not in absent]
    if unknown:
        names = list(known.values())
        shapes = ", ".join(str(tuple(each.shape)) for each in unknown[:3])
        raise ConfigError(
            f"{type(optimizer).__name__} updates {len(unknown)} parameters, of the shapes "
            f"{shapes}{', ...' if len(unknown) > 3 else ''}, which are no sharded parameters "
            f"of the model; those are {len(names)}, {', '.join(names[:3])} and so on. Give "
            f"the optimizer parameters of the LightningModule, or set "
            f"strategy.offload_optimizer=null."
        )


def has_copies(parameter: Tensor) -> bool:
    """Whether other ranks keep, and step, the same shard."""
    return isinstance(parameter, DTensor) and any(
        isinstance(placement, Replicate) and parameter.device_mesh.size(dim) > 1
        for dim, placement in enumerate(parameter.placements)
    )


def _parameters(optimizer: Optimizer) -> Iterator[Parameter]:
    for group in optimizer.param_groups:
        yield from group["params"]


def _check_dtype(held: ShardedParam, *, is_trained: bool) -> None:
    if held.parameter.dtype == torch.float32:
        return
    kind = str(held.parameter.dtype).removeprefix("torch.")
    if held.parameter.is_complex():
        raise ConfigError(
            f"{held.name} is {kind}, and offloaded state is kept in fp32. Make torch.view_as_real "
            f"of it the parameter, and torch.view_as_complex in the layer, or leave offload out."
        )
    if not is_trained:
        raise ConfigError(
            f"{held.name} is frozen and {kind}, and offloaded parameters are kept in fp32. Leave "
            f"offload_parameters out, and offload_optimizer alone, or convert it by .float()."
        )
    raise ConfigError(
        f"{held.name} is {kind}, and offloaded state is kept in fp32. Set trainer.precision "
        f"to '32-true', or to 'bf16-mixed', which computes in bf16 and keeps fp32 masters."
    )
