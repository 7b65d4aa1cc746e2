"""Searches layouts for the sizes of a model: ``boltmesh plan auto --model``. No torch, no config.

``advisor`` does so for a config's own model by the same rules, ``plan`` states what one given
layout needs.

``transformer`` has the sizes of a model, ``machine`` those of accelerators and clusters (data in
``accelerators.yaml``), ``layout`` one way to divide a training step over them. ``step_time`` and
``layout_memory`` predict what the step takes, ``calibration`` corrects times by measured layouts;
``search`` enumerates layouts, drops those that do not fit and orders the rest; ``command`` prints
the best three with reasons.
"""
