"""Numbers computed from a snapshot: pure functions, without drawing.

Used by several panels: ``ranks``, ``step_time``, ``stragglers``, ``balance`` (waits in
collectives), ``sequences`` and ``hangs`` (progress of collectives), ``pipelines``, ``mesh_grid``
and ``heat`` (the map of ranks), ``wire`` and ``verdict`` (measured and expected bytes).
``findings`` combines them into what is wrong with a job, ``status`` into one line. ``memo`` caches
results for a state.
"""
