"""Writes a rank's telemetry while it trains.

``recorder`` is what the engine calls (``null_recorder`` if telemetry is off, or after a failure).
It writes ``rank_file`` from what the others count: ``phases``, ``throughput``, ``memory``,
``communication`` (every collective, by the hook in ``torch_compat``; what is offloaded; the rows
of each expert), ``device``. ``register`` creates the job's folder, ``nodes`` exchanges summaries
between hosts.
"""
