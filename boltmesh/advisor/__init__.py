"""Chooses a layout for a config's own model: ``boltmesh plan auto CONFIG``, ``advise``, ``tune``.

``machine`` has the rates of the devices: measured here (``microbenchmark``), remembered, or of an
accelerator by name. ``search`` predicts each layout (``layouts``) from a dry run of the config's
module: memory by the accounting of ``boltmesh plan``, time by ``prediction``. ``report`` prints the
best three and ``command`` the decision in words; ``tune`` runs the best three and remembers what
they took.
"""
