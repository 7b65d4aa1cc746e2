"""Optimizer state and parameters outside of the compute device: in host memory or on a disk.

``engine`` is what the data axis calls; its docstring describes a step. ``bucket_layout`` and
``buckets`` divide a unit's parameters into buckets and chunks, ``chunk_placement`` assigns chunks
to tiers, ``stores`` opens a store for each tier (``store_api``: ``memory_stores``, ``disk``).

``gradient_handler`` receives gradients and computes their norm, ``stepper`` steps chunks on a
worker thread by an ``update_rule``, perhaps speculatively; ``step_in_backward`` steps where nothing
is clipped. ``state`` shows the state as DTensors, ``shard_tensor`` represents a shard that is
stored elsewhere, ``streams`` and ``host_memory`` copy to and from the device.
"""
