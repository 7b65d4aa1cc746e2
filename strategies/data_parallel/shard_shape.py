"""Describes a sharded model to the planner: what telemetry shows beside what it measures.

What a rank holds of a sharded model, by kind of memory.
"""

from collections.abc import Container, Mapping, Sequence

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.nn import Module
from torch.optim import Optimizer

from boltmesh.strategies.cost_model.model import (
    JobShape,
    ModelShape,
    TensorShape,
    UnitShape,
    Widths,
)
from boltmesh.strategies.data_parallel.fully_shard import ShardedModel
from boltmesh.strategies.telemetry import tensors_within
from boltmesh.strategies.torch_compat.fsdp import unit_parameters, unsharded_gradients
from boltmesh.telemetry.writer.memory import StoredBytes


def held_tensors(
    model: ShardedModel, optimizers: Sequence[Optimizer]
) -> dict[str, list[Tensor | StoredBytes]]:
    """Return the tensors that are there now; gathered copies count as parameters.

    Asked of the module itself, parameters would be the shards or the whole, as it happens to be.
    """
    pairs = [pair for unit in model.units.values() for pair in unit_parameters(unit)]
    shards: list[Tensor] = [shard for shard, _ in pairs]
    for plain in model.plain:
        shards += plain.parameters
    shards += [each.parameter for each in model.tiled]
    wholes = [whole for _, whole in pairs if whole is not None and _has_memory(whole)]
    gradients = [each.grad for each in shards if each.grad is not None]
    for unit in model.units.values():
        gradients += unsharded_gradients(unit)
    free = 0 if model.on_host is None else model.on_host.num_free_bytes
    return {
        "parameters": [*shards, *wholes],
        "gradients": [*gradients],
        "optimizer": [
            tensor
            for optimizer in optimizers
            for state in optimizer.state.values()
            for tensor in tensors_within(state)
        ],
        "buffers": [*model.module.buffers()],
        "cache": [StoredBytes("host", free)],
    }


def _has_memory(whole: Tensor) -> bool:
    """Whether a copy is there: FSDP2 keeps the tensor and frees what is behind it."""
    return whole.untyped_storage().size() > 0


def describe_units(
    module: Module, units: Mapping[str, FSDPModule], *, cast: Container[str]
) -> ModelShape:
    """Return the shapes of a wrapped module.

    Args:
        module: What is wrapped.
        units: What is gathered as one, by name; the root's is empty.
        cast: Names of the units that are gathered in what autocast computes in.
    """
    names = {parameter: name for name, parameter in module.named_parameters()}
    shapes = []
    for unit_name, unit in units.items():
        tensors = [
            TensorShape(
                names.get(sharded, unit_name),
                tuple(sharded.shape),
                is_trained=sharded.requires_grad,
                element_bytes=sharded.element_size(),
            )
            for sharded, _ in unit_parameters(unit)
        ]
        is_root = not unit_name
        shapes.append(
            UnitShape(
                unit_name,
                tuple(tensors),
                is_autocast=unit_name in cast,
                stays_gathered=is_root,
            )
        )
    return ModelShape(
        type(module).__name__,
        tuple(shapes),
        buffer_bytes=sum(each.numel() * each.element_size() for each in module.buffers()),
    )


def describe_job(
    *,
    num_ranks: int,
    shard_size: int,
    num_microbatches: int,
    compute_dtype: torch.dtype | None,
    state_copies: int = 2,
    is_on_host: bool = False,
) -> JobShape:
    """Return what the planner wants to know of a run."""
    widths = Widths(None, None, None)
    if compute_dtype is not None:
        widths = Widths(None, compute_dtype.itemsize, torch.float32.itemsize)
    return JobShape(
        num_ranks,
        widths,
        shard_size=shard_size,
        num_microbatches=num_microbatches,
        state_copies=state_copies,
        is_on_host=is_on_host,
    )
