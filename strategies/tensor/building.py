"""Makes a model's values where they are needed: whole for a proof, then this rank's shards alone.

A model whose parameters are deferred may be larger than any rank's memory. The first block of each
kind is made whole, with what lies outside of blocks; the others are made one at a time, when their
shards are cut.
"""

from collections.abc import Collection, Iterable, Mapping

import torch
from torch.distributed import ProcessGroup
from torch.nn import Module

from boltmesh.strategies.building.materialize import own_modules, prepare_modules
from boltmesh.strategies.tensor.execution.sharding import shard_parameters
from boltmesh.strategies.tensor.plan import ShardedParameter

_CPU = torch.device("cpu")


def make_whole(
    root: Module, blocks: Mapping[str, Module], left_out: Collection[str], group: ProcessGroup
) -> None:
    """Make all but some blocks, with the first rank's values. Collective over ``group``.

    Args:
        root: The model.
        blocks: Its blocks by dotted name.
        left_out: Names of those that are made later.
        group: Ranks that are to be alike, on the CPU.
    """
    later = {part for name in left_out for part in blocks[name].modules()}
    modules = {each: path for each, path in own_modules([root], "").items() if each not in later}
    prepare_modules(modules, device=_CPU, group=group)


def make_shards(
    root: Module,
    blocks: Mapping[str, Module],
    left_out: Iterable[str],
    entries: Collection[ShardedParameter],
    *,
    group: ProcessGroup,
    size: int,
    rank: int,
) -> None:
    """Cut shards of all parameters, making what was left out before. Collective over ``group``.

    Args:
        root: The model.
        blocks: Its blocks by dotted name.
        left_out: Names of those that were not made before.
        entries: The parameters that are divided.
        group: Ranks that are to be alike, on the CPU.
        size: Ranks of the tensor axis.
        rank: Of this process among them.
    """
    left_out = list(left_out)
    of_block = {
        name: [each for each in entries if each.name.startswith(f"{name}.")] for name in left_out
    }
    inside = {each.name for several in of_block.values() for each in several}
    made = [each for each in entries if each.name not in inside]
    shard_parameters(root, made, size=size, rank=rank)
    for name in left_out:
        modules = own_modules([blocks[name]], name)
        prepare_modules(modules, device=_CPU, group=group)
        shard_parameters(root, of_block[name], size=size, rank=rank)


def tied_outside(root: Module, blocks: Mapping[str, Module]) -> set[str]:
    """Return the blocks of which a parameter is also somewhere else in the model."""
    places: dict[int, set[str]] = {}
    owner = {part: name for name, block in blocks.items() for part in block.modules()}
    for module in root.modules():
        for parameter in module.parameters(recurse=False):
            places.setdefault(id(parameter), set()).add(owner.get(module, ""))
    return {name for several in places.values() if len(several) > 1 for name in several if name}
