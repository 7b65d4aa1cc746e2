"""``boltmesh doctor``: what an issue report needs, and what will work on this host.

``host`` reads versions, GPUs, links, memory, limits and disks without torch. ``torch_probe`` is a
process of its own, because torch may be missing, broken or slow to load: it tests backends, CUDA,
direct I/O and the telemetry hook. ``command`` draws conclusions and prints everything.
"""
