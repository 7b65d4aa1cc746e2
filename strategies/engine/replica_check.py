"""Compares the parameters that have to be equal on several ranks, every few steps.

Faulty memory, a faulty device, or code that changes parameters on one rank alone makes that rank
train with different values, without an error. Here each rank sends a hash of each parameter along
each axis of the mesh, and the error names the rank whose values differ.

It compares the parameters of replicas (``bolt_ddp``, a data axis with ``zero_stage=0``, groups of
``shard_size``), those that the tensor plan leaves whole, and tied weights of several stages.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Replicate

from boltmesh.errors import ConfigError, DivergenceError, first_of
from boltmesh.strategies.object_collectives import gather_objects
from boltmesh.strategies.torch_compat.tensors import components_of, local_tensor

if TYPE_CHECKING:
    from boltmesh.strategies.engine.axis import Axis
    from boltmesh.strategies.engine.strategy import MeshStrategy

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integer dtypes by the bytes of an element."""
_CHUNK = 1 << 20
"""Number of elements that are hashed at once, eight bytes each."""
_FACTOR = 0x5851F42D4C957F2D  # Knuth's multiplier of MMIX


class _Key(NamedTuple):
    """Identifies values that are equal on all ranks that hold them."""

    name: str
    shard: tuple[int, ...]
    """The rank's places in the groups over which the parameter is sharded."""


class ReplicaCheck:
    """Compares parameters every ``every`` optimizer steps.

    Args:
        strategy: The strategy of the model.
        every: Optimizer steps between two comparisons.

    Raises:
        ConfigError: ``every`` is no positive integer.
    """

    def __init__(self, strategy: "MeshStrategy", every: int) -> None:
        if type(every) is not int or every < 1:
            raise ConfigError(
                f"verify_replicas_every={every!r} is no number of optimizer steps. Use 100, or "
                f"leave it out for no comparison."
            )
        self._strategy = strategy
        self._every = every
        self._last_step = 0

    def start(self, global_step: int) -> None:
        """Start the comparison intervals at a step. Collective over all ranks.

        Raises:
            ConfigError: No two ranks hold the same parameter.
        """
        self._last_step = global_step
        has_some = any(next(self._shared(axis), None) is not None for axis in self._axes())
        if not self._strategy.reduce_boolean_decision(has_some, all=False):
            raise ConfigError(
                f"verify_replicas_every={self._every} has nothing to compare: each parameter is "
                f"on one rank of this layout alone. Leave verify_replicas_every out."
            )

    def after_step(self, global_step: int, *, is_last: bool = False) -> None:
        """Compare if a comparison is due. Collective over all ranks.

        Raises:
            DivergenceError: Ranks hold different values of a parameter.
        """
        is_due = global_step // self._every > self._last_step // self._every
        if is_due or (is_last and global_step > self._last_step):
            self._compare(global_step)
            self._last_step = global_step

    def _compare(self, global_step: int) -> None:
        for axis in self._axes():
            own = {key: hash_of_all(components_of(each)) for key, each in self._shared(axis)}
            group = self._strategy.groups[axis.name]
            hashes = gather_objects(own, group)
            ranks = dist.get_process_group_ranks(group)
            difference = find_differing(dict(zip(ranks, hashes, strict=True)))
            if difference is not None:
                raise DivergenceError(self._describe(difference, axis.name, global_step))

    def _describe(self, difference: "Differing", axis: str, global_step: int) -> str:
        name, wrong, others = difference
        if wrong is None:
            who = f"ranks {first_of(others, 8)} hold different values of {name}"
        else:
            who = f"rank {wrong} holds other values of {name} than ranks {first_of(others, 8)}"
        return (
            f"after step {global_step} {who}, which has to be equal on them, along the {axis} "
            f"axis. Code that changes parameters on one rank does this, and so does faulty memory "
            f"of a host or a device. They were equal at step {self._last_step}: resume from a "
            f"checkpoint of that step or an earlier one."
        )

    def _axes(self) -> "list[Axis]":
        return [axis for axis in self._strategy.axes if axis.size > 1]

    def _shared(self, axis: "Axis") -> Iterator[tuple[_Key, Tensor]]:
        """Yield this rank's parameters that other ranks along an axis may hold, too."""
        strategy = self._strategy
        module = strategy.lightning_module
        assert module is not None
        held = {id(each) for each in strategy.held_parameters()}
        ranks = dist.get_process_group_ranks(strategy.groups[axis.name])
        for name, parameter in module.named_parameters():
            if id(parameter) not in held or axis.division(name) is not None:
                continue
            shard = _shard(parameter, ranks)
            local = local_tensor(parameter)
            if shard is not None and local.device.type != "meta" and _has_values(local):
                yield _Key(name, shard), local


def _shard(parameter: Tensor, ranks: list[int]) -> tuple[int, ...] | None:
    """Return this rank's indices of its shard; None if each of ``ranks`` has another shard."""
    if not isinstance(parameter, DTensor):
        return ()
    mesh, places = parameter.device_mesh, []
    for dim, placement in enumerate(parameter.placements):
        if isinstance(placement, Replicate) or mesh.size(dim) == 1:
            continue
        if set(ranks) <= set(dist.get_process_group_ranks(mesh.get_group(dim))):
            return None
        places.append(mesh.get_local_rank(dim))
    return tuple(places)


def _has_values(tensor: Tensor) -> bool:
    """Tell whether its memory is there: that of gathered parameters is freed between steps."""
    return tensor.numel() > 0 and all(
        each.untyped_storage().size() > 0 for each in components_of(tensor)
    )


def hash_of_all(tensors: Iterable[Tensor]) -> int:
    """Return a hash of tensors in their order, that of the tensor for a single one."""
    total = 0
    for each in tensors:
        total = total * _FACTOR + hash_of(each)
    return total


def hash_of(tensor: Tensor) -> int:
    """Return a 64-bit hash of the bits of a tensor; one changed element changes it.

    Each element, as an integer, is multiplied by an odd number that depends on its position.

    Args:
        tensor: Tensor of any shape and dtype.
    """
    bits = (
        tensor.detach()
        .contiguous()
        .view(-1)
        .view(_INTEGERS.get(tensor.element_size(), torch.int64))
    )
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for start in range(0, bits.numel(), _CHUNK):
        chunk = bits[start : start + _CHUNK].long()
        places = torch.arange(start, start + chunk.numel(), device=tensor.device)
        total += (chunk * (places * _FACTOR | 1)).sum()
    return int(total.item())


class Differing(NamedTuple):
    """A parameter with different values on different ranks."""

    name: str
    wrong: int | None
    """The first rank outside of the majority; None if there is no majority."""
    others: list[int]
    """The ranks of the majority; without one, all ranks."""


def find_differing(hashes: dict[int, dict[_Key, int]]) -> Differing | None:
    """Return the first parameter whose hashes differ.

    Args:
        hashes: Hashes of the parameters that a rank holds, by rank.
    """
    by_key: dict[_Key, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    for rank, each in hashes.items():
        for key, value in each.items():
            by_key[key][value].append(rank)
    for key, by_value in by_key.items():
        if len(by_value) == 1:
            continue
        groups = sorted(by_value.values(), key=len)
        everyone = sorted(rank for ranks in groups for rank in ranks)
        if len(groups[-1]) > len(everyone) / 2:
            return Differing(key.name, groups[0][0], groups[-1])
        return Differing(key.name, None, everyone)
    return None
