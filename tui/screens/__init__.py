"""The Textual screens: a page as it is shown, with keys and mouse.

``base`` has the canvas and the line of a filter, ``live`` refreshes it from a session. ``job`` and
``jobs`` are the two screens; ``navigation`` has what the keys of a job do. ``palette`` lists
commands, ``help`` explains.
"""
