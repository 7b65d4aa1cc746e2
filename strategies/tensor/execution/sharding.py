"""Cuts parameters into the shards of the ranks, and joins shards into whole tensors."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor
from torch.nn import Module

from boltmesh.errors import LayoutError
from boltmesh.strategies.tensor.plan import ShardedParameter
from boltmesh.strategies.tensor.sections import runs


def shard_of(whole: Tensor, entry: ShardedParameter, *, size: int, rank: int) -> Tensor:
    """Copy what a rank keeps of a tensor: contiguous, sections joined in the shard's order."""
    pieces = [
        whole.narrow(entry.dim, run.start, run.length) for run in runs(entry.sections, size, rank)
    ]
    if len(pieces) == 1:
        return pieces[0].clone(memory_format=torch.contiguous_format)
    return torch.cat(pieces, entry.dim) if pieces else whole.narrow(entry.dim, 0, 0).clone()


def join_shards(shards: Sequence[Tensor], entry: ShardedParameter) -> Tensor:
    """Return the whole tensor of which the ranks, in their order, keep ``shards``."""
    whole = shards[0].new_empty(entry.shape)
    for rank, shard in enumerate(shards):
        for run in runs(entry.sections, len(shards), rank):
            part = shard.narrow(entry.dim, run.local_start, run.length)
            whole.narrow(entry.dim, run.start, run.length).copy_(part)
    return whole


@torch.no_grad()
def shard_parameters(
    module: Module, entries: Iterable[ShardedParameter], *, size: int, rank: int
) -> None:
    """Keep this rank's shards in the place of whole parameters. Local; not to be undone.

    Parameters stay the objects that they are, so tied names, and lists that the author made of
    them, keep their meaning. A parameter that is a shard already is left alone.

    Raises:
        LayoutError: When the model has another parameter under a name, or none.
    """
    parameters = dict(module.named_parameters(remove_duplicate=False))
    for entry in entries:
        parameter = parameters.get(entry.name)
        if parameter is None:
            raise LayoutError(
                f"The tensor plan divides '{entry.name}', and the model has no such parameter. "
                f"All ranks have to build the same model."
            )
        shape, local_shape = tuple(parameter.shape), entry.local_shape(size, rank)
        if shape == local_shape:
            continue
        if shape != entry.shape:
            raise LayoutError(
                f"The tensor plan divides '{entry.name}' of shape {entry.shape}, and the model "
                f"has one of {shape}. All ranks have to build the same model."
            )
        parameter.data = shard_of(parameter.data, entry, size=size, rank=rank)
        parameter.grad = None
