"""Memory, traffic and time of a layout, computed before anything is built. Without torch.

``model`` describes a model by the shapes of its tensors, its units and how it is sharded; for the
GPT of ``examples/`` by arithmetic. From that ``memory`` estimates what a rank keeps and its peak,
``traffic`` the bytes of each collective and the memory in flight, ``offload`` where state is kept,
and ``step_time`` the least time of a step on a measured machine.

``boltmesh.plan`` calls all of them. The axes use the same numbers as the expected values that
telemetry shows beside the measured ones.
"""
