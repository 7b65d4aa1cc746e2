"""Searches layouts for a config's own model: ``boltmesh plan auto CONFIG``, ``advise``, ``tune``.

``planner`` does so for sizes alone, ``plan`` states what one given layout needs.

``machine`` has the rates of the devices: measured here (``microbenchmark``), remembered, or of an
accelerator by name. ``search`` goes through layouts (``layouts``) and has each evaluated from a dry
run of the config's module (``evaluate``): memory by the accounting of ``boltmesh plan``, time by
``prediction``. ``report`` prints the best three and ``command`` the decision in words; ``tune``
runs the best three and remembers their times. ``strategy`` is ``bolt_auto``.
"""
