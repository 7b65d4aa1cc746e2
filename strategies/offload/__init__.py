"""Optimizer state and parameters outside of the compute device: in host memory or on a disk.

``engine`` is what the data axis calls; its docstring describes a step. ``bucket_layout`` and
``buckets`` divide a unit's parameters into buckets and chunks, ``chunk_placement`` assigns chunks
to tiers, ``stores`` opens a store for each tier (``store_api``: ``memory_stores``, ``disk``).

``gradient_handler`` receives gradients and has their norm, ``stepper`` steps chunks speculatively
on a worker thread by an ``update_rule``; ``step_in_backward`` steps without clipping. ``state``
shows the state as DTensors, ``shard_tensor`` stands for a shard that is kept elsewhere, ``streams``
and ``host_memory`` copy to and from the device.
"""
