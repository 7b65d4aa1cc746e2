"""Runs a model by a tensor plan, with this rank's shards.

``apply`` replaces parameters by shards (``param_swap``) and wraps modules by the backend of their
block: ``plain_shards`` for ``local``, ``dtensor`` (with ``fused_output``) for ``region``.
``boundaries`` sums activations and gradients of a block with ``collectives``; ``dropout`` draws
random numbers per rank, ``sequence`` divides the sequence between blocks. ``signatures`` verifies
calls of blocks that are unlike those of the first batch.

``vocab_modules`` keeps logits divided over the vocabulary up to the loss, as a ``vocab_tensor``;
``vocab_local`` and ``vocab_reductions`` are torch's functions on it.
"""
