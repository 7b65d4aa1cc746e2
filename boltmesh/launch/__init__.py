"""Starts the ranks of a job, collects their reports, and ends them.

``placement.py`` decides how many ranks run where; ``supervisor.py`` starts and ends them,
``restarts.py`` starts ranks again after a failure, ``rank.py`` is one rank of it,
``boltmesh/rank_reports.py`` the files between them. ``stopping.py`` handles signals and
``graceful_stop.py`` ends training on all ranks after the same step. ``log_filters.py`` removes
repeated log lines.
"""
