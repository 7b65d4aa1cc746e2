"""The Textual screens: a page as it is shown, with keys and mouse.

``base`` has the canvas, ``live`` refreshes it from a session, ``job`` and ``jobs`` are the two
screens. ``navigation`` and ``mouse`` change the view, ``palette`` lists commands, ``prompt`` edits
a filter, ``help`` explains.
"""
