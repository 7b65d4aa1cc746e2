"""Runs a model by a tensor plan, with this rank's shards.

``apply`` replaces parameters by shards (``param_swap``) and wraps modules by the backend of their
block: ``plain_shards`` for ``local``, ``dtensor`` (with ``fused_output``) for ``region``.
``boundaries`` sums activations and gradients of a block with ``collectives``; ``attention``
replaces ``nn.MultiheadAttention``, ``dropout`` draws random numbers per rank, ``sequence`` and
``stacks`` divide the sequence between blocks. ``signatures`` verifies calls of blocks that are
unlike those of the first batch.

``vocab_modules``, ``vocab_ranges``, ``vocab_tensor``, ``vocab_softmax`` and ``vocab_ops`` keep
logits divided over the vocabulary up to the loss.
"""
