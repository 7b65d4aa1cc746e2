"""The pages of a job: which panels each has, and where they are. Plain Python, without Textual.

``registry`` finds them in this folder. A page places ``tui.panels`` by ``tui.layout``, whose
``page`` has the base class, and whose ``frame`` adds header, tabs and keys.
"""
