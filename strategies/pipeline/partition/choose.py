"""Chooses the cut of a model: as the user says, or balanced within the memory of the ranks."""

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from boltmesh.errors import ConfigError
from boltmesh.strategies.pipeline.options import Split
from boltmesh.strategies.pipeline.partition.cost import UnitUse
from boltmesh.strategies.pipeline.partition.split import UnitCost, balanced_split, named_split

COPIES_OF_TRAINED = 3
"""Beside a parameter that is trained: its gradient and Adam's two moments."""

SECONDS_PER_ELEMENT = 0.5
"""A parameter that is only looked up (an embedding) costs about this part of one that is
multiplied: reading it and adding to its gradient, in units of its floating point operations."""

SHARE_OF_FREE = 0.92
"""A stage may take this share of the free memory of a GPU: libraries take some later, and
fragmentation costs some."""


@dataclass(frozen=True)
class MemoryBudget:
    """What memory the ranks have for their stages."""

    max_bytes: float
    """Of the rank with the least."""
    is_asked: bool
    """Whether the user has said so; else it is what the device has."""
    live: tuple[int, ...]
    """How many microbatches each stage keeps at once."""
    num_versions: int = 1
    """Of the weights and of their gradients, that the schedule keeps."""


def find_budget(
    max_bytes: int | None,
    live: tuple[int, ...],
    *,
    num_versions: int,
    group: ProcessGroup,
    device: torch.device,
) -> MemoryBudget:
    """Return what the ranks of a pipeline have. Collective over the pipeline on GPUs.

    Args:
        max_bytes: As the user gave it; None: what the GPU with the least has left
            beside its context, libraries and other processes. On the CPU ranks share
            memory with each other and everything else, so nobody can tell.
        live: How many microbatches each stage keeps at once.
        num_versions: Of the weights and of their gradients, that the schedule keeps.
        group: The ranks of the pipeline.
        device: Of this rank.
    """
    if max_bytes is not None or device.type != "cuda":
        limit = math.inf if max_bytes is None else float(max_bytes)
        return MemoryBudget(limit, max_bytes is not None, live, num_versions)
    least = torch.tensor(_available_bytes(device), dtype=torch.int64, device=device)
    dist.all_reduce(least, op=dist.ReduceOp.MIN, group=group)
    return MemoryBudget(float(least), False, live, num_versions)


def _available_bytes(device: torch.device) -> int:
    """Return what a stage may take of a GPU, what torch's allocator holds already included."""
    free, _ = torch.cuda.mem_get_info(device)
    return int(SHARE_OF_FREE * (free + torch.cuda.memory_reserved(device)))


def unit_cost(
    unit: UnitUse,
    seconds: Mapping[str, float] | None = None,
    *,
    is_recomputed: bool = False,
    num_versions: int = 1,
) -> UnitCost:
    """Return what a unit costs: its measured seconds where there are any, else counted work."""
    # A backward pass computes two gradients: three times the forward in all.
    copies = COPIES_OF_TRAINED + 2 * (num_versions - 1)
    work = (4.0 if is_recomputed else 3.0) * unit.flops + SECONDS_PER_ELEMENT * unit.num_parameters
    return UnitCost(
        unit.name,
        work if seconds is None else seconds[unit.name],
        float(unit.parameter_bytes + copies * unit.trained_bytes),
        float(unit.kept_bytes or 0),
    )


def cut_units(
    split: Split, costs: Sequence[UnitCost], rank_of_stage: Sequence[int], budget: MemoryBudget
) -> Sequence[Sequence[str]]:
    """Return the names of each stage's units.

    A cut that is balanced without a look at memory is taken if it fits. Else every stage has to
    keep within its part of what a rank may take.

    Args:
        split: As the user gave it.
        costs: Of the units that are called, in the order of their calls.
        rank_of_stage: The rank of each stage.
        budget: What the ranks may take.

    Raises:
        ConfigError: When the user's cut is none, or none keeps within what the user allows.
    """
    num_stages = len(rank_of_stage)
    if callable(split):
        names = _checked(split(costs, num_stages), costs, num_stages)
    elif isinstance(split, str):
        names = balanced_split(costs, num_stages)
    else:
        named = named_split(split, [each.name for each in costs])
        names = _checked(named, costs, num_stages)
    needed = _needed_bytes(names, costs, rank_of_stage, budget.live)
    if max(needed.values()) <= budget.max_bytes:
        return names
    try:
        return _cut_within(split, costs, needed, num_stages, budget)
    except ConfigError as error:
        if budget.is_asked:
            raise
        # With another optimizer than Adam it may fit all the same.
        warnings.warn(
            f"The stages may not fit into the GPUs. {error}", RuntimeWarning, stacklevel=2
        )
        return names


def _cut_within(
    split: Split,
    costs: Sequence[UnitCost],
    needed: Mapping[int, float],
    num_stages: int,
    budget: MemoryBudget,
) -> Sequence[Sequence[str]]:
    """Return a cut of which no rank needs more than it has, after one that needs so much."""
    if isinstance(split, str):
        share = budget.max_bytes * len(needed) / num_stages
        return balanced_split(costs, num_stages, max_bytes=share, live=budget.live)
    fullest = max(needed, key=needed.__getitem__)
    raise ConfigError(
        f"This split gives rank {fullest} of the pipeline stages that need "
        f"{needed[fullest] / 1e9:.3g} GB with gradients, Adam's state and activations, and it has "
        f"{budget.max_bytes / 1e9:.3g} GB. Let stages begin elsewhere, or use split='auto'."
    )


def _needed_bytes(
    names: Sequence[Sequence[str]],
    costs: Sequence[UnitCost],
    rank_of_stage: Sequence[int],
    live: Sequence[int],
) -> dict[int, float]:
    """Return what each rank needs at most, as if all of its stages kept most at the same time."""
    known = {each.name: each for each in costs}
    needed = dict.fromkeys(rank_of_stage, 0.0)
    for members, rank, count in zip(names, rank_of_stage, live, strict=True):
        for name in members:
            needed[rank] += known[name].num_bytes + count * known[name].kept_bytes
    return needed


def _checked(
    stages: Sequence[Sequence[str]], costs: Sequence[UnitCost], num_stages: int
) -> Sequence[Sequence[str]]:
    given = [name for stage in stages for name in stage]
    wanted = [each.name for each in costs]
    if len(stages) != num_stages:
        raise ConfigError(
            f"split makes {len(stages)} stages, and the pipeline has {num_stages}. "
            f"Name {num_stages - 1} modules at which a stage begins."
        )
    if given != wanted or not all(stages):
        raise ConfigError(
            f"split gives {given}, and the model calls {wanted}: every part belongs to one stage, "
            f"in the order of the calls, and every stage holds one at least."
        )
    return stages
