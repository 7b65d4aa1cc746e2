"""What functions of torch do with tensors of which each rank has some tokens."""

from boltmesh.strategies.tensor.execution.rules import (
    elementwise,
    indexing,
    losses,
    products,
    rearranging,
    reductions,
)

__all__ = ["elementwise", "indexing", "losses", "products", "rearranging", "reductions"]
