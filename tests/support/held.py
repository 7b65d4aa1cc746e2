"""How much memory parameters take."""

from collections.abc import Iterable

from torch.nn import Parameter

from boltmesh.strategies.torch_compat.tensors import storage_key


def held_bytes(parameters: Iterable[Parameter]) -> int:
    """Return the memory that parameters take on this rank, shared memory once."""
    sizes = {storage_key(each): each.untyped_storage().nbytes() for each in parameters}
    return sum(sizes.values())
