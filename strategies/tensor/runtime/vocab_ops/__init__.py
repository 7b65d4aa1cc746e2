"""What functions of torch do with tensors of which each rank has some tokens."""

from boltmesh.strategies.tensor.runtime.vocab_ops import (
    elementwise,
    indexing,
    losses,
    products,
    reductions,
)

__all__ = ["elementwise", "indexing", "losses", "products", "reductions"]
