"""The expert axis: experts are divided over ranks, rows travel to the ranks that own them.

``axis`` is the interface for the engine, in this order: ``find`` looks for experts in one step of
the user's module, ``verify`` proves on the ranks of the run that they may be asked row by row,
``divided`` takes the place of their ``forward`` (``module_list`` that of a list), and ``exchange``
moves the rows. ``router_bias`` corrects what routers choose, and ``expected_traffic`` states what
telemetry should measure. The data axis cuts parameters of experts (``OwnedParams`` in
``param_state``, ``all_to_all_params`` for lists and adapters) and shards everything else; norms,
clipping and checkpoints see them as shards.

Nothing is known by name but adapters of peft, and the author's own code runs.
"""
