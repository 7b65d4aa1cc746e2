"""The terminal dashboard: screens of ``boltmesh top`` and ``boltmesh jobs``.

Data flows one way. A source (:mod:`~boltmesh.tui.sources`) reads a job; :mod:`~boltmesh.tui.state`
folds what it read into one immutable value; :mod:`~boltmesh.tui.metrics` compute from it, functions
under :mod:`~boltmesh.tui.render` turn that into lines of text, and ``pages`` say which of them
stand where. The screens paint those lines and ``--once`` prints them. Nothing here imports torch
or lightning, and only ``app`` and ``screens`` import textual.
"""
