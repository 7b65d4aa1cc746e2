"""Functions of torch on logits that are divided over the vocabulary, one family in each module.

``elementwise`` runs locally, ``products`` covers lookups and matrix products, ``reductions`` and
``losses`` exchange a few numbers per position, ``indexing`` selects positions. ``vocab_tensor``
calls them; a function without a rule gathers the logits.
"""

from boltmesh.strategies.tensor.runtime.vocab_ops import (
    elementwise,
    indexing,
    losses,
    products,
    reductions,
)

__all__ = ["elementwise", "indexing", "losses", "products", "reductions"]
