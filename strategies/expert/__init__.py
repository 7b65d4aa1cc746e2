"""The expert axis: experts are divided over ranks, rows travel to the ranks that own them.

``axis`` is the interface for the engine, in this order: ``find`` looks for experts in one step of
the user's module, ``verify`` proves on the ranks of the run that they may be asked row by row,
``divided`` (of a list ``module_list``) takes the place of their ``forward``, ``exchange`` moves the
rows. Parameters of experts
are cut by the data axis (``data_parallel/param_state``, ``OwnedParams``), which shards everything
else; norms, clipping and checkpoints see them as shards. ``expected_traffic`` states what telemetry
should measure.

Nothing is known by name, and the author's own code runs.
"""
