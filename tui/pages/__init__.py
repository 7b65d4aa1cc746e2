"""The pages of a job: which panels each has, and where they are. Plain Python, without Textual.

``registry`` lists them by key and loads each on first use. A ``page`` places ``tui.panels`` with
``tui.layout``; ``frame`` adds header, tabs and keys; ``table`` describes a table to the screens.
"""
