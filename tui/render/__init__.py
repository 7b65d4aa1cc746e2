"""Building blocks of drawings: pure functions that return lines of text; no terminal, no Textual.

``line`` is a line in spans with roles, ``style`` the characters of a terminal and the parts of a
panel. ``bars``, ``table`` (aligned, or scrolled and sorted), ``tabs`` and the words of ``ranks``
and pipelines are shared by the panels.
"""
