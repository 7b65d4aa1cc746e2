"""Numbers computed from a snapshot: pure functions, without drawing.

Used by several panels: ``figures`` (the headline figures), ``ranks``, ``step_time``,
``stragglers``, ``sequences`` and ``hangs`` (progress of collectives), ``pipelines``, ``experts``,
``traffic`` (measured and expected bytes), ``mesh_grid`` and ``heat`` (the map of ranks).
``findings`` combines them into what is wrong with a job, ``status`` into one line. ``memo`` caches
results for a state.
"""
