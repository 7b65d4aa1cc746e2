"""Describes a sharded model to the planner: what telemetry shows beside what it measures."""

from collections.abc import Container, Mapping

import torch
from torch.distributed.fsdp import FSDPModule
from torch.nn import Module

from boltmesh.strategies.planner.layout import Job
from boltmesh.strategies.planner.model import ModelShape, TensorShape, UnitShape
from boltmesh.strategies.planner.precision import Widths
from boltmesh.strategies.torch_compat import unit_parameters


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
) -> Job:
    """Return what the planner wants to know of a run."""
    widths = Widths(None, None, None)
    if compute_dtype is not None:
        widths = Widths(None, compute_dtype.itemsize, torch.float32.itemsize)
    return Job(
        num_ranks,
        widths,
        shard_size=shard_size,
        num_microbatches=num_microbatches,
        state_copies=state_copies,
        is_on_host=is_on_host,
    )
