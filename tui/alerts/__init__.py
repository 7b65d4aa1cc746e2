"""Alerts on a job while it is watched.

``rules`` define conditions, ``watch`` raises and resolves alerts, ``hook`` runs the user's command.
``headless`` does so without a screen, for ``boltmesh top --json``.
"""
