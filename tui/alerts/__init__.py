"""Alerts on a job while it is watched.

``watch`` has the rules, and raises and resolves alerts; ``hook`` runs the user's command, also
without a screen.
"""
