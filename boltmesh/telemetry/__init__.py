"""Telemetry of a running rank, and how it is read back.

``writer`` runs inside training and may use torch and Lightning: ``recorder`` writes a rank's file,
``callback`` follows Lightning's loops. ``reader`` imports neither, so that the dashboard starts at
once: it turns the files of a job (``job``, ``layout``, ``plan_files``) into an immutable
``snapshot``. ``hang_detection`` reports why collectives do not advance. ``traffic`` and
``tensor_plan`` are what strategies state beforehand.
"""
