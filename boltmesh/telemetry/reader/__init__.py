"""Reads a job's telemetry files into snapshots; no torch.

``reader`` finds the jobs of this user. ``job_reader`` reads one job repeatedly: ``rank_reader``
follows each rank's file (``ring``, ``file_records``, ``traffic_reader``, ``step_sums``), and the
``*_view`` modules turn the records into parts of a ``JobSnapshot``. ``nodes_view`` adds ranks of
other hosts, ``cause`` finds the rank that failed first.
"""
