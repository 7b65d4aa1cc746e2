"""Building blocks of drawings: pure functions that return lines of text; no terminal, no Textual.

``line`` is a line in spans with roles, ``style`` gives roles their look in a terminal. ``bars``,
``table``, ``browse`` (a scrolled, sorted table), ``header``, ``tabs`` and the words in ``ranks``
and ``pipeline`` are shared by the panels.
"""
