"""Explains why collectives do not advance: group and call, missing ranks, and where those are.

``watch.py`` is the monitor of each rank, ``inspect.py`` reads the progress of one rank, and
``diagnose.py`` finds from the progress of several ranks where the hang began.
"""
