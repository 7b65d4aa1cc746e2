"""The terminal dashboard: what ``boltmesh top`` and ``boltmesh jobs`` show.

Data flows one way. A source (:mod:`~boltmesh.tui.source`) reads a job; :mod:`~boltmesh.tui.state`
folds what it read into one immutable value; functions under :mod:`~boltmesh.tui.drawing` turn that
value into lines of text, which the widgets paint and ``--once`` prints. Nothing here imports torch
or lightning, and only ``app``, ``screens`` and ``widgets`` import textual.
"""
