"""``boltmesh check``: compares a layout with one process, step by step.

``command`` starts the ranks of the layout and then one process; ``parity`` trains and records a
trace in each, ``merging`` combines the traces of the ranks, and ``differences`` names the first
difference. The parity tests use the same code.
"""
