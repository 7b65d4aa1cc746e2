"""The expert axis: experts are divided over ranks, and rows are sent to the ranks that own them.

``axis`` is the interface for the engine, in this order: ``find`` finds experts in one step of the
user's module, ``verify`` proves on the ranks of the run that they compute row by row, ``divided``
replaces their ``forward`` (``module_list`` that of a list), and ``exchange`` moves the rows.
``router_bias`` corrects the choices of routers, and ``expected_traffic`` has the traffic that
telemetry should measure. The data axis divides parameters of experts (``OwnedParams`` in
``param_state``, ``all_to_all_params`` for lists and adapters) and shards everything else; norms,
clipping and checkpoints see them as shards.

Names matter for adapters of peft only, and the user's own code runs.
"""
