"""Optimizer state and parameters outside of the compute device: in host memory or on a disk.

``engine`` is what the data axis calls; its docstring describes a step. ``bucket_layout`` and
``buckets`` divide a unit's parameters into buckets and chunks, ``chunk_placement`` assigns chunks
to tiers, ``stores`` opens a store for each tier (``store_api``: ``memory_stores``, ``disk``).

``gradient_handler`` receives gradients, ``clipping`` and ``stepper`` step chunks speculatively on a
worker thread by an ``update_rule`` (``adam``, or ``elementwise`` for other optimizers);
``step_in_backward`` steps without clipping. ``state`` shows the state as DTensors, ``shard_tensor``
stands for a shard that is kept elsewhere, ``access_trace`` predicts the order of reads, ``streams``
and ``host_memory`` copy to and from the device.
"""
