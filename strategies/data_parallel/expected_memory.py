"""Memory of a rank for its parameters, whole or sharded: held now, and expected.

``held_tensors`` counts what a rank holds of a sharded model by kind, ``describe_units`` and
``describe_job`` describe the model to the cost model, ``expected_held_memory`` states what
telemetry should measure.
"""

from collections import Counter
from collections.abc import Collection, Container, Iterable, Mapping, Sequence, Set

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn import Module, Parameter
from torch.optim import SGD, Adam, Optimizer

from boltmesh.strategies.cost_model.model import (
    JobShape,
    ModelShape,
    TensorShape,
    UnitShape,
    Widths,
)
from boltmesh.strategies.data_parallel.fully_shard import ShardedModel
from boltmesh.strategies.telemetry import optimizer_tensors
from boltmesh.strategies.torch_compat.fsdp import unit_parameters, unsharded_gradients
from boltmesh.strategies.torch_compat.tensors import components_of, is_composite
from boltmesh.telemetry.snapshot import MemoryKind, MemoryPlace
from boltmesh.telemetry.writer.memory import StoredBytes


def held_tensors(
    model: ShardedModel, optimizers: Sequence[Optimizer]
) -> dict[str, list[Tensor | StoredBytes]]:
    """Return the tensors that exist now, by kind; gathered copies count as parameters.

    The module's own parameters would be the shards or the whole ones, depending on the moment.
    """
    pairs = [pair for unit in model.units.values() for pair in unit_parameters(unit)]
    shards: list[Tensor] = [shard for shard, _ in pairs]
    for plain in model.plain:
        shards += plain.parameters
    shards += [each.parameter for each in model.tiled]
    shards += filter(is_composite, model.module.parameters())
    # FSDP2 keeps a gathered tensor and frees its storage.
    wholes = [each for _, each in pairs if each is not None and each.untyped_storage().size()]
    gradients = [each.grad for each in shards if each.grad is not None]
    for unit in model.units.values():
        gradients += unsharded_gradients(unit)
    free = 0 if model.on_host is None else model.on_host.num_free_bytes
    return {
        "parameters": [*shards, *wholes],
        "gradients": [*gradients],
        "optimizer": [*optimizer_tensors(optimizers)],
        "buffers": [*model.module.buffers()],
        "cache": [StoredBytes("host", free)],
    }


def describe_units(
    module: Module, units: Mapping[str, FSDPModule], *, cast: Container[str]
) -> ModelShape:
    """Return the shapes of a wrapped module; units in ``cast`` are gathered in autocast's dtype."""
    names = {parameter: name for name, parameter in module.named_parameters()}
    shapes = []
    for unit_name, unit in units.items():
        tensors = tuple(
            tensor_shape(names.get(shard, unit_name), shard) for shard, _ in unit_parameters(unit)
        )
        is_cast = unit_name in cast
        shapes.append(
            UnitShape(unit_name, tensors, is_autocast=is_cast, stays_gathered=not unit_name)
        )
    return ModelShape(
        type(module).__name__,
        tuple(shapes),
        buffer_bytes=sum(each.numel() * each.element_size() for each in module.buffers()),
    )


def tensor_shape(name: str, parameter: Tensor) -> TensorShape:
    """Return a parameter of any shape for the cost model."""
    return TensorShape(
        name,
        tuple(parameter.shape),
        is_trained=parameter.requires_grad,
        element_bytes=parameter.element_size(),
    )


def describe_job(
    *,
    num_ranks: int,
    shard_size: int,
    num_microbatches: int,
    compute_dtype: torch.dtype | None,
    is_on_host: bool = False,
) -> JobShape:
    """Return a run's ranks, dtypes and batches for the cost model."""
    widths = Widths(None, None, None)
    if compute_dtype is not None:
        widths = Widths(None, compute_dtype.itemsize, torch.float32.itemsize)
    return JobShape(
        num_ranks,
        widths,
        shard_size=shard_size,
        num_microbatches=num_microbatches,
        is_on_host=is_on_host,
    )


def expected_held_memory(
    module: Module,
    optimizers: Sequence[Optimizer],
    held: Collection[Parameter] | None = None,
) -> list[MemoryKind]:
    """Return the expected bytes of parameters, gradients, optimizer state and buffers.

    Args:
        module: The model.
        optimizers: All of them.
        held: Parameters of this rank, each with its gradient and state; None for all.

    Optimizer state is left out if its size is unknown for an optimizer's class. Buffers in which
    ``DistributedDataParallel`` sends gradients are not included.
    """
    parameters = list(module.parameters() if held is None else held)
    kept = set(parameters)
    trained = [each for each in parameters if each.requires_grad]
    by_kind = {
        "parameters": _by_place(parameters),
        "gradients": _by_place(trained),
        "buffers": _by_place(module.buffers()),
    }
    states = [_optimizer_state(each, kept) for each in optimizers]
    if all(state is not None for state in states):
        total: Counter[MemoryPlace] = Counter()
        for state in states:
            total.update(state or {})
        by_kind["optimizer"] = total
    return [
        MemoryKind(kind, place, None, size)
        for kind, sizes in by_kind.items()
        for place, size in sizes.items()
    ]


def _by_place(tensors: Iterable[Tensor]) -> Counter[MemoryPlace]:
    """Return the bytes on the device and on the host; a tensor that occurs twice counts once."""
    sizes: Counter[MemoryPlace] = Counter()
    for tensor in {id(each): each for each in tensors}.values():
        sizes[_place(tensor)] += _held_bytes(tensor)
    return sizes


def _held_bytes(tensor: Tensor) -> int:
    held = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return sum(each.numel() * each.element_size() for each in components_of(held))


def _place(tensor: Tensor) -> MemoryPlace:
    return "host" if tensor.device.type == "cpu" else "device"


def _optimizer_state(optimizer: Optimizer, held: Set[Parameter]) -> Counter[MemoryPlace] | None:
    """Return the bytes that an optimizer's state will have, by place; None if unknown."""
    sizes: Counter[MemoryPlace] = Counter()
    for group in optimizer.param_groups:
        copies = _num_copies(optimizer, group)
        if copies is None:
            return None
        for parameter in group["params"]:
            if not parameter.requires_grad or parameter not in held:
                continue
            place = _place(parameter)
            sizes[place] += copies * _held_bytes(parameter)
            if isinstance(optimizer, Adam):  # counts its steps in a scalar of each parameter
                is_beside = group.get("capturable") or group.get("fused")
                fused = bool(group.get("fused"))
                sizes[place if is_beside else "host"] += _step_bytes(fused=fused)
    return sizes


def count_state_copies(optimizers: Iterable[Optimizer]) -> int | None:
    """Return how many tensors of a parameter's size each state has; None if that differs.

    Also None for optimizers of other classes than torch's Adam, AdamW and SGD.
    """
    copies = {_num_copies(each, group) for each in optimizers for group in each.param_groups}
    return copies.pop() if len(copies) == 1 else None


def _step_bytes(*, fused: bool) -> int:
    is_double = torch.get_default_dtype() == torch.float64 and not fused
    return 8 if is_double else 4


def _num_copies(optimizer: Optimizer, group: dict[str, object]) -> int | None:
    """Return how many tensors of a parameter's size the state has; None if unknown.

    Other classes may keep anything, even if they derive from these.
    """
    if type(optimizer) in {torch.optim.Adam, torch.optim.AdamW}:
        return 3 if group.get("amsgrad") else 2
    if type(optimizer) is SGD:
        return 1 if group.get("momentum") else 0
    return None
