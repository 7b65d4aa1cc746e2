"""The panels of the dashboard, one module each: its numbers, then its lines of text.

Both are pure functions of the dashboard's state: no terminal, no textual. What several panels count
is in ``metrics``, what several draw with in ``render``; ``pages`` puts panels on the screen.
"""
